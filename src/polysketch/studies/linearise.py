"""Linearising a softmax model: what each part of a conversion regains, beside its controls."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from polysketch.data import PreparedData, prepare
from polysketch.plotting import loss_by_position, picture
from polysketch.studies import kept
from polysketch.studies.finished import require_finished
from polysketch.studies.passages import SPLITS, passage_recall, recall_passages
from polysketch.studies.presentation import number
from polysketch.studies.study import Record, Study, Verdict
from polysketch.studies.texts import book_files, prepared_once

_STAGES = {"replaced": "replaced", "transfer": "transferred", "distillation": "distilled", "tuning": "tuned"}
_JUDGED, _OTHERS = "polysketch-both", ("polysketch", "polysketch-paper")
_BEHIND, _KEPT = 0.05, 0.8  # nats, and a share of recall


@dataclass(frozen=True)
class LineariseSettings:
    """One size of the study.

    Attributes:
        tokenizer: specification of the tokenizer that is trained on books and passages.
        books: at most so many of each split; None takes all.
        text_passages: recall passages of each split.
        pairs: pairs of words of a passage.
        hidden_size, layers, heads, kv_heads, feedforward_size: of the Llama; heads are hidden_size / heads wide.
        context: tokens of a window, of its training and of the conversion.
        model_steps, model_batch_size, model_learning_rate: its training.
        model_passages: recall passages of a step, beside the windows; the loss of their answers is added to that of the
            windows, for answers are too few of all tokens for a small model to learn to look back in minutes.
        sketch_size, local_chunk: of the mechanism; chunks shorter than the way back to an answer. Windows are as long.
        conversion_books: books that conversions train on beside all passages; None takes those of the model. Of all of
            them a ninth of the text are passages, and what a text seldom asks for a conversion does not keep.
        conversion_pack: whether conversions read passages apart, as they are asked for, or whole windows of them.
        transfer_steps, tuning_steps, batch_size: of every conversion. Where a row distils, it is by so many of the
            tuning steps.
        transfer_learning_rate, learning_rate: their peaks, the second one of distillation too.
        eval_tokens: validation tokens that the loss is measured on.
        passages: recall passages of the test split that are asked.
    """

    tokenizer: str = "bpe:4096"
    books: int | None = None
    text_passages: tuple[int, int, int] = (40_000, 400, 400)
    pairs: int = 8
    hidden_size: int = 128
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    feedforward_size: int = 256
    context: int = 512
    model_steps: int = 2400
    model_batch_size: int = 4
    model_learning_rate: float = 3e-3
    model_passages: int = 48
    sketch_size: int = 32
    local_chunk: int = 16
    conversion_books: int | None = 14
    conversion_pack: Literal["documents", "windows"] = "documents"
    transfer_steps: int = 400
    tuning_steps: int = 400
    batch_size: int = 8
    transfer_learning_rate: float = 1e-2
    learning_rate: float = 5e-4
    eval_tokens: int = 65_536
    passages: int = 100

    def of_model(self) -> dict[str, Any]:
        """What the softmax model depends on; JSON values."""
        own = ("hidden_size", "layers", "heads", "kv_heads", "feedforward_size", "context")
        settings = dataclasses.asdict(self)
        return self.of_text() | {
            name: value for name, value in settings.items() if name in own or name.startswith("model_")
        }

    def of_text(self) -> dict[str, Any]:
        """What the text depends on; JSON values."""
        return {name: getattr(self, name) for name in ("tokenizer", "books", "text_passages", "pairs")}


@dataclass(frozen=True)
class Conversion:
    """A row.

    Attributes:
        attention: the mechanism.
        transfer: whether attention transfer comes first: of "mechanisms", or of whole "layers"; empty for none.
        distilled: share of the tuning steps that are distillation (the logits of the softmax model), before the others.
        fresh: whether it starts from projections drawn anew.
        window_dropout: share of the first steps of transfer and distillation that see little of the window.
        trained_anew: whether polysketch has its defaults for models that are trained from the start, and not those that
            suit a model that was trained with softmax.
    """

    attention: str
    transfer: Literal["mechanisms", "layers", ""] = "mechanisms"
    distilled: float = 0.0
    fresh: bool = False
    window_dropout: float = 0.0
    trained_anew: bool = False

    def options(self, settings: LineariseSettings) -> dict[str, Any]:
        """The mechanism's options."""
        anew = {"normed": True, "sketched": "unrotated"} if self.trained_anew else {}
        options: dict[str, dict[str, Any]] = {
            "polysketch-paper": {"sketch_size": settings.sketch_size, "local_chunk": settings.local_chunk},
            "polysketch": {"sketch_size": settings.sketch_size, "window": settings.local_chunk, **anew},
            "local": {"local_chunk": settings.local_chunk},
            "sliding-window": {"window": settings.local_chunk},
        }
        return options.get(self.attention, {})

    def stages(self, settings: LineariseSettings) -> dict[str, Any]:
        """Its stages, as options of a conversion; with distillation as many steps as without."""
        distillation = round(self.distilled * settings.tuning_steps)
        return {
            "transfer": self.transfer or "mechanisms",
            "transfer_steps": settings.transfer_steps if self.transfer else 0,
            "distillation_steps": distillation,
            "tuning_steps": settings.tuning_steps - distillation,
            "window_dropout": self.window_dropout,
        }


