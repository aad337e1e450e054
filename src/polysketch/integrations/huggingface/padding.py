"""Attention masks of transformers as the key masks of our models: which padding is exact, and which is refused."""

import torch
from torch import Tensor


def new_tokens_mask(attention_mask: Tensor | None, shape: torch.Size, past: int) -> Tensor | None:
    """The part of `attention_mask` that belongs to the new tokens.

    Args:
        attention_mask: (batch, past + new), nonzero for a real token; None when all are real.
        shape: (batch, new) of the new tokens.
        past: tokens in the cache, padding included.

    Returns:
        (batch, new) bool, or None when all of them are real.

    Raises:
        ValueError: a mask of another shape.
    """
    if attention_mask is None:
        return None
    expected = (shape[0], past + shape[1])
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != expected:
        found = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask must be of shape {expected}, for {past} tokens in the cache and {shape[1]} new ones, "
            f"got {found}: give the mask of the whole sequence, not one of pairs of tokens"
        )
    mask = attention_mask[:, past:].bool()
    return None if bool(mask.all()) else mask


def refuse_holes(mask: Tensor) -> None:
    """Refuse padding between real tokens: positions count through it, and no other padding would mean the same.

    Args:
        mask: (batch, length) bool.

    Raises:
        ValueError: naming the first such row.
    """
    real = mask.cumsum(1)
    after_first, before_last = real > 0, real < real[:, -1:]
    hole = (after_first & before_last & ~mask).any(1)
    if bool(hole.any()):
        raise ValueError(
            f"expected padding before or after the tokens of a row, found some between them in row "
            f"{int(hole.nonzero()[0])} of attention_mask: pack the tokens of a row together"
        )


def refuse_empty_rows(mask: Tensor) -> None:
    """Refuse rows of padding alone.

    Args:
        mask: (batch, length) bool, true for a real token.

    Raises:
        ValueError: naming the first such row.
    """
    empty = ~mask.any(1)
    if bool(empty.any()):
        raise ValueError(f"expected a real token in every row, found padding alone in row {int(empty.nonzero()[0])}")


def both_sides_mask(attention_mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The key mask of rows of which every token sees the whole, padded on either side.

    Args:
        attention_mask: (batch, length), nonzero for a real token; None when all are real.
        shape: (batch, length) of the tokens.

    Returns:
        (batch, length) bool, or None when all of them are real.

    Raises:
        ValueError: rows of length 0, a mask of another shape, padding between real tokens, or a row of padding alone.
    """
    if 0 in shape[1:]:
        raise ValueError(
            f"expected a token in every row that the encoder reads, found rows of shape {tuple(shape)}: leave empty "
            "texts out, or give the token that ends a text"
        )
    mask = new_tokens_mask(attention_mask, shape, 0)
    if mask is not None:
        refuse_holes(mask)
        refuse_empty_rows(mask)
    return mask


def without_right_padding(mask: Tensor) -> Tensor | None:
    """The key mask for a whole sequence: what follows a row's tokens may count as real, for nothing before sees it.

    Args:
        mask: (batch, length) bool, true for a real token.

    Returns:
        The same with right padding counted as real, or None where no other padding is left.

    Raises:
        ValueError: padding between real tokens.
    """
    refuse_holes(mask)
    started = mask.cumsum(1) > 0
    return None if bool(started.all()) else started


def refuse_right_padding(mask: Tensor, started: Tensor | None = None) -> None:
    """Refuse padding after a row's first token, from where generation would go on.

    Args:
        mask: (batch, new) bool, true for a real token.
        started: (batch,) bool, rows that have real tokens before these; none when None.

    Raises:
        ValueError: naming the first such row and the remedy.
    """
    real = mask.cumsum(1) > 0
    if started is not None:
        real = real | started.to(real.device)[:, None]
    padded = (real & ~mask).any(1)
    if bool(padded.any()):
        raise ValueError(
            f"expected padding on the left alone, found some after a token of row {int(padded.nonzero()[0])}: "
            "generation goes on from the last token; set tokenizer.padding_side = 'left'"
        )


def start_behind_padding(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Targets before which a start token was put, before their padding: now it stands behind that, and once.

    Args:
        ids, mask: (batch, length), each row with a start token first, as `generate` of transformers puts one.

    Returns:
        Both, of the same shape.
    """
    ids, mask = ids.clone(), mask.clone()
    for row, real in enumerate(mask.bool().tolist()):
        if len(real) < 2 or not real[0] or real[1] or not any(real[1:]):
            continue
        first = 1 + real[1:].index(True)
        mask[row, :first] = 0
        if ids[row, first] != ids[row, 0]:
            ids[row, first - 1], mask[row, first - 1] = ids[row, 0], 1
    return ids, mask
