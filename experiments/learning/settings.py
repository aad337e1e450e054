"""What the study holds equal for all forms, and its text."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from experiments.learning.forms import Form
from polysketch.data import PreparedData, prepare
from polysketch.training import TrainingConfig

_SHORTEST = 2_000  # bytes of a file: in shorter ones nothing repeats from afar
_CURVE_POINTS, _EVALUATIONS, _CHECKPOINTS = 200, 10, 20


@dataclass(frozen=True)
class LearningSettings:
    """Data, model and training of one size of the study.

    Attributes:
        tokenizer: specification of the tokenizer that is trained.
        preset: size of the model.
        layers: its layers.
        context: tokens of a training window.
        window: tokens with exact weights, in every form that has such a part.
        batch_size: windows of a step.
        steps: optimizer steps.
        learning_rate: peak of the schedule.
        optimizer: as in `TrainingConfig`.
        projection_convolution, query_key_norm, head_gate: what stands around every mechanism.
        input_positions: whether sinusoidal positions are added to embedded tokens.
        validation_tokens: tokens of each evaluation during training.
        evaluation_windows: held-out windows whose losses are told apart.
        device: where the model is trained and judged; on a GPU in bfloat16.
    """

    tokenizer: str = "bpe:1024"
    preset: str = "tiny"
    layers: int = 4
    context: int = 1024
    window: int = 64
    batch_size: int = 4
    steps: int = 2500
    learning_rate: float = 1e-2  # for Muon; 3e-3 was far too low in trials
    optimizer: str = "muon"
    projection_convolution: int = 4
    query_key_norm: bool = True
    head_gate: bool = False
    input_positions: bool = False
    validation_tokens: int = 65_536
    evaluation_windows: int = 64
    device: str = "cpu"

    def training(self, form: Form, *, seed: int, data: Path, out: Path, threads: int | None) -> TrainingConfig:
        """The options of a run, which may be begun, gone on with, or finished already."""
        return TrainingConfig(
            data=data,
            out=out,
            resume=True,
            preset=self.preset,
            layers=self.layers,
            attention=form.attention,
            attention_options=form.attention_options(self.window),
            projection_convolution=self.projection_convolution,
            query_key_norm=self.query_key_norm,
            head_gate=self.head_gate,
            input_positions=self.input_positions,
            context=self.context,
            batch_size=self.batch_size,
            pack="windows",
            steps=self.steps,
            learning_rate=self.learning_rate,
            optimizer=self.optimizer,  # type: ignore[arg-type]
            seed=seed,
            device=self.device,
            threads=threads,
            log_every=max(1, self.steps // _CURVE_POINTS),
            eval_every=max(1, self.steps // _EVALUATIONS),
            eval_tokens=self.validation_tokens,
            save_every=max(1, self.steps // _CHECKPOINTS),
            tensorboard=False,
        )


SIZES = {
    "smoke": LearningSettings(
        tokenizer="bytes",
        layers=4,
        context=48,
        window=8,
        batch_size=2,
        steps=2,
        validation_tokens=256,
        evaluation_windows=3,
    ),
    "quick": LearningSettings(layers=3, context=512, window=32, batch_size=8, steps=600, evaluation_windows=128),
    "cpu": LearningSettings(),
    "gpu": LearningSettings(
        tokenizer="bpe:16384",
        preset="gpt2-small",
        layers=8,
        context=8192,
        window=256,
        batch_size=8,
        steps=2000,
        learning_rate=3e-3,
        validation_tokens=524_288,
        device="cuda",
    ),
}
"""smoke: seconds for each form. quick: 0.7 million parameters and 2.5 million tokens, about ten minutes. cpu:
about a million parameters and 10 million tokens, an hour or two for each form. gpu: eight layers of gpt2-small's width
and 130 million tokens, of a folder prepared from more text than the standard library has."""


def source_code(tokenizer: str, out: Path) -> PreparedData:
    """Python's standard library, prepared: in `out` when it is there already. Nothing is downloaded.

    It is on every machine that runs Python, and it repeats its names from afar: that is what a far field is for.
    """
    if (out / "description.json").is_file():
        return PreparedData.open(out)
    library = Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in sorted(library.rglob("*.py")) if not _left_out(path.relative_to(library)))
    files = [path for path in found if path.stat().st_size >= _SHORTEST]
    out.parent.mkdir(parents=True, exist_ok=True)
    return prepare(files, tokenizer, out)


def _left_out(path: Path) -> bool:
    """Other people's packages, tests and their data, and tables of characters."""
    return bool({"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings"} & set(path.parts))
