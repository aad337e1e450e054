"""Tables and figures of the five papers, and our own questions: the study of each, or why there is none. No PyTorch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polysketch.studies.study import Study


@dataclass(frozen=True)
class Entry:
    """A table or a figure.

    Attributes:
        source: paper and place.
        claim: what it says, with its figure.
        study: name of the study that tests it; several entries may have one.
        why_not: why there is none.
    """

    source: str
    claim: str
    study: str = ""
    why_not: str = ""


STUDIES = {
    "selective-copying": "tasks.SELECTIVE_COPYING",
    "induction": "tasks.INDUCTION",
    "recall": "tasks.RECALL",
    "in-context-recall": "tasks.IN_CONTEXT_RECALL",
    "reversal": "tasks.REVERSAL",
    "listops": "tasks.LISTOPS",
    "reviews": "tasks.REVIEWS",
    "image-classification": "pictures.IMAGE_CLASSIFICATION",
    "books": "books.BOOKS",
    "forms": "forms.FORMS_STUDY",
    "carried-state": "carried.CARRIED",
    "linearise": "linearise.LINEARISE",
}
"""By name, where each study stands beside this file."""

_BEFORE = "`python -m experiments.{}` makes it; it is to move here"

ENTRIES = (
    Entry(
        "PolySketchFormer, table 5", "selective copying at 4,096: softmax 99.7 %, degree 4 99.9 %", "selective-copying"
    ),
    Entry("PolySketchFormer, figure 5", "selective copying is learned all at once", "selective-copying"),
    Entry("PolySketchFormer, F.2", "induction heads at 128 and 256: 100 % by softmax and by polysketch", "induction"),
    Entry("LLOPS, tables 3 to 5", "recall, d = 128: 93.2 % at p = 4", "recall"),
    Entry("MAD, in-context recall", "separates mechanisms that look up from those that cannot", "in-context-recall"),
    Entry("Thesis, figures 5.1 to 5.8", "50 digits are reversed: x^8 4e-6, softmax 5e-6, elu 0.09", "reversal"),
    Entry("LLOPS, table 1: ListOps", "accuracy of an encoder on ListOps", "listops"),
    Entry("LLOPS, table 1: Text", "accuracy of an encoder on IMDB by bytes", "reviews"),
    Entry("FLatten, PolaFormer: ImageNet", "PVT-T 75.1 %, focused 77.8 %, polarity 78.8 %", "image-classification"),
    Entry(
        "PolySketchFormer, figure 2, tables 2 and 3",
        "perplexity against context: polysketch near softmax",
        "books",
    ),
    Entry(
        "PolySketchFormer, figures 1 and 4, table 4",
        "training steps a second against context",
        why_not="`polysketch benchmark training` measures them; no record on a GPU",
    ),
    Entry(
        "PolySketchFormer, tables 1, 6, 9 to 12", "HellaSwag, PIQA, Physics", why_not="wants models of 110M and more"
    ),
    Entry("PolySketchFormer, table 7", "PG-19 at 32k: 11.47, windows 11.67, Hedgehog 12.93, chunks 12.78", "books"),
    Entry("PolySketchFormer, table 8", "PG-19 at 32k, 12 layers: 11.57, softmax 11.55", "books"),
    Entry(
        "PolySketchFormer, section 3.1",
        "cumulative sums by blocks",
        why_not=_BEFORE.format("polysketchformer.cumulative_sums"),
    ),
    Entry(
        "LLOPS, figure 1, theorem 3.1",
        "error of a polynomial's best features",
        why_not=_BEFORE.format("llops.approximation"),
    ),
    Entry("LLOPS, table 2", "zero-shot suite from BASED's weights", why_not="wants weights of 360M from a model hub"),
    Entry("LLOPS, figure 2", "time per length", why_not="`polysketch benchmark attention` measures it"),
    Entry("LLOPS, table 1: Retrieval, Pathfinder, Image", "accuracy of an encoder", why_not="its files are not here"),
    Entry(
        "HyperAttention, figure 3",
        "perplexity of patched models",
        why_not=_BEFORE.format("hyperattention.patching"),
    ),
    Entry("HyperAttention, table 1", "LongBench of patched models", why_not="wants pretrained models from a model hub"),
    Entry("HyperAttention, figure 4", "4k to 131k tokens: up to 54 times", why_not="no record on a GPU"),
    Entry("HyperAttention, figure 5", "alpha against length", why_not="wants pretrained models from a model hub"),
    Entry("Our own", "what a far field is worth on source code, and beyond the context of training", "forms"),
    Entry("Our own", "what a state that is carried from row to row is worth", "carried-state"),
    Entry("Our own", "what conversion of a softmax model regains, loss and recall", "linearise"),
)


def study_called(name: str) -> Study:
    """The study of that name.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    check_name(name)
    module, _, found = STUDIES[name].rpartition(".")
    return getattr(importlib.import_module(f"polysketch.studies.{module}"), found)


def check_name(name: str) -> None:
    """Refuse an unknown study.

    Raises:
        ValueError: the message lists those that exist.
    """
    if name not in STUDIES:
        raise ValueError(
            f"expected a study of {', '.join(STUDIES)}, found {name!r}; polysketch study --list tells more"
        )
