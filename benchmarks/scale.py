"""How large everything is that `python -m benchmarks` times: in full, and tiny, to try the script."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.first_call import FirstCallSettings
from benchmarks.plain_features import PlainFeatureSettings
from benchmarks.targets import FEW_HEADS
from benchmarks.threads import Shape, ThreadSettings
from polysketch.benchmarking import AttentionSettings, DecodingSettings, TrainingSettings

Settings = (
    AttentionSettings | TrainingSettings | DecodingSettings | ThreadSettings | PlainFeatureSettings | FirstCallSettings
)

_EXACT_TOO = ("given", "learned", "random", "polynomial")  # where exact polynomial attention does not take minutes
_LEARNED = ("learned",)
_DECODED = ("learned", "polysketch/2")  # the second as presets have it
_HYPER: dict[str, Any] = {"mechanisms": ("hyper",), "heads": 1}  # 16k tokens of 4 heads are in "mechanisms"


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        sections: what is timed; the last two lengths of `forward` are doubled, and the positions of the last model of
            `decoding` are compared with each other.
        repeats: timed rounds of A B A B.
        rate_size: side of the matrices whose product gives the machine's rate.
        rounds: of sections that have others, for one call takes half a minute there.
    """

    sections: dict[str, tuple[Settings, ...]]
    repeats: int
    rate_size: int
    rounds: dict[str, int] = field(default_factory=dict)


FULL = Scale(
    {
        "forward": (
            AttentionSettings(lengths=(1_024, 2_048, 4_096, 8_192), mechanisms=_EXACT_TOO),
            AttentionSettings(lengths=(16_384, 32_768), memory=True),
        ),
        "backward": (
            AttentionSettings(lengths=(4_096, 8_192), mechanisms=_EXACT_TOO, backward=True),
            AttentionSettings(lengths=(16_384,), backward=True, memory=True),
        ),
        "training": (TrainingSettings(contexts=(2_048,), models=("random",)), TrainingSettings(memory=True)),
        "decoding": (
            DecodingSettings(preset="tiny", models=_DECODED),
            DecodingSettings(positions=(1_024, 8_192, 32_768), models=_DECODED),
        ),
        "mechanisms": (AttentionSettings(lengths=(16_384,), mechanisms=("all",), heads=FEW_HEADS, memory=True),),
        "hyper": (
            AttentionSettings(lengths=(131_072,), **_HYPER),
            AttentionSettings(lengths=(131_072,), bidirectional=True, **_HYPER),
        ),
        "bfloat16": (AttentionSettings(lengths=(16_384,)),),
        "bfloat16-products": (
            AttentionSettings(lengths=(1_024, 1_536, 2_048, 4_096, 16_384), mechanisms=_LEARNED),
            TrainingSettings(contexts=(8_192,), models=_LEARNED),
        ),
        "plain-features": (PlainFeatureSettings(),),
        "threads": (
            ThreadSettings(shapes=(Shape(1, 1, 16_384), Shape(1, 2, 16_384), Shape(1, 12, 4_096))),
            ThreadSettings(shapes=(Shape(64, 12, 512),), ways=("given",), directions=("forward",)),
        ),
        "first-call": (FirstCallSettings(),),
    },
    repeats=3,
    rate_size=2_048,
    rounds={"training": 2, "hyper": 1, "threads": 2},
)
_TINY: dict[str, Any] = {"heads": 2, "local": 64}
QUICK = Scale(
    {
        "forward": (
            AttentionSettings(lengths=(256,), mechanisms=_EXACT_TOO, **_TINY),
            AttentionSettings(lengths=(512, 1_024), **_TINY),
        ),
        "backward": (AttentionSettings(lengths=(256,), mechanisms=("given",), backward=True, memory=True, **_TINY),),
        "training": (TrainingSettings(preset="tiny", contexts=(128,), local=64),),
        "decoding": (DecodingSettings(preset="tiny", positions=(64, 192), local=64),),
        "mechanisms": (
            AttentionSettings(lengths=(256,), mechanisms=("polysketch-paper", "polysketch-heavy"), **_TINY),
        ),
        "hyper": tuple(
            AttentionSettings(lengths=(256,), mechanisms=("hyper:min_length=64",), bidirectional=both, **_TINY)
            for both in (False, True)
        ),
        "bfloat16": (AttentionSettings(lengths=(256,), **_TINY),),
        "bfloat16-products": (
            AttentionSettings(lengths=(128, 256), mechanisms=_LEARNED, **_TINY),
            TrainingSettings(preset="tiny", contexts=(64,), models=_LEARNED, local=64),
        ),
        "plain-features": (PlainFeatureSettings(features=(8,), tokens=64, repeats=1, calls=1),),
        "threads": (ThreadSettings(shapes=(Shape(1, 1, 300),), ways=("given", "polysketch")),),
        "first-call": (FirstCallSettings(shipped=1),),
    },
    repeats=1,
    rate_size=256,
)
