"""The studies of approximation.

Sizes: `smoke` is seconds, `cpu` minutes on Gaussian queries and keys, `model` those of a trained model, which is asked
for by `--set 'run="FOLDER"'`.
"""

from typing import Any

from polysketch.studies.approximation.contenders import APPROXIMATIONS
from polysketch.studies.approximation.maps import MapSettings
from polysketch.studies.approximation.mechanisms import MechanismSettings
from polysketch.studies.approximation.study import MapStudy, MechanismStudy, falling, in_order

_SMOKE: dict[str, Any] = {"head_dim": 6, "fit_tokens": 80, "lengths": (20, 50)}
_FITS: dict[str, Any] = {"steps": 3, "batch_size": 20}
_SUMS: dict[str, Any] = {"degrees": (4, 8), "features": (36, 136, 528, 2_080)}  # r (r + 1) / 2 of r = 8, 16, 32, 64

_ORDER = ("random", "network", "llops")

KERNELS = MapStudy(
    claim="Fitted products of projections come nearer to (q . k)^p than networks, and these than random products.",
    paper="p = 2: 0.293, 0.054, 0.022; p = 3: 0.741, 0.105, 0.038, as means of |error / weight|",
    rows=("random", "network", "llops", "llops-rank-2", "llops-rank-4", "forms"),
    sizes={
        "smoke": MapSettings(**_SMOKE, **_FITS, features=(4, 8), degrees=(2, 3)),
        "cpu": MapSettings(head_dim=16, fit_tokens=4_096, degrees=(2, 3), features=(32, 128), steps=500),
        "model": MapSettings(degrees=(2, 3), features=(256,), lengths=(768, 1_536), steps=500, batch_size=768),
        "paper": MapSettings(head_dim=128, degrees=(2, 3), features=(256,), lengths=(1_024, 4_096), steps=3_000),
    },
    judge=in_order(*_ORDER),
    needs=_ORDER,
)

_RANDOM = ("gaussian-squared", "srht-squared")

SKETCHES = MapStudy(
    claim="The error of squared random sketches of (q . k)^p falls at least as 1 / sqrt(r).",
    paper="theorems 1.1 and 2.2: epsilon for r = O(1 / epsilon^2)",
    rows=("gaussian-squared", "srht-squared", "learned-squared"),
    sizes={
        "smoke": MapSettings(**_SMOKE, **_FITS, features=(3, 10, 36), degrees=(4,)),
        "cpu": MapSettings(**_SUMS, lengths=(1_024,), steps=100, fit_tokens=2_048, batch_size=512),
        "model": MapSettings(**_SUMS, lengths=(768, 1_536), draws=10),
    },
    judge=falling(_RANDOM, lambda one: one["held_out"]["sketch_error"], "width", -0.45),
    needs=_RANDOM,
    error="sketch_error",
)

OUTPUTS = MechanismStudy(
    claim="HyperAttention's error in operator norm falls as 1 / sqrt(samples).",
    paper="theorem 1; figure 5: alpha is far below n",
    rows=tuple(APPROXIMATIONS),
    sizes={
        "smoke": MechanismSettings(**_SMOKE, features=(4, 8, 16), windows=(8, 32)),
        "cpu": MechanismSettings(lengths=(512, 1_024), features=(32, 64, 128, 256)),
        "model": MechanismSettings(lengths=(768, 1_536), features=(32, 64, 128, 256)),
    },
    judge=falling(("hyper",), lambda one: one["operator_norm_error"], "features", -0.45),
    needs=("hyper",),
    error="operator_norm_error",
)
