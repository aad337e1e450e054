"""Tuned constants are used for the device, the Triton and the programs that they were found with, and for no other."""

import json
import warnings

import pytest
import torch

from polysketch.ops.triton import configurations, provenance, tuned
from polysketch.ops.triton.configurations import as_if_on, configuration, forget_tuned, generation

PROGRAM = "linear_upstream"
CPU = torch.device("cpu")
TUNED = {"TOKENS": 16, "num_warps": 8, "num_stages": 3}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (configurations._entries, tuned._say):
        cached.cache_clear()
    yield tmp_path
    for cached in (configurations._entries, tuned._say):
        cached.cache_clear()


def keep(**found_with) -> None:
    """One tuned entry, found with what is here but for the changes."""
    entry = {"where": {}, "use": TUNED, "found_with": {**provenance.provenance(PROGRAM, CPU), **found_with}}
    write(json.dumps({generation(CPU): [entry]}))


def write(text: str) -> None:
    path = tuned.tuned_file(PROGRAM)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    forget_tuned()


def test_what_was_found_with_what_is_here_is_used():
    keep()
    assert configuration(PROGRAM, CPU) == TUNED


@pytest.mark.parametrize("other", [{"triton": "3.1.0"}, {"source": "another digest"}, {"capability": [8, 0]}], ids=str)
def test_what_was_found_with_another_triton_or_another_source_is_ignored_and_said_once(other):
    keep(**other)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            assert configuration(PROGRAM, CPU) != TUNED
            forget_tuned()
    assert len(said) == 1
    assert "are not used: they were found with another Triton, or other programs" in str(said[0].message)


def test_an_entry_that_does_not_say_what_it_was_found_with_is_ignored():
    write(json.dumps({generation(CPU): [{"where": {}, "use": TUNED}]}))
    with pytest.warns(UserWarning, match="are not used"):
        assert configuration(PROGRAM, CPU) != TUNED


def test_what_was_found_on_another_device_is_ignored_without_a_word():
    keep(device="NVIDIA H100")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert configuration(PROGRAM, CPU) != TUNED


def test_a_program_compiled_for_a_device_that_is_not_there_has_shipped_constants():
    keep()
    with as_if_on((9, 0)):
        assert configuration(PROGRAM, CPU) != TUNED
    assert configuration(PROGRAM, CPU) == TUNED


@pytest.mark.parametrize("text", ["{", "[]", '{"sm_90": 3}', '{"sm_90": [{"where": 1}]}'])
def test_a_file_that_cannot_be_read_is_ignored(text):
    write(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert configuration(PROGRAM, CPU)["TOKENS"] == 64


def test_what_another_process_wrote_is_found_after_forgetting():
    assert configuration(PROGRAM, CPU) != TUNED
    keep()
    assert configuration(PROGRAM, CPU) == TUNED


def test_a_digest_follows_the_modules_of_a_program_and_no_other(monkeypatch, tmp_path):
    texts = {
        "alone": "@triton.jit\ndef alone(x):\n    pass\n",
        "program": "from polysketch.ops.parts import part\n\n@triton.jit\ndef program_variant(x):\n    pass\n",
        "parts": "@triton.jit\ndef part(x):\n    pass\n",
    }

    def digests(**changed: str) -> list[str]:
        for name, text in (texts | changed).items():
            (tmp_path / f"{name}.py").write_text(text)
        for cached in (provenance._sources, provenance.source_digest):
            cached.cache_clear()
        return [provenance.source_digest(name) for name in ("program", "alone")]

    monkeypatch.setattr(provenance, "OPS", tmp_path)
    try:
        before = digests()
        part, alone = digests(parts=texts["parts"] + "# changed"), digests(alone=texts["alone"] + "# changed")
        assert part[0] != before[0] == alone[0]
        assert part[1] == before[1] != alone[1]
        with pytest.raises(FileNotFoundError, match="no module below"):
            provenance.source_digest("absent")
    finally:
        for cached in (provenance._sources, provenance.source_digest):
            cached.cache_clear()


def test_every_program_with_a_file_of_configurations_has_a_source():
    names = sorted(path.stem for path in (configurations.FOLDER).glob("*.json"))
    assert names
    assert all(provenance.source_digest(name) for name in names)
    assert provenance.source_digest("linear_fold") != provenance.source_digest("linear_outputs")
