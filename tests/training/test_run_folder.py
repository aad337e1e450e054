"""config.json: what is not a run's configuration is refused with what is missing."""

import json
from typing import Any

import pytest

from polysketch.training.run_folder import RunFolder

CONFIG: dict[str, Any] = {
    "training": {"context": 8, "extend": False},
    "resolved": {"dtype": "float32"},
    "model": {},
    "data": {"folder": "data", "description_sha256": "0"},
    "environment": {},
}


def read(tmp_path, content: str) -> dict[str, Any]:
    run = RunFolder(tmp_path)
    run.config.write_text(content)
    return run.read_config()


def test_a_whole_configuration_is_read(tmp_path):
    assert read(tmp_path, json.dumps(CONFIG)) == CONFIG


@pytest.mark.parametrize("name", CONFIG)
@pytest.mark.parametrize("value", [None, [], "text"])
def test_an_entry_that_is_no_object_is_named(tmp_path, name, value):
    with pytest.raises(
        ValueError, match=f"config.json: expected the entries .* found none of the right type of {name}:"
    ):
        read(tmp_path, json.dumps(CONFIG | {name: value}))


@pytest.mark.parametrize("key", ["training.context", "resolved.dtype", "data.folder", "data.description_sha256"])
def test_a_missing_entry_is_named(tmp_path, key):
    name, _, inner = key.partition(".")
    changed = {k: v for k, v in CONFIG[name].items() if k != inner}
    with pytest.raises(
        ValueError, match=f"config.json: expected the entries .* found none of the right type of {key}:"
    ):
        read(tmp_path, json.dumps(CONFIG | {name: changed}))


@pytest.mark.parametrize(("key", "value"), [("training.context", "64"), ("data.folder", None)])
def test_an_entry_of_another_type_is_named(tmp_path, key, value):
    name, _, inner = key.partition(".")
    with pytest.raises(ValueError, match=f"config.json: expected the entries .* of the right type of {key}:"):
        read(tmp_path, json.dumps(CONFIG | {name: CONFIG[name] | {inner: value}}))


@pytest.mark.parametrize("written", [0, 99, "3", True, None])
def test_a_format_that_is_not_known_is_refused(tmp_path, written):
    """Rather than read as this one."""
    with pytest.raises(ValueError, match=r"config\.json: expected a format from 1 to 4, found "):
        read(tmp_path, json.dumps(CONFIG | {"format": written}))


@pytest.mark.parametrize("content", ["null", "[]", "1", '"text"'])
def test_json_that_is_no_configuration_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match=r"config\.json: expected an object of JSON, found "):
        read(tmp_path, content)


@pytest.mark.parametrize("content", ["", "{", "no json"])
def test_what_is_no_json_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match=r"expected JSON in .*config\.json, found something else"):
        read(tmp_path, content)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "tokenizer", "tensorboard", "loss.png"])
def test_links_are_refused_where_a_run_would_write(tmp_path, name):
    (tmp_path / "others").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "others")
    with pytest.raises(ValueError, match=f"{name}: expected a file or folder of the run's own, found a symbolic link"):
        RunFolder(tmp_path / "run").require_own()


def test_checkpoints_may_be_on_another_disk(tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "others")
    RunFolder(tmp_path / "run").require_own()


def test_one_changed_number_in_a_configuration_is_found(tmp_path):
    run = RunFolder(tmp_path)
    run.write_config(CONFIG)
    assert run.read_config() == CONFIG
    content = run.config.read_text()
    run.config.write_text(content.replace('"context": 8', '"context": 9'))
    with pytest.raises(ValueError, match=r"config\.json: expected the content that its own sha256 states"):
        run.read_config()


def test_every_flipped_bit_of_a_configuration_is_found_or_changes_nothing(tmp_path):
    run = RunFolder(tmp_path)
    run.write_config(CONFIG)
    content = run.config.read_bytes()
    for place in range(len(content)):
        run.config.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
        try:
            found = run.read_config()
        except ValueError:
            continue
        assert {name: found[name] for name in CONFIG} == CONFIG


def test_the_folder_of_a_conversion_says_where_its_model_is(tmp_path):
    with pytest.raises(ValueError, match=r"found that of a conversion: its model is in .*model, once"):
        read(tmp_path, json.dumps({"format": 3, "identity": "0f", "conversion": {}}))
