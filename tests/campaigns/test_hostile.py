"""The campaign of hostile files finds nothing in ours, and finds what is planted."""

import pickle
import time

import pytest
from campaigns.readers import Reader

from campaigns import hostile, hostile_files, hostile_templates, readers
from polysketch.cli import terminal
from polysketch.data.tokenization import BpeTokenizer, bounded, json_file
from polysketch.integrations import tokenizer_bounds
from polysketch.integrations.template import Template
from polysketch.ops.native import build, why_unavailable

pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="every attack is a fork")
needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
SMALL = ("a state", "a conversation", "tables of text", "records of studies", "prompts and split tables", "a task")
SLOW = ("temporary names", "bombs")


@pytest.fixture
def small(monkeypatch):
    """Readers whose files are made at once."""
    monkeypatch.setattr(readers, "READERS", {name: readers.READERS[name] for name in SMALL})


def only(monkeypatch, read, name="a state", **more):
    """One reader, with a fault."""
    monkeypatch.setattr(readers, "READERS", {name: Reader(readers.READERS[name].make, read, **more)})


def faults(count, folder, part):
    return hostile.campaign(count, 3, folder, (part,)).faults


@pytest.mark.usefixtures("small")
def test_dozens_of_attacks_find_nothing(tmp_path):
    found = hostile.campaign(2, 3, tmp_path, ("pickles", "names", "links", "pipes", "escapes"))
    assert found.faults == []
    assert sum(found.outcomes.values()) == 10


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("part", ["sizes", *(pytest.param(one, marks=pytest.mark.full) for one in SLOW)])
def test_a_few_that_ask_for_memory_or_guess_names_find_nothing(part, tmp_path):
    assert faults(2, tmp_path, part) == []


@needs_compiler
def test_the_cache_of_programs_holds(tmp_path):
    assert faults(6, tmp_path, "cache") == []


def test_a_reader_that_unpickles_is_found(monkeypatch, tmp_path):
    def read(folder):
        for path in sorted(folder.rglob("*.p*")):
            pickle.loads(path.read_bytes())

    only(monkeypatch, read)
    assert any("code from a file ran" in fault for fault in faults(8, tmp_path, "pickles"))


def test_a_reader_that_writes_through_links_is_found(monkeypatch, tmp_path):
    only(monkeypatch, lambda folder: [path.write_text("x") for path in folder.iterdir() if path.is_file()])
    assert any("a file outside was changed" in fault for fault in faults(8, tmp_path, "links"))


def test_a_reader_that_shows_a_file_outside_is_found(monkeypatch, tmp_path):
    only(monkeypatch, lambda folder: [print(path.read_text(errors="replace")) for path in folder.iterdir()])
    assert any("a file outside was read and shown" in fault for fault in faults(8, tmp_path, "links"))


@pytest.mark.full
def test_a_reader_that_waits_for_a_pipe_is_found(monkeypatch, tmp_path):
    only(monkeypatch, lambda folder: [path.read_bytes() for path in folder.iterdir() if path.is_fifo()], seconds=1)
    assert any("hangs" in fault for fault in faults(8, tmp_path, "pipes"))


@pytest.mark.full
def test_memory_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(hostile, "PEAK", 1 << 27)
    only(monkeypatch, lambda folder: not b"x" * (1 << 31))  # more than all pages of libraries in a process of tests
    assert any(" took " in fault for fault in faults(1, tmp_path, "sizes"))


@pytest.mark.full
def test_an_escape_that_reaches_the_terminal_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(terminal, "visible", lambda text: text)
    monkeypatch.setattr(readers, "READERS", {"records of studies": readers.READERS["records of studies"]})
    assert any("steers the terminal" in fault for fault in faults(12, tmp_path, "escapes"))


@pytest.mark.full
@pytest.mark.parametrize(("module", "by"), [(json_file, "by ours"), (tokenizer_bounds, "by transformers")])
def test_a_pattern_without_a_bound_is_found(module, by, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "within_time", lambda call, num_bytes, what: call())
    monkeypatch.setattr(hostile_files, "PATTERNS", ("(a+)+$",))
    monkeypatch.setattr(hostile_files, "make_sources", small_tokenizer)
    monkeypatch.setattr(hostile_files, "TEXTS", ("a" * 40 + "! ",))
    monkeypatch.setattr(hostile_files, "PATIENCE", 8)
    monkeypatch.setattr(bounded, "SECONDS", 0.5)
    monkeypatch.setattr(bounded, "SECONDS_PER_BYTE", 0.0)
    assert any(by in fault for fault in faults(3, tmp_path, "patterns"))


def small_tokenizer(folder):
    for name in ("data", "exported"):
        (folder / name).mkdir(parents=True)
        BpeTokenizer.train(["some text"], 257).save(folder / name)
    (folder / "exported" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "exported" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.mark.full
def test_templates_of_chats_hold(monkeypatch, tmp_path):
    monkeypatch.setattr(hostile_templates, "_OF_A_TEMPLATE", 0.3)
    found = hostile.campaign(5, 1, tmp_path, ("templates",))
    assert found.faults == []
    assert found.outcomes["templates: refused"] > 2


@pytest.fixture
def a_template_everywhere(monkeypatch):
    """Also where other things than text are planted."""
    monkeypatch.setattr(hostile_templates, "_NO_TEXT", ("a template",))


@pytest.mark.full
@pytest.mark.usefixtures("a_template_everywhere")
def test_a_template_without_a_bound_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(Template, "render", lambda self, messages: time.sleep(60))
    monkeypatch.setattr(hostile_templates, "SECONDS", 5)
    assert any("hangs" in fault for fault in faults(1, tmp_path, "templates"))


@pytest.mark.full
@pytest.mark.usefixtures("a_template_everywhere")
def test_a_template_that_runs_code_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(Template, "render", lambda self, messages: (tmp_path / "templates" / "canary").touch() or "x")
    assert any("code from a template ran" in fault for fault in faults(1, tmp_path, "templates"))


@pytest.mark.full
@needs_compiler
def test_a_planted_program_that_is_loaded_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "find_trusted", lambda folder, stem: next(folder.glob(f"{stem}-*.so"), None))
    monkeypatch.setattr(build, "why_folder_untrusted", lambda folder: None)
    assert any("code that others planted ran" in fault for fault in faults(8, tmp_path, "cache"))


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_hundreds_of_attacks_find_nothing(tmp_path):
    assert hostile.campaign(15, 5, tmp_path).faults == []
