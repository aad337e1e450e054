"""The options of a conversion. Each field is a flag of `polysketch convert`, its docstring the flag's help."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polysketch.training.options import OnResume, RunOptions, option


@dataclass(frozen=True, kw_only=True)
class ConversionConfig(RunOptions):
    """Give a softmax model another attention, and train back what that cost; everything goes into one folder."""

    model: Path = option(on_resume=OnResume.FREE)  # the folder may have moved: its sha256 is compared
    """Folder of a model of transformers: its configuration, its weights (safetensors) and its tokenizer."""

    data: Path = option(on_resume=OnResume.FREE)
    """Folder that `polysketch prepare` made with the model's own tokenizer."""

    tokenizer: Path | None = option(None, on_resume=OnResume.FREE)
    """Folder with the model's tokenizer, where it is not beside the model. The converted model gets its files. Without
    one the converted model gets the tokenizer of the text."""

    out: Path = option(on_resume=OnResume.FREE)
    """Folder to create: configuration, metrics, checkpoints, the report, and the converted model under `model`."""

    attention: str = option("polysketch", on_resume=OnResume.REFUSED)
    """Attention mechanism that takes the place of softmax attention."""

    attention_options: Mapping[str, Any] = option(default_factory=dict, on_resume=OnResume.REFUSED)
    """Options of the mechanism, for instance {"sketch_size": 24, "window": 256}."""

    layers: int | tuple[int, ...] | Literal["all"] = option("all", on_resume=OnResume.REFUSED)
    """Which layers: all of them, a negative number for the last so many, or a tuple of indices."""

    dropout: Literal["refuse", "ignore"] = option("refuse", on_resume=OnResume.REFUSED)
    """What to do with attention dropout that the model was trained with: refuse to fine-tune, or leave it out."""

    sliding_window: Literal["refuse", "ignore"] = option("refuse", on_resume=OnResume.REFUSED)
    """What to do with layers whose window is shorter than the context: refuse, or let the mechanism see everything."""

    softcap: Literal["refuse", "ignore"] = option("refuse", on_resume=OnResume.REFUSED)
    """What to do with a model that caps its attention scores, as Gemma 2: refuse, or let the mechanism do without."""

    pack: Literal["documents", "windows"] = option("windows", on_resume=OnResume.REFUSED)
    """How training reads a window of the text: every document of it apart, or all as one text. What is measured is read
    as one text."""

    transfer: Literal["mechanisms", "layers"] = option("mechanisms", on_resume=OnResume.REFUSED)
    """What learns in attention transfer: the mechanisms alone, on the queries, keys and values of the model; or whole
    attention layers, projections included, by their outputs. The second keeps a copy of the model in memory."""

    transfer_steps: int = option(500, on_resume=OnResume.REFUSED, least=0)
    """Steps of attention transfer: the mechanism, or the layer, learns to give what softmax attention gave."""

    transfer_learning_rate: float = option(3e-3, on_resume=OnResume.REFUSED, positive=True)
    """Peak learning rate of attention transfer."""

    window_dropout: float = option(0.0, on_resume=OnResume.REFUSED, least=0.0)
    """Share of the steps of transfer and distillation that see an eighth of the window of a mechanism that has one, and
    with the rest of it must do by what lies beyond; it falls to zero at the end of each stage."""

    distillation_steps: int = option(0, on_resume=OnResume.REFUSED, least=0)
    """Steps of distillation, after the transfer: the model learns to give the next-token distribution that it gave with
    its own attention, of which a copy is kept in memory."""

    distillation_learning_rate: float = option(3e-4, on_resume=OnResume.REFUSED, positive=True)
    """Peak learning rate of distillation."""

    tuning_steps: int = option(500, on_resume=OnResume.REFUSED, least=0)
    """Steps of fine-tuning on the text itself, the last stage."""

    tuning: Literal["all", "lora"] = option("all", on_resume=OnResume.REFUSED)
    """What distillation and fine-tuning change besides the mechanisms: all weights, or adapters of low rank at the
    projections around the replaced attention, merged in the end."""

    lora_rank: int = option(8, on_resume=OnResume.REFUSED, least=1)
    """Rank of those adapters."""

    learning_rate: float = option(3e-4, on_resume=OnResume.REFUSED, positive=True)
    """Peak learning rate of fine-tuning."""

    weight_decay: float = option(0.0, on_resume=OnResume.REFUSED, least=0.0)
    """AdamW's weight decay in distillation and fine-tuning. Applies to matrices only."""

    seed: int = option(0, on_resume=OnResume.REFUSED)
    """Seed of the mechanisms' initial weights and of the order of the data."""

    eval_tokens: int = option(65_536, on_resume=OnResume.REFUSED, least=1)  # figures of all stages are compared
    """Number of validation tokens on which the model is measured before, between and after the stages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps == 0:
            raise ValueError(
                "--transfer-steps, --distillation-steps and --tuning-steps: expected a step of one of them, found none"
            )

        if not 0.0 <= self.window_dropout <= 1.0:
            raise ValueError(f"--window-dropout: expected a share from 0 to 1, found {self.window_dropout}")
        if self.transfer == "layers" and self.transfer_steps and self.tuning == "lora":
            raise ValueError(
                "--transfer layers: expected --tuning all, found lora, whose adapters begin from fixed projections"
            )

    @property
    def needs_teacher(self) -> bool:
        """Whether a stage learns from a copy of the model with its own attention."""
        return self.distillation_steps > 0 or (self.transfer == "layers" and self.transfer_steps > 0)

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return self.transfer_steps + self.distillation_steps + self.tuning_steps
