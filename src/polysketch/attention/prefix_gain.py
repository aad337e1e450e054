"""The gain on sketched weights: one learnable factor per key/value head, set from a batch to a share of the mass."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_LOG_GAIN_RANGE = 80.0  # float32 ends at e^88
_BISECTIONS = 60
_GATED_SPREAD = 9.0  # gated heads: gains spread over e^0 to e^-9


class PrefixGain(nn.Module):
    """A positive factor on the sketched weights of each key/value head, kept as its logarithm.

    At initialisation an exact polynomial weight is four orders of magnitude above a learned-sketched one, and the
    prefix has almost no mass. `calibrate` sets the gains so that it holds given shares of the mass. With a decay gate
    the gains are also spread over nine powers of e; the fastest-decaying head has the largest.

    Args:
        num_kv_heads: key and value heads.
        shares: what the prefix is to hold, one share for all heads or one for each; None leaves the paper's scale.
        gated: spread the gains.

    Raises:
        TypeError: a share that is not a number.
        ValueError: a share outside (0, 1), or as many as there are not heads.
    """

    def __init__(
        self, num_kv_heads: int, shares: float | Sequence[float] | None = None, *, gated: bool = False
    ) -> None:
        super().__init__()
        if shares is None or isinstance(shares, int | float):
            shares = (shares,) * num_kv_heads  # type: ignore[assignment]
        self.shares: tuple[float | None, ...] = tuple(shares)  # type: ignore[arg-type]
        _check_shares(self.shares, num_kv_heads)
        self._spread = -_GATED_SPREAD / max(1, num_kv_heads - 1) if gated else 0.0
        self.log_gain = nn.Parameter(torch.arange(num_kv_heads, dtype=torch.get_default_dtype()) * self._spread)

    def forward(self, query_features: Tensor, key_features: Tensor) -> tuple[Tensor, Tensor]:
        """Scale features (batch, heads, length, r) so that their squared products are scaled by the gain.

        Queries take all of it. float16 ends at 65,504, and a gain at degree 8 is larger: there keys take half of it.
        """
        if query_features.dtype == torch.float16:
            return self._scaled(query_features, 0.25), self._scaled(key_features, 0.25)
        return self._scaled(query_features, 0.5), key_features

    def _scaled(self, features: Tensor, power: float) -> Tensor:
        """Features times a power of the gain."""
        # Rounded to half precision, a gain would be the same fraction off in every weight of its head.
        dtype = torch.promote_types(features.dtype, torch.float32)
        group = features.shape[1] // self.log_gain.shape[0]
        factor = (self.log_gain.to(dtype) * power).exp().repeat_interleave(group)
        return (features * factor[:, None, None]).to(features.dtype)

    @torch.no_grad()
    def calibrate(self, prefix: Tensor, local: Tensor) -> None:
        """Set the gains so that the mean share of the rows that have a prefix is the share asked for.

        Heads without a requested share, and all heads when no row has a prefix, are left as they are.

        Args:
            prefix: (batch, heads, length), sums of sketched weights without any gain.
            local: the same shape, sums of exact weights.
        """
        for head, (heads_prefix, heads_local) in enumerate(zip(*map(self._by_head, (prefix, local)), strict=True)):
            rows = heads_prefix > 0
            share = self.shares[head]
            if share is not None and bool(rows.any()):
                ratio = heads_prefix[rows].log() - heads_local[rows].log()
                target = torch.tensor(share, dtype=torch.float64).logit() + head * self._spread
                self.log_gain[head] = _solve(ratio.double(), float(target.sigmoid()))

    def _by_head(self, mass: Tensor) -> Tensor:
        """(batch, heads, length) -> (key/value heads, everything of one)."""
        return mass.unflatten(1, (self.log_gain.shape[0], -1)).transpose(0, 1).flatten(1)

    def extra_repr(self) -> str:
        """What was asked for."""
        return f"num_kv_heads={len(self.shares)}, shares={self.shares}"


@torch.no_grad()
def mean_share(prefix: Tensor, local: Tensor) -> Tensor:
    """Mean over rows of prefix / (prefix + local), rows without a prefix left out.

    Args:
        prefix, local: (batch, heads, length) sums of weights.

    Returns:
        (heads,); 0 where no row has a prefix.
    """
    rows = prefix > 0
    shares = torch.where(rows, prefix / (prefix + local).masked_fill(~rows, 1.0), 0.0)
    return shares.sum((0, 2)) / rows.sum((0, 2)).clamp(min=1)


def _solve(log_ratio: Tensor, share: float) -> float:
    """The x at which mean sigmoid(x + log_ratio) is `share`, by bisection: it grows with x."""
    low, high = -_LOG_GAIN_RANGE, _LOG_GAIN_RANGE
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if (log_ratio + middle).sigmoid().mean() < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _check_shares(shares: Sequence[float | None], num_kv_heads: int) -> None:
    if len(shares) != num_kv_heads:
        raise ValueError(f"prefix_gain must be one share, or one per key/value head: {num_kv_heads}, got {len(shares)}")
    for share in shares:
        if share is None:
            continue
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise TypeError(f"prefix_gain must be a share of the attention mass, got {share!r}")
        if not 0 < share < 1:
            raise ValueError(f"prefix_gain is a share of the attention mass, between 0 and 1, got {share}")
