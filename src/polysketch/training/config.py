"""The options of a training run. Each field is a flag of `polysketch train`, its docstring the flag's help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polysketch.training.boards import TRACKERS
from polysketch.training.option_groups import LearningOptions, MachineOptions, ModelOptions, ReadingOptions
from polysketch.training.options import OnResume, RunOptions, StepOptions, option


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(MachineOptions, LearningOptions, ModelOptions, ReadingOptions, RunOptions):
    """Train a model on a prepared data folder or a task; everything about the run goes into one run folder."""

    data: Path = option(on_resume=OnResume.FREE)  # it may have moved: its sha256 is compared
    """Folder that `polysketch prepare` made: the text to train on, and its tokenizer. Or one that `polysketch task`
    made. Or token files that others made, read where they are: a folder, or what the names of the files begin with
    (Megatron-LM's .bin and .idx, nanoGPT's and llm.c's .bin). These need --tokenizer or --vocab-size."""

    out: Path = option(on_resume=OnResume.FREE)
    """Run folder to create: configuration, metrics, checkpoints and plot go there."""

    resume: bool = option(False, on_resume=OnResume.FREE)
    """Go on from the last checkpoint in the run folder, with the same result as if the run had never stopped. Starts
    anew when the folder is empty, so the same command line can be repeated until the run is done."""

    checkpoint: str = option("latest", on_resume=OnResume.FREE)
    """With --resume: the checkpoint to go on from, for instance step-00000100. Later ones are set aside, not
    deleted."""

    extend: bool = option(False, on_resume=OnResume.FREE)
    """With --resume: allow more --steps than the run was started with. The learning rate then decays to the new end."""

    eval_every: int = option(100, on_resume=OnResume.FREE, least=0)
    """Evaluate on the validation split every so many steps, and at the end. 0: never."""

    keep_best: bool = option(True, on_resume=OnResume.FREE)
    """Also keep the checkpoint of the evaluation with the least validation loss, which commands take as --checkpoint
    best. It is written at that step, whatever --save-every says, and not counted in --keep."""

    validation: Literal["auto", "documents", "carried", "windows"] = option("auto", on_resume=OnResume.FREE)
    """How the validation split is read. documents: each apart, cut at the context. carried: whole documents, the state
    carried along. windows: stretches of the text. auto: as training reads; with --resume as the run was begun."""

    tensorboard: bool = option(True, on_resume=OnResume.FREE)
    """Also write TensorBoard files into the run folder, if TensorBoard is installed."""

    tracker: TRACKERS = option("none", on_resume=OnResume.FREE)
    """Also send the metrics and options of the run to Weights & Biases or Trackio, as that package is set up. The
    package must be installed."""

    tracker_project: str = option("polysketch", on_resume=OnResume.FREE)
    """The project of --tracker; the run has the name of its folder there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"--betas: expected two numbers from 0 to below 1, found {self.betas}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"--warmup: expected at most --steps, which is {self.steps}, found {self.warmup}")
        if self.pack == "documents" and self.compile:
            raise ValueError(
                "--pack documents: expected no --compile, for every batch has documents of other lengths and would be "
                "compiled anew: give --pack windows, or leave --compile out"
            )
        if self.carry_state and (self.pack == "windows" or self.compile):
            other = "--compile" if self.compile else "--pack windows"
            raise ValueError(f"--carry-state: expected rows of documents, and no {other}: leave one of them out")
        if self.mask_share > 1:
            raise ValueError(f"--mask-share: expected at most 1, found {self.mask_share}")
        if self.objective != "masked" and self.mask_share != TrainingConfig.mask_share:
            raise ValueError(f"--mask-share: expected --objective masked beside it, found {self.objective}")
        if self.init_new and self.init_from is None:
            raise ValueError(f"--init-new: expected --init-from beside it, found {', '.join(self.init_new)} alone")
        if not self.resume and (self.extend or self.checkpoint != "latest"):
            raise ValueError("--extend and --checkpoint go on with an existing run: give --resume as well")

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps, with the default filled in."""
        return self.steps // 10 if self.warmup is None else self.warmup

    def step_options(self) -> StepOptions:
        """What the optimizer steps of the run need to know."""
        return StepOptions(
            steps=self.steps,
            warmup=self.warmup_steps,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            optimizer=self.optimizer,
            betas=self.betas,
            weight_decay=self.weight_decay,
            clip=self.clip,
            accumulation=self.accumulation,
            compile=self.compile,
        )
