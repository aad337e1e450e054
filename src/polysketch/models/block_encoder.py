"""What encoders of tokens and of pictures have in common: transformer blocks that see both sides."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polysketch.models.blocks import build_block
from polysketch.models.config import require_configuration
from polysketch.models.encoder_config import EncoderConfig
from polysketch.nn import Rotation


class BlockEncoder(nn.Module):
    """Embedded tokens -> a vector for each of them, by transformer blocks without a causal mask and a final norm.

    With `config.block_size` a token sees its own block of tokens and all before it, else the whole sequence.

    A subclass has `add_embedding` and `reset_embedding`, which make what it embeds with and draw its weights, and a
    `forward` that ends in `run_blocks`.

    Args:
        config: sizes and mechanisms.

    Raises:
        TypeError: the configuration is none.
        ValueError: a `block_size` that a mechanism with its options does not take.

    Attributes:
        config: as given.
        activation_checkpointing: recompute each block in backward instead of keeping what is inside it; False at
            first.
    """

    def __init__(self, config: EncoderConfig) -> None:
        require_configuration(config, EncoderConfig)
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.add_embedding()
        self.blocks = nn.ModuleList(build_block(config, name, options) for name, options in config.layers())
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
        self._seen: dict[str, Any] = {"causal": False}
        if config.block_size:
            self._seen = {"causal": True, "block_size": config.block_size}
            self._check_blocks(config.block_size)
        self.reset_embedding()
        for block in self.blocks:
            block.reset_parameters(residual_scale=(2 * config.num_layers) ** -0.5)

    def add_embedding(self) -> None:
        """Make the modules that embed."""
        raise NotImplementedError(f"{type(self).__name__} embeds nothing")

    def reset_embedding(self) -> None:
        """Draw their weights."""
        raise NotImplementedError(f"{type(self).__name__} embeds nothing")

    def run_blocks(self, hidden: Tensor, rotation: Rotation, key_mask: Tensor | None = None) -> Tensor:
        """(batch, length, hidden_size) -> the same, after the final norm."""
        for block in self.blocks:
            hidden = self._run(block, hidden, rotation, key_mask)
        return self.final_norm(hidden)

    def _check_blocks(self, block_size: int) -> None:
        for index, block in enumerate(self.blocks):
            reason = block.mechanism.why_not_blocks(block_size)
            if reason is not None:
                raise ValueError(f"layer {index}: {reason}")

    def _run(self, block: nn.Module, hidden: Tensor, rotation: Rotation, key_mask: Tensor | None) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, hidden, rotation, **self._seen, key_mask=key_mask, use_reentrant=False)
        return block(hidden, rotation, **self._seen, key_mask=key_mask)
