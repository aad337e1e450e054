"""`polysketch train`: train a model on prepared text, or go on with a run that was stopped."""

import sys

from polysketch.training import TrainingConfig, TrainingResult, train

__all__ = ["run"]

_SIGNAL_STATUS = 128


def run(flags: TrainingConfig) -> int:
    """Train as the flags say.

    Returns:
        Exit status: 0 when the run is finished or reached --max-minutes; 130 after SIGINT and 143 after SIGTERM, the
        numbers a shell gives to a process that such a signal ended (128 + signal), with everything saved.
    """
    result = train(flags)
    print(_ENDINGS[result.stopped_by].format(**_words(result, flags)), file=sys.stderr)
    return (
        0 if result.signal_number is None or result.stopped_by == "finished" else _SIGNAL_STATUS + result.signal_number
    )


def _words(result: TrainingResult, flags: TrainingConfig) -> dict[str, object]:
    return {"step": result.step, "steps": flags.steps, "folder": result.folder}


_ENDINGS = {
    "finished": "finished: {steps} steps, everything is in {folder}; next: polysketch evaluate {folder}",
    "signal": "stopped after step {step} of {steps} and saved in {folder}; the same command with --resume goes on",
    "time": "time is up after step {step} of {steps}, saved in {folder}; the same command with --resume goes on",
}
