"""A regular expression in a stranger's tokenizer.json ends in one line, in bounded time, whatever it is matched to."""

import json
import subprocess
import sys
import time

import pytest

from polysketch.data import load_tokenizer
from polysketch.data.tokenization import bounded


def write_tokenizer(folder, pattern: str):
    vocabulary = {chr(code): code - 32 for code in range(33, 127)} | {"</s>": 0}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    described = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "</s>", **special}],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {
            "type": "WordPiece",
            "vocab": vocabulary,
            "unk_token": "!",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+b"])
def test_a_pattern_that_takes_for_ever_on_a_text_is_refused(tmp_path, monkeypatch, pattern):
    monkeypatch.setattr(bounded, "SECONDS", 0.5)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, pattern))
    assert tokenizer.encode("a") == [ord("a") - 32]
    started = time.monotonic()
    with pytest.raises(ValueError, match="a regular expression in the tokenizer's file takes too long on this text"):
        tokenizer.encode(("a" * 21 + "! ") * 400 if pattern == r"(a+)+$" else "a" * 40 + "! ")
    assert time.monotonic() - started < 10


def test_the_library_gives_up_and_it_is_told(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, r"(a+)+$"))
    with pytest.raises(ValueError, match="takes too long on this text"):
        tokenizer.encode("a" * 60 + "!")


def test_time_that_is_over_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "SECONDS", 0.0)
    monkeypatch.setattr(bounded, "SECONDS_PER_BYTE", 0.0)
    with pytest.raises(ValueError, match="expected a tokenizer within 0 seconds, found no end"):
        bounded.within_time(lambda: time.sleep(0.2), 0, "a tokenizer")


WAITING = """
import time
from polysketch.data.tokenization import bounded
bounded.SECONDS = 0.2
print(bounded.within_time(lambda: time.sleep(0.6) or "done", 0, "a tokenizer"))
"""


def test_a_process_that_is_paused_or_waits_for_a_core_is_not_refused():
    """In a process of its own: in this one, patterns of other tests may still be matched, and that counts."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_what_a_call_raises_is_raised():
    with pytest.raises(KeyError, match="mine"):
        bounded.within_time(lambda: {}["mine"], 0, "a tokenizer")


@pytest.mark.parametrize("digits", ["1099511627776", "1" + "0" * 4000, "-5"])
def test_an_id_that_asks_for_terabytes_is_refused(tmp_path, digits):
    path = write_tokenizer(tmp_path, "a")
    path.write_text(path.read_text().replace('"A": 33', f'"A": {digits}'))
    with pytest.raises(ValueError, match=r"expected ids from 0 to 4,194,303 in .*tokenizer.json, found"):
        load_tokenizer(path)
