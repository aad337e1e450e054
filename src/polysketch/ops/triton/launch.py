"""One way to launch a program, so that the same launch can run, or be compiled ahead of time for another device."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Launcher = Callable[[Any, int, tuple, dict], None]
_launcher: Launcher | None = None


def launch(kernel: Any, programs: int, *arguments: Any, configuration: Mapping[str, int], **constants: Any) -> None:
    """Run `programs` instances of a kernel, numbered along the first axis alone: the others end at 65,535.

    Args:
        kernel: a function under `triton.jit`.
        programs: how many; nothing is launched for none.
        arguments: tensors (None where absent) and numbers, in the kernel's order.
        configuration: tuned constants of the kernel, `num_warps` and `num_stages`.
        constants: the kernel's other constants.
    """
    if programs == 0:
        return
    options = {**constants, **configuration}
    if _launcher is not None:
        _launcher(kernel, programs, arguments, options)
        return
    with _on_device_of(arguments):
        kernel[(programs,)](*arguments, **options)


def _on_device_of(arguments: tuple) -> AbstractContextManager:
    """Make the tensors' device the current one, on which Triton launches."""
    device = next((each.device for each in arguments if isinstance(each, torch.Tensor)), None)
    if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@contextmanager
def launching(launcher: Launcher) -> Iterator[None]:
    """Within this block `launcher` is called instead of any program, whose outputs stay as they are."""
    global _launcher
    before, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = before


def precision(dtype: torch.dtype) -> str:
    """How products of float32 operands are computed, Triton's `input_precision`.

    float16 inputs are widened, for sums over a sequence leave their range; the operands keep the ten bits of mantissa
    that float16 has. For float32 inputs PyTorch's own switch decides: `torch.set_float32_matmul_precision`.
    """
    if dtype == torch.bfloat16:
        return "ieee"  # of bfloat16 operands there is one kind of product
    if dtype == torch.float16:
        return "tf32"
    # PyTorch has two switches since 2.9, and asking for the old one where the new one was used is an error.
    asked = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if asked == "none":
        asked = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return asked
