"""Checkpoints: complete or absent, verified to the byte."""

import errno
import json
import shutil
from dataclasses import replace

import pytest
import torch

from polysketch.training import checkpoint as checkpoint_module
from polysketch.training.checkpoint import (
    Checkpoint,
    checkpoint_name,
    checkpoint_step,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_model_tensors,
    save_checkpoint,
    set_aside_after,
)
from polysketch.training.manifest import MANIFEST, describe, manifest_bytes
from polysketch.training.tensors import load_random_tensors


def make_checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(
        model={"weight": torch.randn(3, 4, generator=generator), "gain": torch.randn((), generator=generator)},
        optimizer={"weight/exp_avg": torch.randn(3, 4, generator=generator), "weight/step": torch.tensor(float(step))},
        random={"cpu": generator.get_state()},
        state={"step": step, "seconds": 1.5},
    )


def assert_is(found: Checkpoint, step: int) -> None:
    expected = make_checkpoint(step)
    assert found.state == expected.state
    for part in ("model", "optimizer", "random"):
        tensors, wanted = getattr(found, part), getattr(expected, part)
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_loading_gives_back_what_was_saved(tmp_path):
    path = save_checkpoint(tmp_path, make_checkpoint(7), keep=2)
    assert path == tmp_path / "step-00000007"
    assert_is(load_checkpoint(path), 7)


def test_a_checkpoint_without_optimizer_state_can_be_saved(tmp_path):
    """Before the first step there is none."""
    first = Checkpoint(
        model={"w": torch.ones(2)}, optimizer={}, random={"cpu": torch.get_rng_state()}, state={"step": 0}
    )
    assert load_checkpoint(save_checkpoint(tmp_path, first, keep=1)).optimizer == {}


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10, 4_000_000_000):
        save_checkpoint(tmp_path, make_checkpoint(step), keep=2)
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path)] == [10, 4_000_000_000]
    assert len(list(tmp_path.iterdir())) == 2


def number_of_operations(disk, folder) -> int:
    save_checkpoint(folder, make_checkpoint(2), keep=1)
    count = len(disk.log)
    disk.restart()
    return count


@pytest.mark.parametrize("end", ["killed", "torn", "power cut"])
def test_a_fault_before_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, disk, end):
    """Every write, sync, rename and delete of a save that replaces a checkpoint, one after the other."""
    template = tmp_path / "template"
    template.mkdir()
    save_checkpoint(template, make_checkpoint(1), keep=1)
    disk.restart()
    count = number_of_operations(disk, shutil.copytree(template, tmp_path / "counted"))
    assert count >= 20
    seen = set()
    for number in range(count):
        folder = shutil.copytree(template, tmp_path / f"fault-{number}")
        disk.fail_at, disk.torn = number, end == "torn"
        with pytest.raises(disk.Killed):
            save_checkpoint(folder, make_checkpoint(2), keep=1)
        if end == "power cut":
            disk.cut_power()
        disk.restart()
        for path in list_checkpoints(folder):  # whatever has a proper name is complete
            assert_is(load_checkpoint(path), checkpoint_step(path))
        seen.add(checkpoint_step(find_checkpoint(folder)))
        assert_is(load_checkpoint(save_checkpoint(folder, make_checkpoint(3), keep=1)), 3)
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]  # no leftovers
        disk.restart()
    assert seen == {1, 2}


def test_everything_is_synced_before_it_is_named_and_the_name_before_anything_is_deleted(tmp_path, disk):
    save_checkpoint(tmp_path, make_checkpoint(1), keep=1)
    disk.restart()
    new = save_checkpoint(tmp_path, make_checkpoint(2), keep=1)
    named = next(index for index, (name, paths) in enumerate(disk.log) if name == "rename" and paths[1] == new)
    temporary = disk.log[named][1][0]
    written = [paths[0] for name, paths in disk.log if name == "write"]
    assert len(written) == 5
    for path in [*written, temporary]:
        assert ("sync", (path,)) in disk.log[:named]
    assert disk.log[named + 1] == ("sync", (tmp_path,))
    assert all(name not in ("delete", "delete_folder") for name, _ in disk.log[: named + 2])


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("bit", [0, 5])
def test_one_flipped_bit_anywhere_is_refused_with_the_name_of_the_file(tmp_path, name, place, bit):
    path = save_checkpoint(tmp_path, make_checkpoint(5), keep=1) / name
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=r"(expected .* found|is missing)") as caught:
        load_checkpoint(path.parent)
    assert str(tmp_path) in str(caught.value)


