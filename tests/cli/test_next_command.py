"""A person who pastes the line that each command ends with gets from a book to a model in transformers."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from polysketch.cli.next_command import next_command, open_in_transformers

LENGTH = "--layers 1 --context 64 --batch-size 2 --steps 2 --save-every 1 --eval-every 1 --eval-tokens 128 --device cpu"

BOOK = "\n\n".join(f"Chapter {number}. There was a sketch of {number**3} elephants." for number in range(400))


@pytest.fixture
def shell(tmp_path):
    """A function that gives a line to a shell in a folder with a space in its name, and returns the next line."""
    folder = tmp_path / "my books"
    folder.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def give(line: str, answers: str = "") -> str:
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env={**os.environ, "PATH": path}, input=answers, text=True,
            capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        give.shown = done.stdout
        lines = [each for each in (done.stdout + done.stderr).splitlines() if each.startswith("next: ")]
        assert len(lines) <= 1
        return lines[0].removeprefix("next: ") if lines else ""

    give.folder = folder
    return give


def test_the_words_are_quoted_for_a_shell():
    line = next_command("evaluate", Path("my run's"), "--context", "64")
    assert shlex.split(line) == ["next:", "polysketch", "evaluate", "my run's", "--context", "64"]


@pytest.mark.full
def test_from_a_book_to_transformers_by_pasting_lines(shell):
    (shell.folder / "a book.txt").write_text(BOOK)
    line = shell("polysketch prepare 'a book.txt' --tokenizer bytes --out 'my data'")
    assert line == "polysketch train --data 'my data' --preset tiny --out 'runs/my data'"
    line = shell(f"{line} {LENGTH}")  # as it stands it takes five minutes
    assert line == "polysketch evaluate 'runs/my data'"
    line = shell(line)
    assert line == "polysketch generate 'runs/my data' --interactive"
    line = shell(line, answers="Once\n")
    assert line == "polysketch export 'runs/my data' 'runs/my data-exported'"
    line = shell(line)
    assert line.startswith("python -c ")
    assert shell(line) == ""
    assert shell.shown.startswith("The ")
    line = shell(f"polysketch train --data 'my data' --preset tiny --attention softmax --out 'runs/softmax' {LENGTH}")
    shell("polysketch compare 'runs/my data' 'runs/softmax'")
    assert "runs/softmax" in shell.shown


@pytest.mark.full
def test_a_converted_model_is_evaluated_by_pasting_the_line(shell, softmax_llama):
    (shell.folder / "book.txt").write_text(BOOK)
    shell("polysketch prepare 'book.txt' --tokenizer bytes --out 'my data'")
    length = "--context 64 --batch-size 1 --transfer-steps 1 --tuning-steps 1 --eval-tokens 128 --device cpu"
    options = "--attention polysketch --attention-options window=16"
    line = shell(f"polysketch convert {softmax_llama} --data 'my data' {options} {length} --out 'my conversion'")
    assert line == "polysketch evaluate 'my conversion/model' --data 'my data' --context 64"
    assert shell(line) == "polysketch generate 'my conversion/model' --interactive"


@pytest.fixture
def softmax_llama(tmp_path) -> Path:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=128, **sizes)).save_pretrained(
        tmp_path / "llama"
    )
    return tmp_path / "llama"


def test_what_writes_no_text_has_no_line(tmp_path):
    for architectures in ('["PolysketchForMaskedLM"]', "[]", "null"):
        (tmp_path / "config.json").write_text(f'{{"architectures": {architectures}}}')
        assert open_in_transformers(tmp_path) is None
    (tmp_path / "config.json").write_text('{"architectures": ["PolysketchForCausalLM"]}')
    assert open_in_transformers(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert shlex.split(open_in_transformers(tmp_path))[:3] == ["next:", "python", "-c"]
