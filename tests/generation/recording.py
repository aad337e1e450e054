"""A stand-in for a device's graph on a CPU: operations are recorded as they run, and repeated at the same addresses.

Like a graph it repeats what reached the device, not the Python around it; what is done to tensors in host memory alone
is done once, while recording. Host tensors are named to it; that one of them meets a device tensor is an error, as it
would be a copy that a capture forbids, and so is reading a device tensor's number.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from polysketch.models import ModelState
from polysketch.nn import ProjectionConvolutionState

READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique_dim", "_unique2", "masked_select"}
"""Operations that wait for the device."""


def split_positions(state: ModelState) -> ModelState:
    """Give state and layers positions of the device's own, as on a GPU."""
    layers = [layer.attention if isinstance(layer, ProjectionConvolutionState) else layer for layer in state.layers]
    for each in (state, *layers):
        each.device_position = each.position.clone()
    return state


class Recorder(TorchDispatchMode):
    """Records while it is the mode. `launch` is a launcher of Triton's programs that records too."""

    def __init__(self, host: list[Tensor]) -> None:
        super().__init__()
        self._host = {tensor.untyped_storage().data_ptr() for tensor in host}
        self._kept: list[Any] = [host]  # so that no address is used twice
        self.tape: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = [self._is_host(tensor) for tensor in inputs]
        assert len(set(on_host)) < 2, f"{func} mixes host and device tensors"
        name = func.overloadpacket.__name__
        assert name not in READS or all(on_host), f"{func} waits for the device"
        found = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self._kept += [inputs, outputs]
        if on_host and all(on_host):
            self._host |= {tensor.untyped_storage().data_ptr() for tensor in outputs}
        else:
            self._record(func, args, kwargs or {}, inputs, outputs)
        return found

    def launch(self, kernel: Any, programs: int, arguments: tuple, options: dict) -> None:
        """Run a program and record it."""
        assert not any(self._is_host(each) for each in arguments if isinstance(each, Tensor)), kernel

        def run() -> None:
            with _disable_current_modes():  # the interpreter's own copies are no operations of the step
                kernel[(programs,)](*arguments, **options)

        run()
        self._kept.append(arguments)
        self.tape.append(run)

    def replay(self) -> None:
        """Everything again."""
        with torch.no_grad():
            for step in self.tape:
                step()

    def _is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._host

    def _record(self, func: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        shared = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        fresh = [tensor.untyped_storage().data_ptr() not in shared for tensor in outputs]

        def run() -> None:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for output, result, is_fresh in zip(outputs, again, fresh, strict=True):
                if is_fresh:
                    output.copy_(result)

        self.tape.append(run)


def recorded(state: ModelState, launching: Callable[[Any], Any] | None = None) -> Callable:
    """A `Capture` for the steps of a model on this state, which runs a step once before it records one.

    Args:
        launching: `polysketch.ops.triton.launch.launching`, where programs are launched.
    """

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        step()
        recorder = Recorder([each.position for each in (state, *state.layers)])
        with recorder, nullcontext() if launching is None else launching(recorder.launch):
            step()
        return recorder.replay

    return capture
