"""Tensors in pieces make the whole again, and what is missing or does not fit is told."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from polysketch.distributed import storage
from polysketch.distributed.agreement import disagreement
from polysketch.distributed.pieces import joined_pieces

WHOLE = torch.arange(15.0).view(5, 3)


def piece(name: str, tensor, offsets, shape) -> tuple[Path, bytes]:
    pieces = json.dumps({name: {"shape": shape, "offsets": offsets}})
    return Path(f"{offsets[0]}.safetensors"), save({name: tensor.contiguous()}, metadata={"pieces": pieces})


def test_pieces_make_the_whole():
    files = [piece("w", WHOLE[:2], [0, 0], [5, 3]), piece("w", WHOLE[2:], [2, 0], [5, 3])]
    files.append((Path("whole"), save({"bias": torch.ones(2), "steps": torch.tensor(3)})))
    found = joined_pieces(files)
    assert found.keys() == {"w", "bias", "steps"}
    assert torch.equal(found["w"], WHOLE)
    assert found["steps"] == 3


def test_which_file_has_what_does_not_depend_on_the_order_of_the_tensors(monkeypatch):
    """PyTorch gives what copies have in common to the smallest file so far; a resumed run has another order."""
    orders = []
    monkeypatch.setattr(storage.dcp, "save", lambda tensors, **options: orders.append(list(tensors)))
    for names in (["model/b", "model/a", "optimizer/c"], ["optimizer/c", "model/a", "model/b"]):
        storage.save_pieces({name: WHOLE for name in names}, writer=None, group=None)
    assert orders[0] == orders[1]


def test_a_missing_piece_is_told():
    with pytest.raises(ValueError, match=r"pieces of 'w' that make one tensor"):
        joined_pieces([piece("w", WHOLE[:2], [0, 0], [5, 3])])


def test_pieces_of_different_tensors_are_told():
    with pytest.raises(ValueError, match=r"pieces of 'w' that make one tensor"):
        joined_pieces([piece("w", WHOLE[:2], [0, 0], [5, 3]), piece("w", WHOLE[2:], [2, 0], [6, 3])])


def test_what_is_no_tensor_file_is_told():
    with pytest.raises(ValueError, match="expected a safetensors file"):
        joined_pieces([(Path("x"), b"no tensors at all")])


def test_a_disagreement_names_ranks_and_values():
    same = {"steps": 3, "code": "a"}
    assert disagreement([same, dict(same), dict(same)]) is None
    found = disagreement([same, same, same, {"steps": 4, "code": "a"}])
    assert found is not None
    assert "found steps 3 on ranks 0 to 2 and 4 on rank 3:" in found
    assert "code" not in found.partition(":")[0]
