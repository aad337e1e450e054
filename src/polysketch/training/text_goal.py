"""Language models of prepared text."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from polysketch import models
from polysketch.data import DocumentLanes, DocumentRows, PreparedData, TrainingWindows, require_same_tokenizer
from polysketch.data.documents import WholeDocuments
from polysketch.data.tokens import stretch
from polysketch.distributed.processes import Processes
from polysketch.models import TransformerLM
from polysketch.models.presets import EVERY
from polysketch.training.carried import check_carries
from polysketch.training.config import TrainingConfig
from polysketch.training.diagnostics import local_chunk, measure
from polysketch.training.goal import Goal, calibration_rows
from polysketch.training.loading import load_model
from polysketch.training.options import PACKED_BEFORE
from polysketch.training.requirements import check_data, tokenizer_of_data, verify_at_start
from polysketch.training.run_folder import RunFolder
from polysketch.training.step import precision
from polysketch.training.tensors import load_weights

AROUND = ("projection_convolution", "query_key_norm", "head_gate", "input_positions", "attention_every")
"""Options of what stands around attention; None is the preset's own."""


_READ = {"windows": "", "documents": ", documents apart", "carried": ", whole documents"}


class TextGoal(Goal):
    """A TransformerLM of prepared text.

    Args:
        config: the options.
        saved: those of the run that is gone on with; none for a new one.

    Attributes:
        config: the options, with the mechanism, its options, what stands around it and what is packed filled in.
        sizes: a `ModelConfig`; its vocabulary is the data's.
        data: the opened data folder.

    Raises:
        FileNotFoundError: the data folder is missing or incomplete.
        ValueError: unknown names or options, sizes that do not fit, a context longer than the data.
    """

    def __init__(self, config: TrainingConfig, saved: Mapping[str, Any]) -> None:
        self.config = config = explicit(config, saved)
        build_model_config(config)  # what no data can mend is refused before any is read
        self.data = PreparedData.open(config.data, tokenizer_of_data(config))
        check_data(config, self.data.description)
        self._check_validation()
        self.sizes = build_model_config(config, vocab_size=self.data.tokenizer.vocab_size)

    def describe(self) -> dict[str, Any]:
        """The sha256 of the data's description, which holds those of the token files, and the tokenizer."""
        return {"description_sha256": self.data.sha256, "tokenizer": self.data.tokenizer.name}

    def verify(self) -> None:
        """As `verify_at_start`."""
        verify_at_start(self.data)

    def check_layers(self, model: Any, processes: Processes) -> None:
        """Refuse a layer that cannot be computed of rows which processes share, or that cannot carry its state."""
        if processes.context is not None:
            try:
                model.init_spans(1)
            except NotImplementedError as error:
                raise ValueError(f"--mesh {processes.mesh}: {error}; or leave context out of the mesh") from None
        if self.config.carry_state or self.config.validation == "carried":
            check_carries(model, "--carry-state" if self.config.carry_state else "--validation carried")

    def build_model(self) -> TransformerLM:
        """As the base class has it."""
        model = TransformerLM(self.sizes)
        model.activation_checkpointing = self.config.activation_checkpointing
        return model

    def initialize(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Weights of another run, or the calibration of the prefix gains.

        Gains are calibrated on windows, whatever is trained on: these reach as far as the context.
        """
        config = self.config
        if config.init_from is not None:
            self._take_weights(model, config.init_from)
            if not config.init_new:
                return
        batch = self._windows().batch(0, config.batch_size)[: calibration_rows(config), :-1]
        with precision(dtype, device):
            model.calibrate(batch.to(device))

    def rows(self) -> TrainingWindows | DocumentRows | DocumentLanes:
        """Windows, rows of documents, or documents in lanes."""
        config, end_of_text = self.config, self.data.description.end_of_text
        if config.pack == "windows":
            return self._windows()
        tokens = self.data.split("train").tokens
        if config.carry_state:
            return DocumentLanes(tokens, config.context, config.batch_size, config.seed, end_of_text)
        return DocumentRows(tokens, config.context, config.seed, end_of_text)

    def measure(self, model: Any, processes: Processes) -> dict[str, Any]:
        """As `diagnostics.measure`."""
        config = self.config
        return measure(
            model,
            self.data,
            context=config.context,
            batch_size=config.batch_size // config.accumulation,
            max_tokens=config.eval_tokens,
            processes=processes,
            on=config.validation,
        )

    def told(self, figures: Mapping[str, Any]) -> str:
        """Loss, and bits per byte where bytes are known."""
        bits = "" if figures["bits_per_byte"] is None else f", {figures['bits_per_byte']:.4f} bits per byte"
        return f"validation loss {figures['loss']:.4f}{bits}{_READ[self.config.validation]}"

    def notes(self, model: Any, rows: Any) -> Iterator[str]:
        """How documents are packed, and a sketch that is never used."""
        if isinstance(rows, DocumentRows):
            yield f"documents packed into {rows.num_rows:,} rows an epoch, {rows.padding_share:.2%} padding"
        if isinstance(rows, DocumentLanes):
            lanes = f"documents in {rows.lanes:,} lanes of {rows.num_steps:,} rows an epoch"
            yield f"{lanes}, {rows.padding_share:.2%} padding; their states are carried from row to row"
        chunk = local_chunk(model)
        if chunk is not None and chunk >= self.config.context:
            yield (
                f"note: a context of {self.config.context} lies within one local chunk of {chunk}, where attention is "
                "exact: the sketch is never used; a smaller local_chunk in --attention-options changes that"
            )

    def lay_out(self, run: RunFolder) -> None:
        """The description and the tokenizer of the data, so that the run can be used without the data."""
        run.tokenizer.mkdir(exist_ok=True)
        self.data.copy_tokenizer(run.tokenizer)

    def _check_validation(self) -> None:
        """Refuse a validation split in which nothing is predicted, before a step is made."""
        if not self.config.eval_every:
            return
        tokens = stretch(self.data.split("validation").tokens, 0, self.config.eval_tokens + 1)
        if len(tokens) < 2:
            raise ValueError(
                f"--data: expected at least 2 validation tokens in {self.config.data}, found {len(tokens)}: prepare "
                "more text, or train without evaluation by --eval-every 0"
            )
        if self.config.validation == "windows":
            return
        if not WholeDocuments(tokens, self.data.description.end_of_text).num_tokens:
            raise ValueError(
                f"--eval-tokens: expected a document of at least 2 tokens among the first {len(tokens)} of the "
                "validation split, found none: give more, or --eval-every 0, or --validation windows"
            )

    def _windows(self) -> TrainingWindows:
        return TrainingWindows(self.data.split("train").tokens, self.config.context, self.config.seed)

    def _take_weights(self, model: Any, source: Path) -> None:
        other, description = load_model(source)
        require_same_tokenizer(
            description.tokenizer,
            self.data.tokenizer,
            owner=f"the run {source}",
            other=f"the data folder {self.config.data}",
        )
        load_weights(model, other.state_dict(), str(description.checkpoint), self.config.init_new)


def build_model_config(config: TrainingConfig, **changes: Any) -> models.ModelConfig:
    """The preset with the run's mechanism, its options, what stands around it, the number of layers, and more."""
    given = {
        "num_layers": config.layers,
        "rotary": config.rotary,
        **{name: getattr(config, name) for name in AROUND},
    }
    changes |= {name: value for name, value in given.items() if value is not None}
    return models.preset(
        config.preset, attention=config.attention, attention_options=config.attention_options, **changes
    )


def explicit(config: TrainingConfig, saved: Mapping[str, Any]) -> TrainingConfig:
    """The mechanism, its options, what stands around it and what is packed, so that a saved run says what it is.

    What was not given is as in the run that is gone on with (`saved`), else as in the preset.
    """
    attention, options = config.attention, config.attention_options
    if attention in (None, saved.get("attention")) and not options and saved.get("attention") is not None:
        attention, options = saved["attention"], saved["attention_options"]
    if attention is None:
        attention, options = models.preset_attention(config.preset, options)
    around: dict[str, Any] = {name: _around(name, config, saved) for name in AROUND}
    # A preset may name the mechanisms that have rotary positions; what was not given stays open.
    around["rotary"] = saved.get("rotary") if config.rotary is None else config.rotary
    read: dict[str, Any] = {"pack": _packing(config, saved), "validation": _validation(config, saved)}
    return dataclasses.replace(config, attention=attention, attention_options=options, **read, **around)


def _around(name: str, config: TrainingConfig, saved: Mapping[str, Any]) -> Any:
    """What stands around attention: as given, as in the run, or as in the preset."""
    preset = models.preset_fields(config.preset)
    if config.attention is not None:
        preset.pop(EVERY, None)
    told = (getattr(config, name), saved.get(name), preset.get(name), getattr(models.ModelConfig, name))
    return next(value for value in told if value is not None)


def _packing(config: TrainingConfig, saved: Mapping[str, Any]) -> Any:
    """What the rows of the run hold: documents where they can be had, unless a run is gone on with."""
    if config.pack != "auto":
        return config.pack
    if saved:
        return saved.get("pack", PACKED_BEFORE)
    return "windows" if config.compile else "documents"


def _validation(config: TrainingConfig, saved: Mapping[str, Any]) -> Any:
    """What validation reads: what training reads, unless a run is gone on with."""
    if config.validation != "auto":
        return config.validation
    if saved:
        return saved.get("validation", PACKED_BEFORE)
    return "carried" if config.carry_state else _packing(config, saved)
