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
        reads: published files that the study reads from the folder of data, as docs/tasks.md says.
    """

    source: str
    claim: str
    study: str = ""
    why_not: str = ""
    reads: str = ""


STUDIES = {
    "selective-copying": "tasks.SELECTIVE_COPYING",
    "induction": "tasks.INDUCTION",
    "recall": "tasks.RECALL",
    "recall-features": "tasks.RECALL_FEATURES",
    "in-context-recall": "mad.IN_CONTEXT_RECALL",
    "noisy-recall": "mad.NOISY_RECALL",
    "fuzzy-recall": "mad.FUZZY_RECALL",
    "mad-copying": "mad.MAD_COPYING",
    "compression": "mad.COMPRESSION",
    "memorization": "mad.MEMORIZATION",
    "reversal": "tasks.REVERSAL",
    "listops": "arena.LISTOPS",
    "reviews": "arena.REVIEWS",
    "retrieval": "arena.RETRIEVAL",
    "pathfinder": "arena.PATHFINDER",
    "image": "arena.IMAGE",
    "listops-pretrained": "two_runs.LISTOPS_PRETRAINED",
    "exact-first": "two_runs.EXACT_FIRST",
    "image-classification": "pictures.IMAGE_CLASSIFICATION",
    "books": "books.BOOKS",
    "forms": "forms.FORMS_STUDY",
    "carried-state": "carried.CARRIED",
    "linearise": "linearise.LINEARISE",
    "kernels": "approximation.studies.KERNELS",
    "sketches": "approximation.studies.SKETCHES",
    "outputs": "approximation.studies.OUTPUTS",
    "patched-layers": "patching.PATCHED_LAYERS",
    "block-sums": "timing.studies.BLOCK_SUMS",
    "block-size": "timing.studies.BLOCK_SIZE",
    "hyper-speed": "timing.studies.HYPER_SPEED",
    "kernel-speed": "timing.studies.KERNEL_SPEED",
    "training-speed": "timing.studies.TRAINING_SPEED",
}
"""By name, where each study stands beside this file."""

_LARGE = "wants models of 110M and more, trained for days"
_HUB = "wants pretrained models from a model hub"

ENTRIES = (
    Entry(
        "PolySketchFormer, table 5",
        "selective copying at 4,096: softmax 99.73 %, degree 4 99.90 %, polysketch 99.16 %",
        "selective-copying",
    ),
    Entry("PolySketchFormer, figure 5", "selective copying is learned all at once", "selective-copying"),
    Entry("PolySketchFormer, F.2", "induction heads by all mechanisms: over 99.95 % at 128, 1/16 at 256", "induction"),
    Entry(
        "LLOPS, tables 4 and 5, figure 3",
        "recall, d = 128: BASED 91.9 %, LLOPS 88.7, 93.2, 86.6 % at p = 2, 4, 6",
        "recall-features",
    ),
    Entry("Zoology, figure 2", "recall of 64 pairs at 512 tokens by attention (size paper)", "recall"),
    Entry("MAD, in-context recall", "separates mechanisms that look up from those that cannot", "in-context-recall"),
    Entry("MAD, noisy in-context recall", "keys that come again among noise", "noisy-recall"),
    Entry("MAD, fuzzy in-context recall", "keys and values of several tokens", "fuzzy-recall"),
    Entry("MAD, selective copying", "16 tokens out of 256, in their order", "mad-copying"),
    Entry("MAD, compression", "a row is read out of one vector", "compression"),
    Entry("MAD, memorization", "values that no row tells", "memorization"),
    Entry("Thesis, figures 5.1 to 5.8", "50 digits are reversed: x^8 4e-6, softmax 5e-6, elu 0.09", "reversal"),
    Entry("LLOPS, table 1: ListOps", "softmax 48.49 %, LLOPS 48.29 %", "listops"),
    Entry("LLOPS, table 1: Text", "IMDB by bytes: softmax 82.96 %, LLOPS 73.94 %", "reviews"),
    Entry("LLOPS, section 4.1; Amos et al.", "models pre-trained on a task's own inputs", "listops-pretrained"),
    Entry(
        "LLOPS, table 1: Retrieval",
        "pairs of papers: softmax 83.23 %, Nystrom 83.90 %",
        "retrieval",
        reads="lra/aan/new_aan_pairs.train.tsv, .eval.tsv and .test.tsv",
    ),
    Entry(
        "LLOPS, table 1: Pathfinder",
        "softmax 70.45 %, Hedgehog 74.16 %",
        "pathfinder",
        reads="lra/pathfinder32/curv_contour_length_14",
    ),
    Entry(
        "LLOPS, table 1: Image",
        "CIFAR-10 by pixels: softmax 64.36 %, Nystrom 58.66 %",
        "image",
        reads="lra/cifar-10-batches-bin",
    ),
    Entry("FLatten, PolaFormer: ImageNet", "PVT-T 75.1 %, focused 77.8 %, polarity 78.8 %", "image-classification"),
    Entry(
        "PolySketchFormer, figure 2, table 2",
        "perplexity of PG-19 against context: polysketch near softmax",
        "books",
    ),
    Entry(
        "PolySketchFormer, figure 2, table 3",
        "the same of Wiki-40B",
        why_not="wants Wiki-40B; the study of books has these models and contexts",
    ),
    Entry(
        "PolySketchFormer, figures 1 and 4, table 4, appendix G; version 1, figure 1, table 2",
        "training steps a second against context: at 32k 1.98 with r = 32, FlashAttention 1.03",
        "training-speed",
    ),
    Entry(
        "PolySketchFormer, version 1, section 5",
        "4 layers at 32k: 1.54 training steps a second, FlashAttention 0.34 (size paper-version-1)",
        "training-speed",
    ),
    Entry(
        "PolySketchFormer, section 3.1, table 4",
        "sums by blocks: 1.33 steps a second at 8k, and 0.21 token by token",
        "block-sums",
    ),
    Entry("PolySketchFormer, table 7", "PG-19 at 32k: 11.47, windows 11.67, Hedgehog 12.93, chunks 12.78", "books"),
    Entry("PolySketchFormer, table 8", "PG-19 at 32k, 12 layers: 11.57, softmax 11.55", "books"),
    Entry("PolySketchFormer, version 1, figure 2, table 1", "perplexity against context: degree 4 is good", "books"),
    Entry("PolySketchFormer, version 1, section 5", "which block size is fastest", "block-size"),
    Entry(
        "PolySketchFormer, theorems 1.1, 2.2 and 2.4; version 1, 2.2, 2.5 and 3.1",
        "epsilon of the sketches falls as 1 / sqrt(r), at degrees 4 and 8",
        "sketches",
    ),
    Entry("PolySketchFormer, tables 1 and 6", "perplexity of C4, HellaSwag, PIQA, Physics", why_not=_LARGE),
    Entry(
        "PolySketchFormer, table 9",
        "perplexity of C4 at 8k: softmax 12.47, learned and local 12.45, learned 12.99",
        why_not=_LARGE,
    ),
    Entry("PolySketchFormer, tables 10 to 12", "HellaSwag, PIQA, Physics at 8k", why_not=_LARGE),
    Entry(
        "PolySketchFormer, appendix H",
        "parameters of the models: 110M, 337M and 748M with softmax, up to 817M with polysketch",
        why_not="nothing is trained for it: tests count these parameters, within one per cent",
    ),
    Entry("PolySketchFormer, version 1, section 5", "a model of 730M parameters", why_not=_LARGE),
    Entry(
        "PolySketchFormer, version 1, section 6",
        "an exact polynomial to start with, then its sketch",
        "exact-first",
    ),
    Entry(
        "PolySketchFormer, figure 3; HyperAttention, figures 1 and 2",
        "drawings of the algorithms",
        why_not="nothing is measured in them",
    ),
    Entry("LLOPS, table 3, figure 1, theorems 3.1 and 3.4", "p = 2: random 0.293, LLOPS 0.022", "kernels"),
    Entry("LLOPS, table 2", "zero-shot suite from BASED's weights", why_not="wants weights of 360M from a model hub"),
    Entry("LLOPS, figure 2", "time per length: LLOPS is faster than BASED", "kernel-speed"),
    Entry(
        "Thesis, section 4.3",
        "squared polynomials of wide heads, sketched power by power",
        "outputs",
    ),
    Entry("HyperAttention, figure 3", "ChatGLM3 at 32k: perplexity 5.6 becomes 6.3", "patched-layers"),
    Entry("HyperAttention, table 1", "LongBench of patched models", why_not=_HUB),
    Entry("HyperAttention, figure 4", "131k tokens: 54 times, causal 5.4 times", "hyper-speed"),
    Entry("HyperAttention, theorem 1, lemma 1, figure 5", "operator norm of the error, and alpha", "outputs"),
    Entry("HyperAttention, figure 5: T2T-ViT", "alpha of a model of images", why_not=_HUB),
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
