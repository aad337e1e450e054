"""The flag --state-dtype: states in half precision, of half the size."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["StateDtype", "keep_states_in"]

StateDtype = Literal["float16", "bfloat16"]


def keep_states_in(model: Any, dtype: StateDtype | None) -> None:
    """Make a loaded model's states in half precision, where the flag asks for it.

    Raises:
        ValueError: a model that is not ours, or that has sums which stay in float32, with the reason.
    """
    if dtype is None:
        return
    import torch

    from polysketch.models import TransformerLM

    if not isinstance(model, TransformerLM):
        raise ValueError("--state-dtype: expected a run or a folder that polysketch export wrote, found another model")
    try:
        model.keep_states_in(getattr(torch, dtype))
    except ValueError as error:
        raise ValueError(f"--state-dtype: {error}") from None
