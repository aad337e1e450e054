"""Attention weights that are squares of polynomials of q . k (Reizin 2024, section 4.3)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polysketch import ops
from polysketch.attention.base import Mechanism, head_norm
from polysketch.attention.kept_tokens import AllTokensAttention
from polysketch.attention.linearized import LinearizedAttention, widened
from polysketch.attention.span_state import SpanState
from polysketch.feature_maps import PowerSketches, SymmetricPowers
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.polynomial import check_coefficients

_LARGEST_START = 50.0  # of learned coefficients, section 5.3: wider and narrower ranges did significantly worse there


class SquaredPolynomialAttention(AllTokensAttention, LinearizedAttention):
    """o_i = sum_j w_ij v_j / (1 + sum_j w_ij), w_ij = (a_0 + a_1 s + ... + a_D s^D)^2, s = <LN(q_i), LN(k_j)>.

    Reizin, "Fast Algorithms for Attention Mechanism" (2024), sections 4.3 and 5.2 to 5.4. No weight is negative,
    whatever the coefficients. All heads share one polynomial. The coefficients 0, ..., 0, 1 give `PolynomialAttention`
    of degree 2 D. Departures: the layer norms and the 1 are those of `PolynomialAttention`. The thesis has no 1, and
    its encoder norms neither queries nor keys.

    Time is quadratic in the length, and decoding keeps every key and value. `linear` computes the same function exactly
    in linear time, with a state of constant size, for small heads. Its features are phi(x) = [1, x, packed x (x) x,
    ...] up to D factors, and w_ij = ((a * phi(q_i)) . phi(k_j))^2, squared inside the op. That equals the thesis's
    sum_r b_r <q^(x)r, k^(x)r> up to r = 2 D, b being the coefficients of the squared polynomial. It takes
    C(h + D, D) features in place of C(h + 2 D, 2 D), and rounding makes no weight negative where some b_r are.
    With a `sketch_size` beside `linear` the powers from the second on are sketched (`PowerSketches`), for heads of any
    width: 1 + h + (D - 1) sketch_size features, and weights that approximate these.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        coefficients: a_0 to a_D, at least two; or the degree D alone, which means all ones (section 5.2) or, where
            they are learned, numbers drawn from U(-50, 50) (section 5.3) by PyTorch's default generator.
        learned: train the coefficients, from where `coefficients` starts them; else they are fixed. Either way they
            are in the state_dict, so that a learned polynomial can be taken over as a fixed one (section 5.4).
        linear: the linear form, up to 2,100 features: D = 1 at any head, D = 2 up to heads of 63, D = 3 up to 21; or
            any with a `sketch_size`.
        sketch_size: features of each power from the second on, drawn at random; None for exact powers. Needs `linear`.

    Raises:
        TypeError: an option of another type.
        ValueError: fewer than two coefficients, one that is not finite, a degree below one, `linear` with too many
            features, or a `sketch_size` without `linear`.

    Cost: quadratic, 2 length (head_dim + value_dim + D) operations a token and head. Linear, with m features,
    2 m^2 (value_dim + 1) operations a token and head and a state of m^2 / 2 (value_dim + 1) numbers a key/value head.
    """

    offset = 1.0
    coefficients: Tensor
    feature_map: SymmetricPowers | PowerSketches  # in the linear form; the other one has no features

    is_blockwise = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        coefficients: int | tuple[float, ...] = 3,
        learned: bool = False,
        linear: bool = False,
        sketch_size: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        for name, flag in (("learned", learned), ("linear", linear)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r}")
        if sketch_size is not None and not linear:
            raise ValueError(f"sketch_size={sketch_size} sketches the linear form: add linear=True, or leave it out")
        start = _starting_coefficients(coefficients, learned)
        self.learned, self.linear = learned, linear
        self._given = coefficients  # as the option was given, for the representation
        if learned:
            self.coefficients = nn.Parameter(start)
        else:
            self.register_buffer("coefficients", start)
        if linear:
            degree, heads = len(start) - 1, self.num_kv_heads
            if sketch_size is None:
                self.feature_map = SymmetricPowers(head_dim, degree=degree, num_kv_heads=heads)
            else:
                self.feature_map = PowerSketches(head_dim, degree=degree, sketch_size=sketch_size, num_kv_heads=heads)
        self.query_norm, self.key_norm = head_norm(head_dim), head_norm(head_dim)

    def operands(
        self, query: Tensor, key: Tensor, dtype: torch.dtype, hidden: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """As `LinearizedAttention.operands`, of the layer-normed query and key; queries carry the coefficients."""
        normed = self.prepare_query(query, dtype), self.prepare_key(key, dtype)
        (query_features, key_features), options = super().operands(*normed, dtype, hidden)
        terms = [
            coefficient.expand(part.stop - part.start)
            for coefficient, part in zip(self.coefficients.to(dtype), self.feature_map.slices, strict=True)
        ]
        return (query_features * torch.cat(terms), key_features), options

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None,
        block_size: int | None = None,
    ) -> Tensor:
        """The quadratic form over a whole sequence, of normed queries and keys."""
        return ops.squared_polynomial_attention(
            query,
            key,
            value,
            self.coefficients,
            offset=self.offset,
            causal=causal,
            block_size=block_size,
            key_mask=key_mask,
        )

    def attend_to_cache(
        self, query: Tensor, keys: Tensor, values: Tensor, *, key_mask: Tensor | None, block_size: int | None = None
    ) -> Tensor:
        """The quadratic form from the last tokens, of normed queries and keys."""
        return ops.squared_polynomial_attention_with_cache(
            query, keys, values, self.coefficients, offset=self.offset, block_size=block_size, key_mask=key_mask
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """As `Mechanism.forward`; `hidden` is ignored."""
        if not self.linear:
            return super().forward(query, key, value, causal=causal, block_size=block_size, key_mask=key_mask)
        output = LinearizedAttention.forward(
            self, query, key, widened(value), causal=causal, block_size=block_size, key_mask=key_mask
        )
        return output.to(value.dtype)

    @torch.no_grad()
    def read_source(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Any:
        """Normed keys and values; in the linear form sums.

        Args:
            key, value, key_mask: as for `Mechanism.read_source`.
        """
        form = LinearizedAttention if self.linear else AllTokensAttention
        return form.read_source(self, key, value, key_mask=key_mask)

    @torch.no_grad()
    def ask_source(self, query: Tensor, source: Any) -> Tensor:
        """As `Mechanism.ask_source`.

        Args:
            query, source: as there.
        """
        form = LinearizedAttention if self.linear else AllTokensAttention
        return form.ask_source(self, query, source)

    def init_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> Any:
        """An empty store of normed keys and of values; in the linear form sums of zero."""
        form = LinearizedAttention if self.linear else AllTokensAttention
        return form.init_state(self, batch_size, device, dtype, value_dim=value_dim)

    @torch.no_grad()
    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: Any,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """As `Mechanism.extend`; a new token costs one product with every stored key and value, or with the sums."""
        if not self.linear:
            return super().extend(query, key, value, state, block_size=block_size, key_mask=key_mask)
        output, state = LinearizedAttention.extend(
            self, query, key, widened(value), state, block_size=block_size, key_mask=key_mask
        )
        return output.to(value.dtype), state

    def init_span(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> SpanState:
        """As `Mechanism.init_span`; the quadratic form has no such state."""
        form = LinearizedAttention if self.linear else Mechanism
        return form.init_span(self, batch_size, device, dtype, value_dim=value_dim)

    def forward_span(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: SpanState,
        *,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, SpanState]:
        """As `Mechanism.forward_span`; the quadratic form has no such state."""
        form = LinearizedAttention if self.linear else Mechanism
        output, state = form.forward_span(self, query, key, widened(value), state)
        return output.to(value.dtype), state

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, coefficients={self._given}, learned={self.learned}, linear={self.linear}"


def _starting_coefficients(coefficients: int | Sequence[float], learned: bool) -> Tensor:
    """(D + 1,) float32: those given, or for a degree ones, or where they are learned draws from U(-50, 50)."""
    if isinstance(coefficients, Sequence) and not isinstance(coefficients, str):
        check_coefficients(coefficients)
        return torch.tensor(coefficients, dtype=torch.float32)
    check_at_least_one(**{"coefficients (where it is a degree)": coefficients})
    if learned:
        return torch.empty(coefficients + 1).uniform_(-_LARGEST_START, _LARGEST_START)
    return torch.ones(coefficients + 1)