def test_the_message_tells_file_expected_found_and_another_checkpoint(tmp_path):
    save_checkpoint(tmp_path, make_checkpoint(4), keep=2)
    path = save_checkpoint(tmp_path, make_checkpoint(5), keep=2) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model.safetensors: expected sha256 \w{64}, found \w{64}.*step-00000004"):
        load_checkpoint(path.parent)


def test_a_truncated_file_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, make_checkpoint(5), keep=1) / "optimizer.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"optimizer.safetensors: expected {size} bytes, found {size - 1}: truncated"):
        load_checkpoint(path.parent)


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_missing_file_is_refused(tmp_path, name):
    path = save_checkpoint(tmp_path, make_checkpoint(5), keep=1)
    (path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        load_model_tensors(path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 2, "files": {}}', "not JSON"])
def test_a_manifest_of_another_form_is_refused(tmp_path, content):
    path = save_checkpoint(tmp_path, make_checkpoint(5), keep=1)
    (path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest.json: expected a manifest of format 1"):
        load_checkpoint(path)


def test_the_weights_can_be_loaded_when_only_the_optimizer_is_damaged(tmp_path):
    path = save_checkpoint(tmp_path, make_checkpoint(5), keep=1)
    (path / "optimizer.safetensors").write_bytes(b"")
    assert torch.equal(load_model_tensors(path)["weight"], make_checkpoint(5).model["weight"])


def test_an_unknown_checkpoint_is_refused_with_those_that_exist(tmp_path):
    save_checkpoint(tmp_path, make_checkpoint(3), keep=1)
    with pytest.raises(FileNotFoundError, match=r"'step-00000009'.*found step-00000003"):
        find_checkpoint(tmp_path, checkpoint_name(9))
    with pytest.raises(FileNotFoundError, match=r"'latest'.*found none"):
        find_checkpoint(tmp_path / "nowhere")


def test_setting_aside_deletes_nothing_and_hides_later_checkpoints(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, make_checkpoint(step), keep=5)
    moved = set_aside_after(tmp_path, 1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert [json.loads((path / "state.json").read_bytes())["step"] for path in moved] == [2, 3]
    save_checkpoint(tmp_path, make_checkpoint(2), keep=5)
    assert [path.name for path in set_aside_after(tmp_path, 1)] == ["set-aside-step-00000002-1"]


def test_a_full_disk_is_an_os_error_with_the_path_and_spares_the_old_checkpoint(tmp_path, disk):
    save_checkpoint(tmp_path, make_checkpoint(1), keep=1)
    disk.restart()
    disk.fail_at, disk.torn = 3, True
    disk.error = lambda path: OSError(errno.ENOSPC, "No space left on device", str(path))
    with pytest.raises(OSError, match=r"No space left on device.*step-00000002"):
        save_checkpoint(tmp_path, make_checkpoint(2), keep=1)
    assert_is(load_checkpoint(find_checkpoint(tmp_path)), 1)


def exchange(path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint together with its line in the manifest."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / MANIFEST).read_bytes())
    manifest["files"][name] = describe(data)
    (path / MANIFEST).write_bytes(manifest_bytes(manifest["files"]))


@pytest.mark.parametrize("data", [b"", b"garbage" * 100, b"\x00" * 64])
def test_a_file_that_holds_no_tensors_is_refused_although_its_sum_is_right(tmp_path, data):
    path = save_checkpoint(tmp_path, make_checkpoint(7), keep=2)
    exchange(path, "model.safetensors", data)
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a safetensors file, found something else"):
        load_model_tensors(path)


@pytest.mark.parametrize(
    "data", [b"null", b"[]", b"{}", b'{"step": 6}', b'{"step": "7"}', b'{"step": 7, "seconds": "x"}', b"\xff", b"{"]
)
def test_a_state_of_another_step_is_refused_although_its_sum_is_right(tmp_path, data):
    path = save_checkpoint(tmp_path, make_checkpoint(7), keep=2)
    exchange(path, "state.json", data)
    with pytest.raises(ValueError, match=r"state\.json: expected the state of step 7, found something else"):
        load_checkpoint(path)


@pytest.mark.parametrize("states", [{}, {"cpu": torch.zeros(10, dtype=torch.uint8)}, {"cpu": torch.zeros(5056)}])
def test_random_states_that_do_not_fit_are_refused_and_change_nothing(states):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="expected the state of the CPU's random generator"):
        load_random_tensors(states)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_that_was_moved_and_linked_back_keeps_its_content(tmp_path):
    """When it is one of the older ones, its name goes; what it points to is the user's."""
    runs, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    runs.mkdir()
    save_checkpoint(runs, make_checkpoint(1), keep=2)
    (runs / "step-00000001").rename(elsewhere)
    (runs / "step-00000001").symlink_to(elsewhere)
    for step in (2, 3, 4):
        save_checkpoint(runs, make_checkpoint(step), keep=2)
    assert [checkpoint_step(path) for path in list_checkpoints(runs)] == [3, 4]
    assert_is(load_checkpoint(elsewhere.rename(tmp_path / "step-00000001")), 1)


def test_a_planted_leftover_deletes_nothing_of_others(tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis").write_text("all of it")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step-00000002.tmp").symlink_to(tmp_path / "others")
    save_checkpoint(tmp_path / "checkpoints", make_checkpoint(2), keep=1)
    assert (tmp_path / "others" / "thesis").read_text() == "all of it"


def test_a_manifest_whose_pieces_are_not_all_there_is_refused_before_their_names_are_made(tmp_path):
    path = save_checkpoint(tmp_path, make_checkpoint(5), keep=1)
    entry = describe((path / "model.safetensors").read_bytes())
    for name in ("model-1-of-999999999999", "model-00002-of-2", "model-00002-of-1"):
        (path / MANIFEST).write_bytes(manifest_bytes({f"{name}.safetensors": entry}))
        with pytest.raises(
            ValueError, match=r"manifest.json: expected all pieces of model-\*-of-\d+\.safetensors, found 1"
        ):
            load_model_tensors(path)


def test_a_file_far_larger_than_listed_is_refused_unread(tmp_path):
    """A hole of a terabyte, which takes no room on the disk: reading it would take all memory."""
    path = save_checkpoint(tmp_path, make_checkpoint(5), keep=1)
    with open(path / "model.safetensors", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"model.safetensors: expected \d+ bytes, found 1099511627776"):
        load_model_tensors(path)


@pytest.mark.parametrize("gone", ["the newest", "the best"])
def test_the_best_is_found_though_the_run_goes_on_meanwhile(gone, tmp_path, monkeypatch):
    """Between two looks the writer saves step 3, the new best, and deletes what was there."""

    def saved(step: int, best: int) -> None:
        checkpoint = make_checkpoint(step)
        state = {**checkpoint.state, "best": {"step": best, "loss": 1.0 / step}}
        save_checkpoint(tmp_path, replace(checkpoint, state=state), keep=1)

    saved(1, 1)
    saved(2, 1)
    read = checkpoint_module.load_state

    def overtaken(path):
        if path.name != "step-00000002":
            return read(path)
        state = read(path) if gone == "the best" else None
        saved(3, 3)
        return state or read(path)

    monkeypatch.setattr(checkpoint_module, "load_state", overtaken)
    assert find_checkpoint(tmp_path, "best").name == "step-00000003"


def test_a_best_checkpoint_that_is_missing_is_told(tmp_path):
    checkpoint = make_checkpoint(2)
    state = {**checkpoint.state, "best": {"step": 1, "loss": 1.0}}
    save_checkpoint(tmp_path, replace(checkpoint, state=state), keep=1)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint 'best' in .*: step-00000001, .* is missing"):
        find_checkpoint(tmp_path, "best")
