"""The ways to attend that are timed, by the names of `way_names`."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from polysketch import attention
from polysketch.benchmarking import calls, floors, mechanisms
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Floor, Shape
from polysketch.benchmarking.way_names import BASELINE, FUSED, GIVEN, SKETCHES, Sizes, mechanism_of

_KERNELS = dict(
    zip(FUSED, (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION), strict=True)
)


@dataclass(frozen=True)
class Way:
    """One way to attend.

    Attributes:
        title: in tables and plots.
        prepare: (shape, device, dtype) -> Call with random inputs.
        floor: (shape, backward=, itemsize=) -> Floor, or None where it is not counted.
        prepare_check: (shape, device, dtype, backend=) -> Call to be compared with its definition, by a backend of
            `linear_attention` where there is one to choose; None where the result is not ours.
        linear: whether it runs `linear_attention`, by any backend.
    """

    title: str
    prepare: Callable[[Shape, torch.device, torch.dtype], Call]
    floor: Callable[..., Floor | None]
    prepare_check: Callable[..., Call] | None = None
    linear: bool = False


def way(name: str, sizes: Sizes) -> Way:
    """The way called `name`.

    Raises:
        ValueError: an unknown name or option; the message lists those that exist.
    """
    if name == BASELINE or name in FUSED:
        return Way(name, partial(calls.sdpa, backend=_KERNELS.get(name)), floors.exact_attention)
    if name == GIVEN:
        make = partial(calls.linear, features=sizes.sketch_size, local=sizes.local)
        floor = partial(floors.linear_attention, sketch_size=sizes.sketch_size, local=sizes.local)
        return Way("features given", partial(make, backend=sizes.backend), floor, make, linear=True)
    mechanism, options = mechanism_of(name, sizes)
    kind = attention.mechanism_class(mechanism)
    title = SKETCHES[name][0] if name in SKETCHES else name
    checked = mechanisms.checked_options(mechanism, options, sizes.local)
    return Way(
        title if kind.is_causal else f"{title} (bidirectional)",
        lambda *where: mechanisms.prepared(mechanism, options, *where).call(),
        partial(mechanisms.floor, mechanism, options),
        lambda *where, backend="auto": mechanisms.prepared(mechanism, checked, *where).call(backend),
        mechanisms.is_over_features(kind),
    )


def sdpa_programs(tensors: list[Tensor], *, causal: bool, backward: bool) -> dict[str, Call]:
    """`scaled_dot_product_attention` by each of its fused kernels that computes the call, and makes it once; by name.

    Off a GPU, and where no kernel does, by PyTorch's choice. With `backward` it computes the gradients too.
    """
    prepare = calls.forward_backward if backward else calls.forward
    fused = {
        name: calls.sdpa_of(tensors, causal=causal, backend=kernel)
        for name, kernel in _KERNELS.items()
        if tensors[0].device.type == "cuda"
    }
    able = {name: call for name, call in fused.items() if _computes(prepare, call)}
    return able or {BASELINE: calls.sdpa_of(tensors, causal=causal)}


def _computes(prepare: Callable[[Call], Callable[[], object]], call: Call) -> bool:
    """Whether a kernel is not refused; it says why in warnings."""
    try:
        with warnings.catch_warnings(action="ignore"):
            prepare(call)()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True
