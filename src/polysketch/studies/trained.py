"""A language model of a study: trained to the end, and what its metrics say."""

from __future__ import annotations

from typing import Any

from polysketch.studies.finished import require_finished
from polysketch.training import TrainingConfig, train
from polysketch.training.run_folder import RunFolder

_CURVE = ("step", "tokens", "seconds", "loss", "gradient_norm")


def trained(config: TrainingConfig) -> dict[str, Any]:
    """Begin a run, go on with it, or find it finished.

    Args:
        config: its options, with `resume`.

    Returns:
        `steps`, `tokens`, `seconds` of training steps alone, `tokens_per_second`, `curve` (lists of equal length by
        name) and `validation`, the lines of its evaluations; JSON values.

    Raises:
        Stopped: it was asked to stop, and saved.
    """
    require_finished(train(config))
    lines = RunFolder(config.out).open_metrics().read()
    steps = [line for line in lines if line["kind"] == "train"]
    last = steps[-1]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": last["tokens"] / max(last["seconds"], 1e-9),
        "curve": {name: [line[name] for line in steps] for name in _CURVE},
        "validation": [line for line in lines if line["kind"] == "evaluation"],
    }
