"""Masking of tokens, for training that predicts them from both sides."""

import torch
from torch import Tensor

from polysketch.targets import NO_TARGET

_REPLACED, _RANDOM = 0.8, 0.9  # shares that become the mask, and up to which a token becomes another one


def mask_tokens(
    ids: Tensor,
    *,
    vocab_size: int,
    mask_id: int,
    share: float = 0.15,
    generator: torch.Generator | None = None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose tokens to predict and hide most of them: of the chosen, 80 % become the mask, 10 % any token, 10 % stay.

    Devlin et al., "BERT" (2019), section 3.1.

    Args:
        ids: (batch, length) int64.
        vocab_size: number of token ids; those that take a token's place are drawn from all of them.
        mask_id: the id that hides a token.
        share: of the tokens, to predict; each is chosen by itself.
        generator: of the draws, on the device of `ids`; PyTorch's own when None.
        key_mask: (batch, length) bool, True for a real token; others are never chosen.

    Returns:
        The ids with tokens hidden, and (batch, length) int64 targets: the token that stood there, -100 elsewhere.

    Raises:
        ValueError: a share outside of (0, 1], or a mask beyond the vocabulary.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    if not 0 <= mask_id < vocab_size:
        raise ValueError(f"mask_id must lie in [0, {vocab_size}), got {mask_id}")

    def draw() -> Tensor:
        return torch.rand(ids.shape, generator=generator, device=ids.device)

    chosen, kind = draw() < share, draw()
    if key_mask is not None:
        chosen = chosen & key_mask
    others = torch.randint(vocab_size, ids.shape, generator=generator, device=ids.device)
    hidden = torch.where(kind < _REPLACED, mask_id, torch.where(kind < _RANDOM, others, ids))
    return torch.where(chosen, hidden, ids), torch.where(chosen, ids, NO_TARGET)