CONVERSIONS = {
    "polysketch-paper": Conversion("polysketch-paper"),
    "polysketch-paper-no-transfer": Conversion("polysketch-paper", transfer=""),
    "polysketch": Conversion("polysketch"),
    "polysketch-no-transfer": Conversion("polysketch", transfer=""),
    "polysketch-distilled": Conversion("polysketch", distilled=1.0),
    "polysketch-both": Conversion("polysketch", distilled=0.5),
    "polysketch-anew": Conversion("polysketch", distilled=0.5, trained_anew=True),
    "polysketch-layers": Conversion("polysketch", transfer="layers", distilled=1.0),
    "polysketch-layers-both": Conversion("polysketch", transfer="layers", distilled=0.5),
    "polysketch-dropout": Conversion("polysketch", transfer="layers", distilled=1.0, window_dropout=0.5),
    "local": Conversion("local"),
    "window": Conversion("sliding-window", transfer=""),
    "polysketch-paper-fresh": Conversion("polysketch-paper", transfer="", fresh=True),
    "softmax": Conversion("softmax", transfer=""),
}
"""Conversions, and controls: local chunks or a window alone, no attention transfer, projections drawn anew, and the
same fine-tuning of softmax attention itself. `both` is half distillation and half fine-tuning, and `anew` the same with
the mechanism's defaults for training from the start."""


