"""What `convert` does with the model once data, folder and options are known to fit: read, train back, write."""

import contextlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polysketch import plotting
from polysketch.conversion.config import ConversionConfig
from polysketch.conversion.folder import ConversionFolder, has_tokenizer, write_report
from polysketch.conversion.report import build_report, plot_report
from polysketch.conversion.task import ConversionTask
from polysketch.data import PreparedData, TokenizerLike, load_tokenizer
from polysketch.data.tokenization.loading import FILES_OF_FOLDERS, PAIRS
from polysketch.integrations import lora
from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer
from polysketch.integrations.replacement import replaced_mechanisms, save_replaced
from polysketch.integrations.transformers_folder import read_model
from polysketch.storage import disk
from polysketch.storage.sums import write_sums
from polysketch.training.checkpoint import checkpoint_step, list_checkpoints
from polysketch.training.loop import Loop, StopRequests
from polysketch.training.metrics_file import cut_back
from polysketch.training.reporting import Reporter

_OF_TOKENIZERS = {
    *(*FILES_OF_FOLDERS, *itertools.chain(*PAIRS)),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
}
_SAMPLE = 1000


def train_back(
    config: ConversionConfig,
    folder: ConversionFolder,
    device: torch.device,
    data: PreparedData,
    reporter: Reporter,
    stop: StopRequests,
    end: float,
) -> tuple[str, int, dict[str, Any]]:
    """All stages, or what remains of them, in a folder that is claimed and locked.

    Args:
        config: the options.
        folder: of the conversion, laid out.
        device: where the model computes.
        data: the prepared text.
        reporter: told of everything.
        stop: signals that ask for an end.
        end: when to stop, by `time.monotonic`.

    Returns:
        Why it ended, as `ConversionResult.stopped_by`; optimizer steps made; the report of the stages that are over.

    Raises:
        ValueError, RuntimeError, OSError: as `convert`.
    """
    model = read_model(config.model, dtype=torch.float32, device=device)
    _require_fitting(model, config)
    _require_same_vocabulary(model, data, config)
    task = ConversionTask(config, model, data, reporter)
    loop = Loop(folder, config, task, task.windows, reporter)
    _begin(folder, task, loop, reporter)
    reason = loop.run(stop, end)
    report = build_report(task.figures())
    if reason == "finished":
        lora.merge_adapters(model)
        _write_results(folder, config, model, report, data.tokenizer)
        if plotting.is_installed():
            _plot(report, folder.report_plot, reporter)
    return reason, loop.step, report


def _begin(folder: ConversionFolder, task: ConversionTask, loop: Loop, reporter: Reporter) -> None:
    """Measure the model, replace its attention and measure again; then begin, or go back to the last checkpoint."""
    start = next(reversed(list_checkpoints(folder.checkpoints)), None)
    cut_back(reporter.metrics, -1 if start is None else checkpoint_step(start), reporter.say)
    task.replace_and_measure()
    if start is None:
        task.enter(step=0)
        loop.save()
    else:
        loop.load(start)
        task.require_figures(loop.step)


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
    folder = config.tokenizer or config.model
    advice = f"prepare the text again with --tokenizer {folder}"
    if data.tokenizer.vocab_size > size:
        raise ValueError(
            f"--data: expected text prepared with the tokenizer of {config.model}, whose vocabulary has {size} tokens, "
            f"found {data.tokenizer.name} with {data.tokenizer.vocab_size}: {advice}"
        )
    if not has_tokenizer(folder):
        return  # a model without its tokenizer: the size is all that can be compared
    own = load_tokenizer(folder, data.tokenizer.end_of_text)
    sample = data.tokenizer.decode(np.asarray(data.split("validation").tokens[:_SAMPLE]).tolist())
    if own.encode(sample) != data.tokenizer.encode(sample):
        raise ValueError(
            f"--data: expected text prepared with the tokenizer of {folder}, found {data.tokenizer.name}, which "
            f"gives other ids for the same text: {advice}"
        )


def _save_tokenizer_of_text(tokenizer: TokenizerLike, folder: Path) -> None:
    """Give a model that came without a tokenizer that of the text it learned from, if transformers can have it."""
    with contextlib.suppress(ValueError):
        to_fast_tokenizer(tokenizer).save_pretrained(folder)


def _write_results(
    folder: ConversionFolder, config: ConversionConfig, model: Any, report: dict[str, Any], tokenizer: TokenizerLike
) -> None:
    temporary = disk.temporary_name(folder.model)
    if temporary.is_dir():
        shutil.rmtree(temporary)
    if folder.model.is_dir():  # of an earlier process that ended here: it is made of the same weights again
        disk.rename(folder.model, temporary)  # no part of it is to stand under its name
        shutil.rmtree(temporary)
    save_replaced(model.eval(), temporary)
    tokenizer_folder = config.tokenizer or config.model
    for name in {*_OF_TOKENIZERS, "generation_config.json"}:
        source = tokenizer_folder if name in _OF_TOKENIZERS else config.model
        if (source / name).is_file():
            shutil.copyfile(source / name, temporary / name)
    if not has_tokenizer(tokenizer_folder):
        _save_tokenizer_of_text(tokenizer, temporary)
    write_sums(temporary)
    disk.publish_folder(temporary, folder.model)
    write_report(folder, report)


def _plot(report: dict[str, Any], path: Path, reporter: Reporter) -> None:
    """Draw the report; a model that is converted and saved does not fail for a picture."""
    try:
        plot_report(report["stages"], path)
    except OSError as error:
        reporter.say(f"note: no plot of the report in {path}: {error.strerror or error}")
