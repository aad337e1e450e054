"""A conversation as a file: the state after its tokens, for the model that read them and no other."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from polysketch.attention import KeyValueState
from polysketch.extras import require
from polysketch.generation.slots import state_of_one
from polysketch.generation.state_tensors import growing_parts, mapped, named_tensors
from polysketch.models import ModelState, TransformerLM
from polysketch.models.fingerprint import model_sha256, tensors_sha256
from polysketch.storage import disk

__all__ = ["load_conversation", "save_conversation"]

_TOKENS = "tokens"
_MODEL = "model_sha256"
_TENSORS = "tensors_sha256"
_POSITION = "position"
_OF_THE_DEVICE = "device_position"
_OF_EVERY_TOKEN = ("key", "value")
"""Names of the tensors of `KeyValueState`."""


def save_conversation(path: str | Path, model: TransformerLM, tokens: Sequence[int], state: ModelState) -> None:
    """Write a state of one row and the tokens that it has read to a safetensors file, which appears whole.

    Cost: the bytes of the state, and a hash over the model's weights. Layers that keep keys and values of all tokens
    make the file grow with them.

    Args:
        path: of the file.
        model: that read the tokens.
        tokens: all that the state has read.
        state: as `Snapshots` keep it, or of `model.extend`.

    Raises:
        ValueError: a state of several rows, or of another number of tokens.
        ImportError: the extra `train`, which brings safetensors, is missing.
    """
    if state.position.tolist() != [len(tokens)]:
        raise ValueError(f"expected a state of one row after {len(tokens)} tokens, found {state.position.tolist()}")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _kept(state).items()}
    tensors[_TOKENS] = torch.tensor(tokens, dtype=torch.int64)
    metadata = {_MODEL: model_sha256(model), _TENSORS: tensors_sha256(tensors)}
    contents = require("safetensors.torch").save(tensors, metadata=metadata)
    disk.replace_file(Path(path), contents)


@torch.no_grad()
def load_conversation(path: str | Path, model: TransformerLM) -> tuple[list[int], ModelState]:
    """Read what `save_conversation` wrote, every byte verified; nothing is unpickled.

    Returns:
        The tokens, and the state after them on the model's device: for `Snapshots.keep` or `model.extend`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is none of these, damaged, or another model wrote it.
    """
    metadata, tensors = _read(Path(path))
    if metadata.get(_TENSORS) != tensors_sha256(tensors):
        raise ValueError(f"{path}: expected the sha256 that the file states, found another: the file is damaged")
    expected = model_sha256(model)
    if metadata.get(_MODEL) != expected:
        raise ValueError(
            f"{path}: expected a conversation of this model ({expected[:12]}), found one of "
            f"{metadata.get(_MODEL, 'no model')[:12]}: a state means nothing to other weights"
        )
    with torch.inference_mode():  # as its states of one row are
        state = state_of_one(model)
    tokens = tensors.pop(_TOKENS, torch.zeros(0, dtype=torch.int64)).tolist()
    if _shapes(state, len(tokens)) != {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}:
        raise ValueError(
            f"{path}: expected the tensors of a state of this model, found others: kept in another dtype "
            "(keep_states_in), or altered by hand?"
        )
    _require_positions(tensors, len(tokens), path)
    with torch.inference_mode():
        filled = _filled(state, tensors)
    return tokens, filled.clone()  # whose copies of positions on the device are made of these, for use in any mode


def _require_positions(tensors: Mapping[str, torch.Tensor], count: int, path: str | Path) -> None:
    """Refuse positions that are not the number of tokens: programs in C++ find their place in a window by them."""
    for name, tensor in tensors.items():
        if name.split("/")[-1] == _POSITION and bool((tensor != count).any()):
            raise ValueError(
                f"{path}: expected {count} tokens read in {name}, found {tensor.tolist()}: altered by hand?"
            )


def _kept(state: ModelState) -> dict[str, torch.Tensor]:
    """The tensors to write: of positions, those in host memory; of keys and values, those of the tokens so far."""
    fixed = {name: tensor for name, tensor in named_tensors(state).items() if not name.endswith(_OF_THE_DEVICE)}
    parts = growing_parts(state).items()
    return {**fixed, **{f"{path}/{name}": tensor for path, part in parts for name, tensor in part.tensors().items()}}


def _shapes(state: ModelState, tokens: int) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor of a state after so many tokens, from the state after a single one."""
    growing = set(growing_parts(state))  # states of constant size may have tensors of the same names
    wanted = {}
    for name, tensor in _kept(state).items():
        grows = name.rpartition("/")[0] in growing
        shape = torch.Size((*tensor.shape[:2], tokens, tensor.shape[3])) if grows else tensor.shape
        wanted[name] = (shape, tensor.dtype)
    return wanted


def _filled(state: ModelState, tensors: dict[str, torch.Tensor]) -> ModelState:
    """The state with these numbers in it."""
    for name, tensor in named_tensors(state).items():
        if name in tensors:
            tensor.copy_(tensors[name])
    paths = {id(part): path for path, part in growing_parts(state).items()}

    def read(part: KeyValueState) -> KeyValueState:
        found = KeyValueState(1, state.device)
        found.append(*(tensors[f"{paths[id(part)]}/{name}"] for name in _OF_EVERY_TOKEN))
        return found

    return mapped(state, lambda tensor: tensor, growing=read)


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    safetensors = require("safetensors")
    if not path.is_file():
        raise FileNotFoundError(f"expected a conversation's file, found nothing at {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: expected the file of a conversation, found something else: {error}") from error
