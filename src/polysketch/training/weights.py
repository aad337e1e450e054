"""A model's tensors by plain name, and putting them back with a clear word when they do not fit."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polysketch.training.optimizer import plain_name

_NAMED = 3


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers of `model` under names free of wrappers' prefixes."""
    return {plain_name(name): tensor for name, tensor in model.state_dict().items()}


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Put `tensors` into `model`; every tensor of the model must be there, with its shape, and no other.

    Args:
        model: the model to fill.
        tensors: as `model_tensors` gave them.
        source: where they come from, for messages.

    Raises:
        ValueError: they belong to another configuration (the first differing names are listed), or a number in them is
            not finite. Nothing is changed then.
    """
    own = model_tensors(model)
    missing, unexpected = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unexpected:
        raise ValueError(
            f"{source} belongs to another model configuration: "
            f"it lacks {_some(missing)} and has {_some(unexpected)} in excess"
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(
                f"{source} belongs to another model configuration: {name}: "
                f"expected shape {tuple(tensor.shape)}, found {tuple(tensors[name].shape)}"
            )
    _refuse_bad_numbers(own, tensors, source)
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _refuse_bad_numbers(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str) -> None:
    """A run that diverged stops before it saves: weights that are not finite were damaged or put there by others."""
    for name, tensor in tensors.items():
        if tensor.dtype != own[name].dtype:
            raise ValueError(f"{source}: {name}: expected {own[name].dtype}, found {tensor.dtype}: converted by hand?")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{source}: expected finite weights, found NaN or infinity in {name}: the weights are damaged; "
                "use an earlier checkpoint"
            )


def _some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    if not names:
        return "nothing"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