class LineariseStudy(Study):
    """A small Llama is trained on books and recall passages, and converted as `polysketch convert` does it.

    A record has the loss before, after replacement and after each stage, and how many words of passages most of whose
    answers lie further back than a local chunk or window are recalled, before and after.
    """

    claim = (
        f"Converted to polysketch, a model is within {_BEHIND} nats of softmax attention that was tuned as long, and "
        "keeps 0.8 of its recall."
    )
    paper = "none, the question is our own"
    rows = tuple(CONVERSIONS)
    needs = ("softmax", _JUDGED)
    sizes: Mapping[str, LineariseSettings] = {
        "smoke": LineariseSettings(
            tokenizer="bpe:1024",
            books=2,
            conversion_books=1,
            text_passages=(2000, 40, 40),
            hidden_size=64,
            kv_heads=1,
            context=128,
            model_steps=2,
            model_batch_size=2,
            model_passages=2,
            sketch_size=8,
            transfer_steps=1,
            tuning_steps=2,
            batch_size=2,
            eval_tokens=512,
            passages=2,
        ),
        "cpu": LineariseSettings(),
        "gpu": LineariseSettings(
            tokenizer="bpe:8192",
            hidden_size=512,
            layers=8,
            heads=8,
            kv_heads=8,
            feedforward_size=1536,
            context=2048,
            model_steps=3000,
            model_batch_size=16,
            model_learning_rate=1e-3,
            local_chunk=32,
            pairs=22,
            conversion_books=40,
            transfer_steps=1000,
            tuning_steps=1000,
            batch_size=16,
            eval_tokens=524_288,
        ),
    }

    def depends_on(self, row: str, seed: int, settings: LineariseSettings) -> dict[str, Any]:
        """As the base class has it."""
        return {**dataclasses.asdict(settings), "conversion": dataclasses.asdict(CONVERSIONS[row]), "seed": seed}

    def make(self, row: str, seed: int, settings: LineariseSettings, folder: Path) -> dict[str, Any]:
        """Convert the model, and measure it before and after: losses, and recall."""
        # transformers takes seconds to import, and is an extra.
        from polysketch.conversion import convert
        from polysketch.conversion.measure import measure
        from polysketch.integrations.transformers_folder import read_model
        from polysketch.studies.teacher import teacher, with_fresh_attention

        data = books_and_passages(settings, folder.parent)
        model = teacher(settings, data, folder.parent / f"model-{kept.digest(settings.of_model())}")
        source = with_fresh_attention(model, folder / "fresh") if CONVERSIONS[row].fresh else model
        data = _of_conversions(settings, data, folder.parent)
        config = _conversion(row, seed, settings, data, source, folder / "conversion")
        result = convert(config)
        require_finished(result)
        original = read_model(model)
        return {
            "text": data.sha256,
            "before": measure(original, data, config),
            "report": result.report,
            "recall": {
                "before": _recall(original, settings, data),
                "after": _recall(read_model(config.out / "model"), settings, data),
            },
        }

    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A row for each record, below that of the model as it was.

        The gap is that which replacing softmax by polysketch opens, of the paper's where it alone is there; behind is
        behind softmax attention that was tuned as well.
        """
        heading = ["conversion", "seed", *_STAGES.values(), "gap regained", "nats behind", "last positions", "recall"]
        return heading, [_before(records[0]), *(_row(one, records) for one in records)]

    def draw(self, records: Sequence[Record], folder: Path) -> None:
        """Loss by position on the left, recall on the right."""
        lines = [("softmax, before", records[0]["before"], records[0]["recall"]["before"])]
        lines += [(one["row"], _last(one), one["recall"]["after"]) for one in records]
        with picture(folder / "conversion.png", (11, 4.5), columns=2) as ((by_position, recall),):
            for index, (label, line, _) in enumerate(lines):
                style = {"linewidth": 2, "label": label, "linestyle": "--" if index == 0 else "-"}
                by_position.stairs(line["loss_by_position"], line["position_edges"], baseline=None, **style)
            loss_by_position(by_position, lines[0][1]["position_edges"])
            colours = [f"C{index}" for index in range(len(lines))]
            recall.barh(range(len(lines)), [accuracy for *_, accuracy in lines], color=colours)
            recall.set_yticks(range(len(lines)), [label for label, *_ in lines])
            recall.invert_yaxis()
            recall.set(xlabel="share of recalled words", xlim=(0, 1))

    def judge(self, records: Sequence[Record]) -> Verdict:
        """By means over seeds, of polysketch beside tuned softmax attention."""
        figures = {row: _figures(records, row) for row in dict.fromkeys(one["row"] for one in records)}
        softmax = figures.get("softmax")
        base, unit = (softmax[0], "nats behind") if softmax else (0.0, "nats")
        told = [
            f"{row} {loss - base:.3f} {unit}, recall {recall:.2f}"
            for row, (loss, recall) in figures.items()
            if row in (_JUDGED, *_OTHERS) or (len(figures) == 1 and row != "softmax")
        ]
        told += [f"softmax recall {softmax[1]:.2f}"] if softmax else []
        if softmax is None or _JUDGED not in figures:
            return Verdict(", ".join(told), None)
        loss, recall = figures[_JUDGED]
        return Verdict(", ".join(told), loss <= softmax[0] + _BEHIND and recall >= _KEPT * softmax[1])


LINEARISE = LineariseStudy()


def books_and_passages(settings: LineariseSettings, place: Path) -> PreparedData:
    """The books of POLYSKETCH_DATA, and recall passages, prepared in a folder that the runs share.

    Raises:
        FileNotFoundError: POLYSKETCH_DATA is not set, or has no books.
    """

    def make(out: Path) -> PreparedData:
        return prepare([_text(settings, out, settings.books)], settings.tokenizer, out)

    return prepared_once(place, "books-and-passages", settings.of_text(), make)


def _of_conversions(settings: LineariseSettings, data: PreparedData, place: Path) -> PreparedData:
    """The text that conversions train on, with the model's tokenizer; books to validate and test are the same."""
    if settings.conversion_books is None:
        return data

    def make(out: Path) -> PreparedData:
        return prepare([_text(settings, out, settings.conversion_books)], data.tokenizer, out)

    told = {**settings.of_text(), "conversion_books": settings.conversion_books}
    return prepared_once(place, "conversion-text", told, make)


