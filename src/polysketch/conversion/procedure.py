"""`convert`: a softmax model in, the same model with another attention out, and what that cost."""

import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polysketch import plotting
from polysketch.conversion.config import ConversionConfig
from polysketch.conversion.folder import ConversionFolder, claim, write_report
from polysketch.conversion.report import build_report, plot_report
from polysketch.conversion.stages import ConversionTask, end_tuning
from polysketch.data import PreparedData, load_tokenizer
from polysketch.data.tokenization.loading import FILES_OF_FOLDERS, PAIRS
from polysketch.integrations.replacement import replaced_mechanisms, save_replaced
from polysketch.integrations.transformers_folder import read_model
from polysketch.storage import FolderLock, disk
from polysketch.training.checkpoint import checkpoint_step, delete_leftovers, list_checkpoints
from polysketch.training.environment import reproducible, resolve_device
from polysketch.training.loop import Loop, StopRequests, deadline
from polysketch.training.reporting import Reporter

_BESIDE_TOKENIZERS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    "chat_template.jinja",
)
_SAMPLE = 1000


@dataclass(frozen=True)
class ConversionResult:
    """How a call of `convert` ended.

    Attributes:
        folder: the conversion's folder; the converted model is in `model` below it once it is finished.
        step: optimizer steps made, both stages and all processes together.
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
    the same output for the same queries, keys and values. Then fine-tuning on the text, of all weights or of adapters.
    The loss on held-out text is measured before, after replacement, and after each stage. A conversion that is killed
    at any moment and resumed ends, on the same machine and library versions, with bit for bit the same weights. The
    converted model is in float32, whatever precision the model was saved in.

    Args:
        config: the options.
        progress: show progress on stderr.

    Raises:
        ValueError, FileNotFoundError: something in the options, the model, the data or the folder does not fit.
        RuntimeError: another process uses the folder, or loss or gradient is not finite.
        OSError: a file could not be written; the last complete checkpoint is intact.
    """
    end = deadline(config)
    folder = ConversionFolder(config.out)
    device = resolve_device(config.device)
    data = _open_data(config)
    reporter = Reporter(folder.metrics, config.steps, show=progress)
    with reproducible(device), FolderLock(folder.lock), StopRequests() as stop:
        claim(folder, config, reporter.say)
        _lay_out(folder)
        if _is_finished(folder, config):
            return ConversionResult(folder.path, config.steps, "finished", json.loads(folder.report.read_bytes()))
        model = read_model(config.model, dtype=torch.float32, device=device)
        _require_fitting(model, config)
        _require_same_vocabulary(model, data, config)
        task = ConversionTask(config, model, data, reporter)
        loop = Loop(folder, config, task, task.windows, reporter)
        _begin(folder, task, loop, reporter)
        reason = loop.run(stop, end)
        report = build_report(task.figures())
        if reason == "finished":
            end_tuning(model, config)
            _write_results(folder, config, model, report)
        return ConversionResult(folder.path, loop.step, reason, report, stop.signal_number)


def _begin(folder: ConversionFolder, task: ConversionTask, loop: Loop, reporter: Reporter) -> None:
    """Measure the model, replace its attention and measure again; then begin, or go back to the last checkpoint."""
    start = next(reversed(list_checkpoints(folder.checkpoints)), None)
    reporter.metrics.drop_after(-1 if start is None else checkpoint_step(start))
    task.replace_and_measure()
    if start is None:
        task.enter(step=0)
        loop.save()
    else:
        loop.load(start)
        task.require_figures(loop.step)


def _open_data(config: ConversionConfig) -> PreparedData:
    data = PreparedData.open(config.data)
    for split in ("train", "validation"):
        found = data.split(split).num_tokens
        if found < config.context + 1:
            raise ValueError(
                f"--context {config.context}: expected at least {config.context + 1} tokens in the {split} split of "
                f"{config.data}, found {found}: choose a shorter context or prepare more text"
            )
    return data


def _lay_out(folder: ConversionFolder) -> None:
    folder.checkpoints.mkdir(exist_ok=True)
    delete_leftovers(folder.checkpoints)


def _is_finished(folder: ConversionFolder, config: ConversionConfig) -> bool:
    """Whether all is done: the report is the last thing to be written."""
    saved = list_checkpoints(folder.checkpoints)
    return bool(saved) and checkpoint_step(saved[-1]) == config.steps and folder.report.is_file()


def _require_fitting(model: Any, config: ConversionConfig) -> None:
    """Refuse a model that was converted before, and windows that are longer than it has positions for."""
    if replaced_mechanisms(model):
        raise ValueError(
            f"expected a model with its own attention in {config.model}, found one that was replaced before"
        )
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and config.context > most:
        raise ValueError(
            f"--context: expected at most {most} tokens, which the model was made for, found {config.context}"
        )


def _require_same_vocabulary(model: Any, data: PreparedData, config: ConversionConfig) -> None:
    """Refuse text whose ids mean something else to the model than they did to its tokenizer."""
    size = model.get_output_embeddings().weight.shape[0]
    advice = f"prepare the text again with --tokenizer {config.model}"
    if data.tokenizer.vocab_size > size:
        raise ValueError(
            f"--data: expected text prepared with the tokenizer of {config.model}, whose vocabulary has {size} tokens, "
            f"found {data.tokenizer.name} with {data.tokenizer.vocab_size}: {advice}"
        )
    if not any((config.model / name).is_file() for name in FILES_OF_FOLDERS):
        return  # a model without its tokenizer: the size is all that can be compared
    own = load_tokenizer(config.model, data.tokenizer.end_of_text)
    sample = data.tokenizer.decode(np.asarray(data.split("validation").tokens[:_SAMPLE]).tolist())
    if own.encode(sample) != data.tokenizer.encode(sample):
        raise ValueError(
            f"--data: expected text prepared with the tokenizer of {config.model}, found {data.tokenizer.name}, which "
            f"gives other ids for the same text: {advice}"
        )


def _write_results(folder: ConversionFolder, config: ConversionConfig, model: Any, report: dict[str, Any]) -> None:
    temporary = disk.temporary_name(folder.model)
    for leftover in (temporary, folder.model):
        if leftover.is_dir():
            shutil.rmtree(leftover)  # of an earlier process that ended here: it is made of the same weights again
    save_replaced(model.eval(), temporary)
    for name in {*FILES_OF_FOLDERS, *itertools.chain(*PAIRS), *_BESIDE_TOKENIZERS}:
        if (config.model / name).is_file():
            shutil.copyfile(config.model / name, temporary / name)
    disk.publish_folder(temporary, folder.model)
    write_report(folder, report)
    if plotting.is_installed():
        plot_report(report["stages"], folder.report_plot)
