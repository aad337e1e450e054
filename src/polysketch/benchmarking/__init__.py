"""Timing attention, training steps, decoding and pictures: what `polysketch benchmark` and `make bench` run.

Every speed is a ratio of alternating calls in one run, every computation of ours is compared with its reference before
it is timed, and beside every time stands the floor: operations and bytes counted from shapes, over the rates of this
machine measured in the same run.
"""

from typing import TYPE_CHECKING

from polysketch.benchmarking.settings import (
    AttentionSettings,
    DecodingSettings,
    HyperSettings,
    PicturesSettings,
    ServingSettings,
    TrainingSettings,
)
from polysketch.lazy import on_demand

if TYPE_CHECKING:
    from polysketch.benchmarking.attention_alone import time_attention
    from polysketch.benchmarking.hyper_speed import time_hyper
    from polysketch.benchmarking.pictures import time_pictures
    from polysketch.benchmarking.serving import measure_serving
    from polysketch.benchmarking.token_steps import time_decoding
    from polysketch.benchmarking.training_steps import time_training
    from polysketch.benchmarking.workbench import Workbench, measure_rates, record
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "attention_alone": ["time_attention"],
            "hyper_speed": ["time_hyper"],
            "pictures": ["time_pictures"],
            "serving": ["measure_serving"],
            "token_steps": ["time_decoding"],
            "training_steps": ["time_training"],
            "workbench": ["Workbench", "measure_rates", "record"],
        },
    )

__all__ = [
    "AttentionSettings",
    "DecodingSettings",
    "HyperSettings",
    "PicturesSettings",
    "ServingSettings",
    "TrainingSettings",
    "Workbench",
    "measure_rates",
    "measure_serving",
    "record",
    "time_attention",
    "time_decoding",
    "time_hyper",
    "time_pictures",
    "time_training",
]