def _text(settings: LineariseSettings, out: Path, training_books: int | None) -> Path:
    """A folder beside `out` with books and passages, split by split."""
    _, by_split = book_files()
    text = out.with_name(f"{out.name}-text")
    for split, passages in zip(SPLITS, settings.text_passages, strict=True):
        (text / split).mkdir(parents=True, exist_ok=True)
        for source in by_split.get(split, [])[: training_books if split == "train" else settings.books]:
            (text / split / source.name.removesuffix(".gz")).write_bytes(gzip.decompress(source.read_bytes()))
        lines = (json.dumps({"text": one}) for one in recall_passages(split, passages, settings.pairs))
        (text / split / "recall.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return text


def _conversion(row: str, seed: int, settings: LineariseSettings, data: PreparedData, model: Path, out: Path) -> Any:
    """The options of `convert`."""
    from polysketch.conversion import ConversionConfig

    conversion = CONVERSIONS[row]
    return ConversionConfig(
        model=model,
        data=data.folder,
        out=out,
        resume=True,
        attention=conversion.attention,
        attention_options=conversion.options(settings),
        context=settings.context,
        batch_size=settings.batch_size,
        pack=settings.conversion_pack,
        **conversion.stages(settings),
        transfer_learning_rate=settings.transfer_learning_rate,
        distillation_learning_rate=settings.learning_rate,
        learning_rate=settings.learning_rate,
        eval_tokens=settings.eval_tokens,
        seed=seed,
    )


def _recall(model: Any, settings: LineariseSettings, data: PreparedData) -> float:
    from polysketch.integrations.language_model import HuggingFaceLM

    passages = list(recall_passages("test", settings.passages, settings.pairs))
    return passage_recall(HuggingFaceLM(model), data.tokenizer, passages, settings.pairs)


def _figures(records: Sequence[Record], row: str) -> tuple[float, float]:
    """Loss and recall in the end, means over seeds."""
    found = [one for one in records if one["row"] == row]
    return mean(_last(one)["loss"] for one in found), mean(one["recall"]["after"] for one in found)


def _stage(record: Record, name: str) -> Record:
    return next((line for line in record["report"]["stages"] if line["stage"] == name), {})


def _last(record: Record) -> Record:
    return record["report"]["stages"][-1]


def _before(record: Record) -> list[str]:
    original = record["before"]
    perplexity, last = number(original["perplexity"], 2), number(original["loss_by_position"][-1])
    return ["softmax, before", "-", "-", "-", "-", perplexity, "-", "-", last, number(record["recall"]["before"])]


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    last = _last(record)
    beside = {one["row"]: one for one in records if one["seed"] == record["seed"]}
    behind = last["loss"] - _last(beside["softmax"])["loss"] if "softmax" in beside else None
    return [
        record["row"],
        str(record["seed"]),
        *(number(_stage(record, name).get("perplexity"), 2) for name in _STAGES),
        _share(record, next((beside[row] for row in (_JUDGED, *_OTHERS) if row in beside), None)),
        number(behind),
        number(last["loss_by_position"][-1]),
        number(record["recall"]["after"]),
    ]


def _share(record: Record, reference: Record | None) -> str:
    """What of the gap that polysketch opens is closed in the end."""
    if reference is None or record["row"] == "softmax":
        return "-"
    worst, best = _stage(reference, "replaced")["perplexity"], reference["before"]["perplexity"]
    return f"{100 * (worst - _last(record)['perplexity']) / (worst - best):.0f} %" if worst > best else "-"
