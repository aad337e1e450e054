"""What every section does with a case that fails."""

import torch


class DeviceLost(RuntimeError):
    """Every call on the device fails from here on; another process can go on."""


def out_of_memory(error: BaseException) -> bool:
    """Whether a case failed because it was too large, not because it is wrong."""
    return isinstance(error, torch.OutOfMemoryError)


def text_of(error: BaseException) -> str:
    """Type and first line, short enough for a table."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def release_memory(device: torch.device) -> None:
    """Give cached memory back, so that one case's blocks are not another's shortage.

    Raises:
        DeviceLost: nothing computes any more, as after an access out of bounds.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLost(f"the device is lost to this process: {text_of(error)}") from error
