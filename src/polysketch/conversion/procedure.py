"""`convert`: a softmax model in, the same model with another attention out, and what that cost."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polysketch.conversion.config import ConversionConfig
from polysketch.conversion.folder import ConversionFolder, check_requirements, claim
from polysketch.data import PreparedData
from polysketch.storage import FolderLock
from polysketch.storage.outside import read_object
from polysketch.storage.sealed import unsealed
from polysketch.training.checkpoint import checkpoint_step, delete_leftovers, list_checkpoints
from polysketch.training.environment import reproducible, resolve_device
from polysketch.training.loop import StopRequests, deadline
from polysketch.training.reporting import Reporter


@dataclass(frozen=True)
class ConversionResult:
    """How a call of `convert` ended.

    Attributes:
        folder: the conversion's folder; the converted model is in `model` below it once it is finished.
        step: optimizer steps made, all stages and processes together.
        stopped_by: `finished`, `time` (`max_minutes`) or `signal`.
        report: as `build_report` gives it, of the stages that are over.
        signal_number: the signal, or None.
    """

    folder: Path
    step: int
    stopped_by: str
    report: dict[str, Any]
    signal_number: int | None = None


def convert(config: ConversionConfig, *, progress: bool = True) -> ConversionResult:
    """Replace a softmax model's attention and train back what that cost, or go on with a conversion.

    First attention transfer: with the model frozen and its own attention running, each new mechanism learns to give
    the same output for the same queries, keys and values; or each attention layer, projections included, for the same
    input (`transfer="layers"`). Then distillation, where it has steps: all weights, or
    adapters, learn to give the logits of the model with its own attention, of which a copy stays in memory from the
    start to the end. Then fine-tuning of the same weights on the text. The loss on held-out text is measured before,
    after replacement, and after each stage. A conversion that is killed at any moment and resumed ends, on the same
    machine and library versions, with bit for bit the same weights. The converted model is in float32, whatever
    precision the model was saved in.

    Args:
        config: the options.
        progress: show progress on stderr.

    Raises:
        ValueError, FileNotFoundError: something in the options, the model, the data or the folder does not fit.
        RuntimeError: another process uses the folder, or loss or gradient is not finite.
        OSError: a file could not be written; the last complete checkpoint is intact.
    """
    end = deadline(config)
    check_requirements(config)
    folder = ConversionFolder(config.out)
    folder.require_own()
    device = resolve_device(config.device)
    data = PreparedData.open(config.data)
    data.verify("train", "validation")
    reporter = Reporter(folder, config.steps, show=progress)
    with reproducible(device), FolderLock(folder.lock), StopRequests() as stop:
        claim(folder, config, reporter.say)
        _lay_out(folder)
        if _is_finished(folder, config):
            return ConversionResult(
                folder.path, config.steps, "finished", unsealed(read_object(folder.report), str(folder.report))
            )
        # transformers takes seconds to import: what is wrong above is said before.
        from polysketch.conversion.retraining import train_back

        reason, step, report = train_back(config, folder, device, data, reporter, stop, end)
        return ConversionResult(folder.path, step, reason, report, stop.signal_number)


def _lay_out(folder: ConversionFolder) -> None:
    folder.checkpoints.mkdir(exist_ok=True)
    delete_leftovers(folder.checkpoints)


def _is_finished(folder: ConversionFolder, config: ConversionConfig) -> bool:
    """Whether all is done, and still there: the report is the last thing to be written."""
    saved = list_checkpoints(folder.checkpoints)
    done = bool(saved) and checkpoint_step(saved[-1]) == config.steps
    return done and folder.report.is_file() and folder.model.is_dir()
