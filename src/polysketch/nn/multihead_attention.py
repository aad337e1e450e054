"""`torch.nn.MultiheadAttention` with another mechanism in it: the same arguments, weights and names."""

import math
import warnings
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch import attention as mechanisms
from polysketch.attention import Mechanism


class MultiheadAttention(nn.Module):
    """A drop-in for `torch.nn.MultiheadAttention`: projections, heads and masks are torch's, the mechanism is ours.

    Weights have torch's names, so a `state_dict` of torch's module can be loaded with `strict=False` (the mechanism may
    have weights of its own), or at once by `from_torch`. With `attention="softmax"` it computes what torch's does.
    It works in `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, put in the place of theirs;
    `nn.TransformerEncoder` needs `enable_nested_tensor=False`.

    Attention weights do not exist here: the second output is always None. For the same reason there is no dropout of
    them, and a mask can only be causal or hide keys from all queries.

    Args:
        embed_dim: width of queries and of the output, a multiple of `num_heads`.
        num_heads: number of heads.
        dropout: 0; there is no other.
        bias: whether projections have biases.
        kdim, vdim: widths of keys and values; `embed_dim` when None.
        batch_first: (batch, length, width) in and out instead of (length, batch, width).
        device, dtype: of the weights.
        attention: name of the mechanism, a key of `attention.MECHANISMS`. One that cannot be what a call asks
            (causal, not causal, keys of another length) refuses that call.
        attention_options: its options, see `attention.option_names`.

    Raises:
        ValueError: sizes that do not divide, an unknown mechanism or option, dropout.
    """

    # Tells torch's encoder layers not to compute softmax attention of these weights themselves, as they do in `eval`.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        attention: str = "polysketch-paper",
        attention_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1:
            raise ValueError(f"embed_dim and num_heads must be at least 1, got {embed_dim} and {num_heads}")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if dropout:
            raise ValueError(
                f"expected dropout 0, found {dropout}: it would drop attention weights, and {attention} has none; "
                "nn.Dropout drops outputs"
            )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.batch_first, self.dropout = batch_first, 0.0
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if self._one_width:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **factory))
        else:
            for name, width in (("q", embed_dim), ("k", self.kdim), ("v", self.vdim)):
                self.register_parameter(f"{name}_proj_weight", nn.Parameter(torch.empty(embed_dim, width, **factory)))
        self.in_proj_bias: nn.Parameter | None
        self.register_parameter("in_proj_bias", nn.Parameter(torch.empty(3 * embed_dim, **factory)) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        options = dict(attention_options or {})
        if "hidden_size" in mechanisms.option_names(attention):
            options["hidden_size"] = embed_dim
        sizes = {"num_heads": num_heads, "head_dim": self.head_dim}
        self.mechanism: Mechanism = mechanisms.build(attention, **sizes, **options).to(device=device, dtype=dtype)
        self.reset_parameters()

    @classmethod
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        *,
        attention: str = "polysketch-paper",
        attention_options: dict[str, Any] | None = None,
    ) -> Self:
        """Take over the weights of torch's module, copied; its dropout is left out, with a warning.

        Args:
            module: without `add_bias_kv` and `add_zero_attn`.
            attention, attention_options: as for the class.

        Raises:
            ValueError: the module has what this one has not.
        """
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("expected a module without add_bias_kv and add_zero_attn, found one with them")
        if module.dropout:
            warnings.warn(f"attention dropout of {module.dropout} is left out: there are no weights", stacklevel=2)
        made = cls(
            module.embed_dim,
            module.num_heads,
            bias=module.in_proj_bias is not None,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device=module.out_proj.weight.device,
            dtype=module.out_proj.weight.dtype,
            attention=attention,
            attention_options=attention_options,
        )
        made.load_state_dict(module.state_dict(), strict=False)
        return made.train(module.training)

    @property
    def _one_width(self) -> bool:
        return self.kdim == self.vdim == self.embed_dim

    def reset_parameters(self) -> None:
        """As torch draws them: Xavier's uniform, zero biases."""
        for name, weight in self.named_parameters(recurse=False):
            nn.init.zeros_(weight) if name == "in_proj_bias" else nn.init.xavier_uniform_(weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend; arguments as torch's, where True in a boolean mask hides and a floating mask is added.

        Args:
            query: (length, batch, embed_dim), (batch, length, embed_dim) with `batch_first`, or (length, embed_dim).
            key: the same with `kdim`, of the source's length.
            value: the same with `vdim`, of the source's length.
            key_padding_mask: (batch, source length), or (source length); bool, or 0 and -inf.
            need_weights, average_attn_weights: not used: there are no weights.
            attn_mask: (length, source length), or (batch * num_heads, length, source length): causal, or the same for
                all queries of a sequence. Reading it costs time and memory with the square of the length: give
                `is_causal` alone instead.
            is_causal: token i sees tokens up to and including itself; `attn_mask` is not read then.

        Returns:
            An output like the query, and None.

        Raises:
            ValueError: a mask of another kind or shape, or a call that the mechanism cannot be.
        """
        if query.is_nested:
            raise ValueError(
                "expected padded tensors, found nested ones: give nn.TransformerEncoder enable_nested_tensor=False"
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        self._check_shapes(query, key, key_padding_mask, attn_mask)
        hidden = None if key_padding_mask is None else _hides(key_padding_mask, "key_padding_mask")
        if attn_mask is not None and not is_causal:
            is_causal, hidden = self._read(attn_mask, hidden)
        self._check(query, key, causal=is_causal)
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        given = {"hidden": query} if self.mechanism.reads_hidden else {}
        real = None if hidden is None else ~hidden.expand(key.shape[:2])
        attended = self.mechanism(q, k, v, causal=is_causal, key_mask=real, **given)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))
        if not batched:
            return output[0], None
        return output if self.batch_first else output.transpose(0, 1), None

    def _check_shapes(self, query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None) -> None:
        """Refuse masks of other rows or lengths, query and key with the batch first."""
        batch, length, source = *query.shape[:2], key.shape[1]
        if padding is not None and padding.shape != key.shape[:2]:
            raise ValueError(
                f"expected key_padding_mask of (batch, source length), {(key.shape[0], source)}, found one of the shape"
                f" {tuple(padding.shape)}"
            )
        if mask is not None and mask.shape not in ((length, source), (batch * self.num_heads, length, source)):
            raise ValueError(
                f"expected attn_mask of (length, source length), {(length, source)}, or so for each head of"
                f" {batch} sequences, {(batch * self.num_heads, length, source)}, found one of the shape"
                f" {tuple(mask.shape)}"
            )

    def _check(self, query: Tensor, key: Tensor, *, causal: bool) -> None:
        kind = type(self.mechanism)
        same = query.shape[1] == key.shape[1]
        if causal and not same:
            raise ValueError(
                f"expected queries and keys of one length for is_causal, found {query.shape[1]} and {key.shape[1]}"
            )
        able = kind.is_causal if causal else (kind.is_bidirectional and (same or self.mechanism.is_cross))
        if not able:
            asked = "causal" if causal else "bidirectional" if same else "of keys of another length"
            takers = ", ".join(_takers(causal=causal, same=same))
            instead = " give is_causal=True, or" if kind.is_causal and same else ""
            raise ValueError(f"{kind.__name__} cannot be {asked}:{instead} choose attention of {takers}")

    def _read(self, mask: Tensor, hidden: Tensor | None) -> tuple[bool, Tensor | None]:
        """Whether a mask is causal; if not, the keys that it hides from all queries, with those hidden already.

        That of one token is both: it is causal to mechanisms that can be, as a decoder gives it with its first token.
        """
        hides = _hides(mask, "attn_mask")
        length, source = hides.shape[-2:]
        above = torch.ones(length, source, dtype=torch.bool, device=mask.device).triu(1)
        told = length > 1 or type(self.mechanism).is_causal
        if length == source and told and bool((hides == above).all()):
            return True, hidden
        columns = hides[..., :1, :]
        if not bool((hides == columns).all()):
            raise ValueError("expected attn_mask to be causal, or to hide keys from all queries, found another")
        by_head = columns[..., 0, :].unflatten(0, (-1, self.num_heads)) if hides.dim() == 3 else columns[None]
        if not bool((by_head == by_head[:, :1]).all()):
            raise ValueError("expected attn_mask to be the same for all heads, found another")
        return False, by_head[:, 0] if hidden is None else by_head[:, 0] | hidden

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self._one_width:
            weights = list(self.in_proj_weight.chunk(3))
        else:
            weights = [cast(Tensor, getattr(self, f"{name}_proj_weight")) for name in ("q", "k", "v")]
        biases = [None, None, None] if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))
        return [F.linear(*one) for one in zip((query, key, value), weights, biases, strict=True)]

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _takers(*, causal: bool, same: bool) -> list[str]:
    """The mechanisms that can be what is asked."""
    if not causal and not same:
        return mechanisms.mechanisms_that_cross()
    return mechanisms.mechanisms_that("is_causal" if causal else "is_bidirectional")


def _hides(mask: Tensor, name: str) -> Tensor:
    """A mask of torch's, boolean or added to logits, as True for hidden.

    Raises:
        ValueError: an added one with other numbers than 0 and -inf.
    """
    if mask.dtype == torch.bool:
        return mask
    hides = mask == -math.inf
    if not bool((hides | (mask == 0)).all()):
        raise ValueError(f"expected {name} of bool, or 0 and -inf, found other numbers: no logits exist to add them to")
    return hides
