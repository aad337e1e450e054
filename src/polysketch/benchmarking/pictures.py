"""A vision transformer forward, against the same one with softmax attention, in alternating calls of one run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polysketch.benchmarking.attention_alone import check_agreement
from polysketch.benchmarking.floors import Floor, Shape
from polysketch.benchmarking.mechanisms import floor
from polysketch.benchmarking.models import BASELINE
from polysketch.benchmarking.settings import AttentionSettings, PicturesSettings
from polysketch.benchmarking.way_names import mechanism_of, with_baseline
from polysketch.benchmarking.workbench import Workbench
from polysketch.models import PatchEncoder, PatchEncoderConfig
from polysketch.models.answering import encoder_preset

_COLOURS = 3


def time_pictures(bench: Workbench, settings: PicturesSettings) -> list[dict[str, Any]]:
    """Compare the attention of every model with its definition, then time the models, which take turns.

    Returns:
        A measurement for each size of pictures and model, the baseline first: length (patches), series, seconds (the
        median), all_seconds, ratio (times as fast as the baseline: the median over neighbours in time),
        tokens_per_second, floor_seconds, operations, bytes.

    Raises:
        ValueError: attention that disagrees with its definition; nothing has been timed then.
    """
    _check(bench, settings)
    found = [_time_size(bench, settings, size) for size in settings.image_sizes]
    return [one for measurements in found for one in measurements]


def _check(bench: Workbench, settings: PicturesSettings) -> None:
    """Attention of the models' shapes, bidirectional."""
    config = _config(settings, BASELINE, settings.image_sizes[0])
    asked = AttentionSettings(
        lengths=tuple((size // settings.patch) ** 2 for size in settings.image_sizes),
        mechanisms=settings.models,
        batch=settings.batch,
        heads=config.num_heads,
        head_dim=config.head_dim,
        sketch_size=settings.sketch_size,
        local=settings.local,
        bidirectional=True,
    )
    check_agreement(bench, asked)


def _config(settings: PicturesSettings, name: str, size: int) -> PatchEncoderConfig:
    mechanism, options = mechanism_of(name, settings.sizes)
    picture: dict[str, Any] = {"image_size": (size, size, _COLOURS), "patch_size": settings.patch, "vocab_size": 256}
    found = encoder_preset(
        settings.preset, PatchEncoderConfig, attention=mechanism, attention_options=options, **picture
    )
    assert isinstance(found, PatchEncoderConfig)
    return found


def _time_size(bench: Workbench, settings: PicturesSettings, size: int) -> list[dict[str, Any]]:
    names = with_baseline(settings.models, BASELINE)
    generator = torch.Generator().manual_seed(0)
    shape = (settings.batch, size * size * _COLOURS)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(bench.device)
    configs = {name: _config(settings, name, size) for name in names}
    calls = {name: _forward(config, pixels, bench) for name, config in configs.items()}
    patches = (size // settings.patch) ** 2
    seconds = bench.clock.alternate(calls, repeats=bench.repeats, progress=bench.saying(f"{patches:,} patches"))
    floors = {name: forward_floor(config, settings.batch, bench.dtype.itemsize) for name, config in configs.items()}
    return [
        {
            "direction": f"forward of a vision transformer of {settings.preset}",
            "length": patches,
            "series": name,
            **bench.measurement(seconds, name, BASELINE, settings.batch * patches, floors[name]),
        }
        for name in names
    ]


def _forward(config: PatchEncoderConfig, pixels: Tensor, bench: Workbench) -> Callable[[], Tensor]:
    """The same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = PatchEncoder(config).to(bench.device).eval()
    autocast = torch.autocast(bench.device.type, dtype=bench.dtype, enabled=bench.dtype != torch.float32)

    @torch.no_grad()
    def forward() -> Tensor:
        with autocast:
            return model(pixels)

    return forward


def forward_floor(config: PatchEncoderConfig, batch: int, itemsize: int) -> Floor | None:
    """Matrix products and attention; every weight read once. None where attention is not counted.

    A patch goes through 4 hidden_size^2 weights of projections and 3 hidden_size feedforward_size of the gated linear
    unit a layer, 2 operations each; softmax attention costs it 4 hidden_size n a layer.
    """
    (rows, columns), hidden = config.grid, config.hidden_size
    shape = Shape(batch, rows * columns, config.num_heads, config.head_dim, causal=False)
    embedded = config.patch_size**2 * config.image_size[2] * hidden
    weights = embedded + config.num_layers * (4 * hidden**2 + 3 * hidden * config.feedforward_size)
    whole = Floor(2 * shape.tokens * weights, weights * itemsize)
    for name, options in config.layers():
        attention = floor(name, options, shape, backward=False, itemsize=itemsize)
        if attention is None:
            return None
        whole = whole + attention
    return whole
