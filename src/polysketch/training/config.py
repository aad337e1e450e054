"""The options of a training run. Each field is a flag of `polysketch train`, its docstring the flag's help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Train a language model on a prepared data folder; everything about the run goes into one run folder."""

    data: Path
    """Folder that `polysketch prepare` made: the text to train on, and its tokenizer."""

    out: Path
    """Run folder to create: configuration, metrics, checkpoints and plot go there."""

    resume: bool = False
    """Go on from the last checkpoint in the run folder, with the same result as if the run had never stopped. Starts
    anew when the folder is empty, so the same command line can be repeated until the run is done."""

    checkpoint: str = "latest"
    """With --resume: the checkpoint to go on from, for instance step-00000100. Later ones are set aside, not
    deleted."""

    extend: bool = False
    """With --resume: allow more --steps than the run was started with. The learning rate then decays to the new end."""

    init_from: Path | None = None
    """Run folder whose latest weights to start from (the weights only; step, data and learning rate start anew)."""

    preset: str = "tiny"
    """Size of the model: tiny (about 1 million parameters), mini (about 10 million), gpt2-small, gpt2-medium,
    gpt2-large; based-tiny and based-360m interleave linear attention, short windows and short convolutions."""

    layers: int | None = None
    """Number of layers, if other than the preset's."""

    attention: str | tuple[str, ...] | None = None
    """Attention mechanism: polysketch, softmax, polynomial or another; an unknown name lists those that exist. A tuple
    is a pattern, repeated over the layers. Default: the preset's own, else polysketch."""

    attention_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = field(default_factory=dict)
    """Options of the mechanism, for instance {"sketch_size": 32, "local_chunk": 256}; with a pattern, the options of
    each mechanism under its name. Without `attention` they change the preset's own."""

    context: int = 2048
    """Context length: the number of tokens in a training window."""

    batch_size: int = 4
    """Number of training windows in one optimizer step."""

    accumulation: int = 1
    """Compute each batch in this many parts, one after the other. Needs less memory; the result is the same up to
    rounding. Must divide the batch size."""

    steps: int = 1000
    """Number of optimizer steps of the whole run."""

    warmup: int | None = None
    """Number of steps over which the learning rate rises to its peak. Default: a tenth of the steps."""

    learning_rate: float = 2e-3
    """Peak learning rate. Small models stand 1e-3 to 3e-3; for gpt2-small the papers use 7e-4."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's running mean of the gradient and of its square."""

    weight_decay: float = 0.1
    """AdamW's weight decay. Applies to matrices only, not to gains and biases."""

    clip: float = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down to it."""

    seed: int = 0
    """Seed of the initial weights and of the order of the data."""

    device: str = "auto"
    """Where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the matrix products; weights and sums stay float32. auto is bfloat16 on a GPU, float32 elsewhere."""

    threads: int | None = None
    """Number of CPU threads. Default: PyTorch's choice. Another number changes the rounding on a CPU."""

    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and recompute the rest: less memory, about a third slower."""

    compile: bool = False
    """Compile the model with torch.compile: minutes at the start, then faster steps on a GPU."""

    log_every: int = 10
    """Write a line of metrics every so many steps."""

    eval_every: int = 100
    """Evaluate on the validation split every so many steps, and at the end. 0: never."""

    eval_tokens: int = 65_536
    """Number of validation tokens of an evaluation."""

    save_every: int = 100
    """Save a checkpoint every so many steps; one is always saved at the start and at the end."""

    keep: int = 2
    """Number of checkpoints to keep; older ones are deleted once a newer one is complete."""

    max_minutes: float | None = None
    """Save and stop after this many minutes of this process; go on later with --resume."""

    tensorboard: bool = True
    """Also write TensorBoard files into the run folder, if TensorBoard is installed."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:  # `not >=` also catches nan
                raise ValueError(f"{flag(name)}: expected at least {least}, found {value}")
            if value is not None and value > _MOST:
                raise ValueError(f"{flag(name)}: expected at most {_MOST}, found {value}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{flag(name)}: expected a finite number above 0, found {value}")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"--seed: expected a number of 64 bits, found {self.seed}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"--betas: expected two numbers from 0 to below 1, found {self.betas}")
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"--accumulation: expected a divisor of the batch size {self.batch_size}, found {self.accumulation}"
            )
        if self.warmup_steps > self.steps:
            raise ValueError(f"--warmup: expected at most --steps, which is {self.steps}, found {self.warmup}")
        if not self.resume and (self.extend or self.checkpoint != "latest"):
            raise ValueError("--extend and --checkpoint go on with an existing run: give --resume as well")

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps, with the default filled in."""
        return self.steps // 10 if self.warmup is None else self.warmup


_LEAST = {
    "layers": 1,
    "context": 1,
    "batch_size": 1,
    "accumulation": 1,
    "steps": 1,
    "warmup": 0,
    "weight_decay": 0.0,
    "threads": 1,
    "log_every": 1,
    "eval_every": 0,
    "eval_tokens": 1,
    "save_every": 1,
    "keep": 1,
}
_MOST = 2**31 - 1  # absurd for every one of them, and a number that every library can hold
_POSITIVE = ("learning_rate", "clip", "max_minutes")


def flag(name: str) -> str:
    """The command-line flag of a field, for messages."""
    return "--" + name.replace("_", "-")
