"""A conversation as a file: the state after its tokens, for the model that read them and no other."""

from collections.abc import Sequence
from pathlib import Path

import torch

from polysketch.extras import require
from polysketch.generation.slots import state_of_one
from polysketch.generation.state_tensors import named_tensors
from polysketch.models import ModelState, TransformerLM
from polysketch.models.fingerprint import model_sha256
from polysketch.storage import disk

__all__ = ["load_conversation", "save_conversation"]

_TOKENS = "tokens"
_MODEL = "model_sha256"
_OF_THE_DEVICE = "device_position"


def save_conversation(path: str | Path, model: TransformerLM, tokens: Sequence[int], state: ModelState) -> None:
    """Write a state of one row and the tokens that it has read to a safetensors file, which appears whole.

    Cost: the bytes of the state, and a hash over the model's weights.

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
    contents = require("safetensors.torch").save(tensors, metadata={_MODEL: model_sha256(model)})
    disk.replace_file(Path(path), contents)


@torch.inference_mode()
def load_conversation(path: str | Path, model: TransformerLM) -> tuple[list[int], ModelState]:
    """Read what `save_conversation` wrote; nothing is unpickled.

    Returns:
        The tokens, and the state after them on the model's device: for `Snapshots.keep` or `model.extend`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is none of these, or another model wrote it.
    """
    metadata, tensors = _read(Path(path))
    expected = model_sha256(model)
    if metadata.get(_MODEL) != expected:
        raise ValueError(
            f"{path}: expected a conversation of this model ({expected[:12]}), found one of "
            f"{metadata.get(_MODEL, 'no model')[:12]}: a state means nothing to other weights"
        )
    state = state_of_one(model)
    wanted = _kept(state)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in wanted.items()}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items() if name != _TOKENS}
    if shapes != found or _TOKENS not in tensors:
        raise ValueError(f"{path}: expected the tensors of a state of this model, found others: altered by hand?")
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])
    return tensors[_TOKENS].tolist(), state.clone()  # whose copies of positions on the device are made of these


def _kept(state: ModelState) -> dict[str, torch.Tensor]:
    """The tensors to write: of positions, those in host memory."""
    return {name: tensor for name, tensor in named_tensors(state).items() if not name.endswith(_OF_THE_DEVICE)}


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    safetensors = require("safetensors")
    if not path.is_file():
        raise FileNotFoundError(f"expected a conversation's file, found nothing at {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: expected the file of a conversation, found something else: {error}") from error
