"""What a checkpoint holds, as tensors by name: weights, the optimizer's state, the random generators' states."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from polysketch.distributed.pieces import Piece
from polysketch.distributed.shares import empty_like, local

_NAMED = 3
_SEPARATOR = "/"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters of `model` by name, each once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: str, new: Collection[str] = ()) -> None:
    """Put `tensors` into `model`; every tensor of the model must be there, with its shape, and no other.

    Args:
        model: the model to fill.
        tensors: a state_dict.
        source: where they come from, for messages.
        new: parts of the model, by a word of their tensors' names between dots, that may be missing and then stay as
            they are; "feature_map" for instance.

    Raises:
        ValueError: they belong to another configuration (the first differing names are listed), a number in them is
            not finite, or a part that is to be new is none, or is there. Nothing is changed then.
    """
    own = _without_new(model.state_dict(), tensors, source, new)
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
        local(tensor).copy_(local(tensors[name]))


def _without_new(
    own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str, new: Collection[str]
) -> Mapping[str, Tensor]:
    """The model's tensors but those of new parts that are missing."""
    lacking = {part: {name for name in own.keys() - tensors.keys() if part in name.split(".")} for part in new}
    useless = [part for part, names in lacking.items() if not names]
    if useless:
        raise ValueError(
            f"expected new parts of the model that {source} lacks, found {useless[0]!r}, which it has or which is none"
        )
    return {name: tensor for name, tensor in own.items() if not any(name in names for names in lacking.values())}


def _refuse_bad_numbers(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], source: str) -> None:
    """A run that diverged stops before it saves: weights that are not finite were damaged or put there by others."""
    for name, tensor in tensors.items():
        if tensor.dtype != own[name].dtype:
            raise ValueError(f"{source}: {name}: expected {own[name].dtype}, found {tensor.dtype}: converted by hand?")
        if not bool(torch.isfinite(local(tensor)).all()):
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


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as tensors named `PARAMETER/FIELD`, for instance `embedding.weight/exp_avg`."""
    return {
        f"{name}{_SEPARATOR}{field}": value.detach()
        for name, parameter in trained_parameters(model).items()
        for field, value in optimizer.state[parameter].items()
    }


def tensors_to_load(model: nn.Module) -> Callable[[str, Piece], Tensor]:
    """What gives, for a tensor in a checkpoint, one to load it into: shared out as that of the same name and shape in
    `model`."""
    own = model.state_dict()
    return lambda name, piece: empty_like(own.get(name), piece.shape, piece.dtype)


def optimizer_tensors_to_load(model: nn.Module) -> Callable[[str, Piece], Tensor]:
    """As `tensors_to_load`, of the optimizer's state: moments are shared out as their parameters."""
    own = trained_parameters(model)
    return lambda name, piece: empty_like(own.get(name.rpartition(_SEPARATOR)[0]), piece.shape, piece.dtype)


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave.

    Args:
        model: the model whose parameters the optimizer holds.
        optimizer: an optimizer for that model's trained parameters.
        tensors: state by name; empty for a run that has made no step.

    Raises:
        ValueError: a name that the model does not have, a moment of another shape, or one that is missing.
    """
    parameters = trained_parameters(model)
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
    for names in _rules(parameters, optimizer):
        _require_all_fields(names, tensors)


def _rules(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> Collection[set[str]]:
    """The names of the parameters that are treated alike: groups with the same settings are of one rule."""
    names = {parameter: name for name, parameter in parameters.items()}
    rules: dict[frozenset[str], set[str]] = {}
    for group in optimizer.param_groups:
        rules.setdefault(frozenset(group), set()).update(names[parameter] for parameter in group["params"])
    return rules.values()


def _require_all_fields(names: Collection[str], tensors: Mapping[str, Tensor]) -> None:
    """Refuse a state that has a field for some parameters of one rule and not for others, or has none for all."""
    found = [key.rpartition(_SEPARATOR) for key in tensors]
    fields = {field for name, _, field in found if name in names}
    if tensors and names and not fields:
        raise ValueError(
            f"expected optimizer state for all parameters, found none for {min(names)!r} and all like it: "
            "the checkpoint is of another optimizer"
        )
    wanted = {f"{name}{_SEPARATOR}{field}" for name in names for field in fields}
    if missing := sorted(wanted - tensors.keys()):
        raise ValueError(
            f"expected optimizer state for all parameters, found none called {missing[0]!r}: "
            "the checkpoint is of another configuration"
        )


def seed_everything(seed: int) -> None:
    """Seed the generators of the CPU and of every CUDA device."""
    torch.manual_seed(seed)


def random_tensors() -> dict[str, Tensor]:
    """The states of the generators: `cpu`, and `cuda.N` for each CUDA device that is there; uint8 vectors."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def load_random_tensors(states: Mapping[str, Tensor]) -> None:
    """Put the generators back into `states`; those of CUDA devices that are not here are left out.

    Raises:
        ValueError: the state of the CPU's generator is missing or of another size.
    """
    expected = torch.get_rng_state()
    found = states.get("cpu")
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(
            f"expected the state of the CPU's random generator, {len(expected)} bytes, in the checkpoint, found "
            f"{'none' if found is None else tuple(found.shape)}: it was written by another version of PyTorch"
        )
    torch.set_rng_state(found)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)


@contextlib.contextmanager
def unchanged_randomness() -> Iterator[None]:
    """Leave the generators, at the end, as they were: what is measured during training must not change training."""
    states = random_tensors()
    try:
        yield
    finally:
        load_random_tensors(states)
