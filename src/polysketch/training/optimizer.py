"""AdamW with weight decay on matrices only, and its state by parameter name."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_SEPARATOR = "/"


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and the parallel wrappers put into it."""
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            return plain_name(name[len(wrapper) :])
        name = name.replace(f".{wrapper}", ".")
    return name


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained parameters of `model`, each once, under plain names."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield plain_name(name), parameter


def build_optimizer(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over the model's parameters in two groups: matrices decay, vectors and scalars do not.

    Gains, biases and per-head factors have one axis and are left alone; weights, sketches and the embedding have two.

    Args:
        model: the model, already on its device.
        learning_rate: rate of the first step; the trainer sets it anew before every step.
        betas: decay rates of the two running moments.
        weight_decay: decoupled decay of the matrices.

    Returns:
        The optimizer, one fused pass over the parameters per step.
    """
    parameters = [parameter for _, parameter in named_parameters(model)]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], learning_rate, betas, fused=True)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as tensors named `PARAMETER/FIELD`, for instance `embedding.weight/exp_avg`."""
    return {
        f"{name}{_SEPARATOR}{field}": value.detach()
        for name, parameter in named_parameters(model)
        for field, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave.

    Args:
        model: the model whose parameters the optimizer holds.
        optimizer: an optimizer from `build_optimizer` for that model.
        tensors: state by name; empty for a run that has made no step.

    Raises:
        ValueError: a name that the model does not have, a moment of another shape, or one that is missing.
    """
    parameters = dict(named_parameters(model))
    for key, value in tensors.items():
        name, _, field = key.rpartition(_SEPARATOR)
        if name not in parameters:
            raise ValueError(f"optimizer state for {name!r}, which the model does not have: another configuration?")
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            raise ValueError(
                f"optimizer state {key!r}: expected shape {tuple(parameter.shape)}, found {tuple(value.shape)}; "
                "the checkpoint is of another configuration"
            )
        optimizer.state[parameter][field] = value.to(parameter.device, copy=True)
    _require_all_fields(parameters, tensors)


def _require_all_fields(names: Collection[str], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a state that has a field for some parameters and not for others."""
    fields = {key.rpartition(_SEPARATOR)[2] for key in tensors}
    wanted = {f"{name}{_SEPARATOR}{field}" for name in names for field in fields}
    if missing := sorted(wanted - tensors.keys()):
        raise ValueError(
            f"expected optimizer state for all parameters, found none called {missing[0]!r}: "
            "the checkpoint is of another configuration"
        )
