"""What to say where memory is not enough: what was asked for, what there is, what to change."""

import re

_REMEDY = "choose a smaller batch, context or model, or fewer heads"
_ON_CPU = re.compile(r"tried to allocate (\d+) bytes")
_ON_GPU = re.compile(r"Tried to allocate ([\d.]+ \w+)\..*?of which ([\d.]+ \w+) is free", re.DOTALL)


def memory_message(error: BaseException) -> str | None:
    """One line about memory, in place of an allocator's own words; None where the error is about something else.

    Args:
        error: a `MemoryError`, or what PyTorch raises where it gets no memory, on a CPU or a GPU.
    """
    text = str(error)
    on_gpu, on_cpu = _ON_GPU.search(text), _ON_CPU.search(text)
    if on_gpu:
        return f"not enough memory: {on_gpu[1]} were asked for, {on_gpu[2]} of the GPU are free: {_REMEDY}"
    if on_cpu:
        return f"not enough memory: {_gigabytes(int(on_cpu[1]))} were asked for{_free()}: {_REMEDY}"
    if isinstance(error, MemoryError):
        return f"not enough memory{_free()}: {_REMEDY}"
    return None


def _free() -> str:
    """What the system says is free; nothing where it does not say."""
    import torch

    from polysketch.training.memory import free_bytes

    free = free_bytes(torch.device("cpu"))
    return "" if free is None else f", {_gigabytes(free)} are free"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
