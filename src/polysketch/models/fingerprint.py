"""Whether two models are the same: hashes of weights and configuration."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polysketch.models.transformer_lm import TransformerLM
from polysketch.ops.native import fingerprint
from polysketch.ops.native.bfloat16 import Instructions, instructions

__all__ = ["model_sha256", "programs_fingerprint", "tensors_sha256", "weights_sha256"]


def weights_sha256(model: nn.Module) -> str:
    """Hash of all weights, by name: whether a model was trained on since."""
    return tensors_sha256(model.state_dict())


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash of tensors, by name: names, dtypes and numbers, not shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + str(tensor.dtype).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def programs_fingerprint() -> str:
    """Which native programs compute a model on this machine's CPU: their sha256, shortened, or "none".

    Behind it, where the processor has them, the instructions that multiply in bfloat16: they round otherwise.
    """
    found = fingerprint()
    if found == "none" or instructions() == Instructions.PLAIN_VECTORS:
        return found
    return f"{found}-{instructions().name.lower()}"


def model_sha256(model: TransformerLM) -> str:
    """Hash of configuration and weights: two models of one hash understand each other's states."""
    config = json.dumps(model.config.to_dict(), sort_keys=True)
    return hashlib.sha256(f"{config}\n{weights_sha256(model)}".encode()).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
