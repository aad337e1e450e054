"""RULER's tasks of words that lm_eval makes up: texts of any length by the model's own tokenizer, nothing downloaded.

Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?". lm_eval loads the
tokenizer of its texts by name, and the module of another task, which needs packages, with each of these. Its functions
that write the texts need neither: they are called here, with its settings, as its task at one length calls them.
"""

import contextlib
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks.ruler import common_utils, fwe_utils, vt_utils

from polysketch.integrations.lm_eval.tokenizer import in_transformers

__all__ = ["RULER_TASKS", "RulerTask", "RulerTexts", "is_of_ruler", "make_ruler_tasks"]

_ROWS = 500
"""Texts of a length in lm_eval."""

_SEEDS = 0, 1234
"""What lm_eval seeds `random` and `numpy.random` with before it makes tasks."""

_EXAMPLE_LENGTH = 500
"""Tokens that the example before the question of variable tracking may have, unless its shortest form has more."""

_HOPS = 4
"""Assignments of a variable to the next one in variable tracking."""


@dataclass(frozen=True)
class RulerTexts:
    """Which texts to make.

    Attributes:
        tokenizer: the model's, of `polysketch.data` or of transformers: it says how long a text is.
        lengths: tokens of a text, in RULER's own count.
        limit: texts of each length; None for 500, which are the most.
    """

    tokenizer: Any
    lengths: Sequence[int] = (4096,)
    limit: int | None = None

    @property
    def rows(self) -> int:
        """Texts of each length."""
        return _ROWS if self.limit is None else max(1, min(self.limit, _ROWS))


@dataclass(frozen=True)
class RulerTask:
    """One task at one length.

    Attributes:
        task: of lm_eval; its metric is called by the length.
        room: tokens that the longest question takes, with its answer.
    """

    task: ConfigurableTask
    room: int


@dataclass(frozen=True)
class _Kind:
    """How a task is made: its texts of a tokenizer, a length and a number, and the tokens of an answer."""

    documents: Callable[[Any, int, int], list[dict[str, Any]]]
    answer: int


def is_of_ruler(name: str) -> bool:
    """Whether a name is that of a task of RULER in lm_eval, or of them all."""
    return name == "ruler" or name.startswith(("ruler_", "niah_"))


def make_ruler_tasks(name: str, texts: RulerTexts) -> list[RulerTask]:
    """The task at every length.

    The texts of a length are those of lm_eval's task at this length alone, whatever else is asked for: every length
    begins with lm_eval's seeds. Random states of the process stay as they were.

    Args:
        name: a key of `RULER_TASKS`.
        texts: which to make.

    Raises:
        ValueError: a length at which this tokenizer leaves no room for the question.
    """
    kind, tokenizer = RULER_TASKS[name], in_transformers(texts.tokenizer)
    return [_task(name, kind, tokenizer, length, texts.rows) for length in texts.lengths]


def _task(name: str, kind: _Kind, tokenizer: Any, length: int, rows: int) -> RulerTask:
    with _random_states_kept(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        random.seed(_SEEDS[0])
        np.random.seed(_SEEDS[1])  # noqa: NPY002 - lm_eval draws from it
        documents = kind.documents(tokenizer, length, rows)
    longest = max(len(tokenizer(f"{each['input']} {each['gen_prefix']}").input_ids) for each in documents)
    return RulerTask(ConfigurableTask(config=_config(name, documents, length, kind.answer)), longest + kind.answer)


def _config(name: str, documents: list[dict[str, Any]], length: int, answer: int) -> dict[str, Any]:
    """As lm_eval has it, with the metric of one length, whose mean has a standard error."""
    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(documents)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "target_delimiter": " ",
        "process_results": _scored,
        "metric_list": [{"metric": str(length), "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"do_sample": False, "temperature": 0.0, "max_gen_toks": answer, "until": []},
        "metadata": {"version": 1.0},
    }


def _scored(document: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """The share of the wanted words that were named; lm_eval has a mark for the lengths of other texts besides."""
    length = str(document["max_length"])
    return {length: common_utils.process_results(document, answers)[length]}


def _chains(tokenizer: Any, length: int, rows: int) -> list[dict[str, Any]]:
    """Variable tracking: an example, then the question."""
    room = max(_EXAMPLE_LENGTH, _first_length(tokenizer, 5, is_example=True))
    example = vt_utils.sys_vartrack_w_noise_random(tokenizer, 1, room, incremental=5)[0]
    shown = f"{example['input']} {' '.join(example['outputs'])}\n\n"
    needed = len(tokenizer(shown).input_ids) + _first_length(tokenizer, 10, is_example=False)
    if needed > length:
        raise ValueError(f"ruler_vt: expected --lengths of at least {needed} for this tokenizer, found {length}")
    return vt_utils.sys_vartrack_w_noise_random(tokenizer, rows, length, icl_example=example)


def _first_length(tokenizer: Any, noises: int, *, is_example: bool) -> int:
    """Tokens of the text that lm_eval draws next, one of the shortest, as it counts them.

    Where that one is too long, lm_eval looks for a shorter one for ever, and catches every interruption.
    """
    with _random_states_kept():
        text, answer = vt_utils.generate_input_output(noises, 1, _HOPS, is_icl=is_example)
    return len(tokenizer(f"{text} {answer}").input_ids) + vt_utils.CONFIG["variable_tracking"]["tokens_to_generate"]


def _frequent_words(tokenizer: Any, length: int, rows: int) -> list[dict[str, Any]]:
    """The most frequent words of a text."""
    empty = len(tokenizer(fwe_utils.TEMPLATE.format(context="", query="")).input_ids)
    documents = fwe_utils.sys_kwext(tokenizer, length, rows) if length >= max(empty, _FOUR_WORDS) else []
    if not documents or not all(map(_has_an_answer, documents)):
        raise ValueError(
            f"ruler_fwe: expected longer --lengths for this tokenizer, found {length}: in so short a text no three "
            "words are the most frequent"
        )
    return documents


_FOUR_WORDS = 200
"""The least length at which lm_eval makes up the noise and three words: a word for every 50 tokens."""


def _has_an_answer(document: dict[str, Any]) -> bool:
    """Whether each wanted word is there more often than any other that was made up."""
    counts = Counter(document["input"].split())
    others = counts.keys() - {*document["outputs"], *fwe_utils.TEMPLATE.split(), "..."}
    return min(counts[word] for word in document["outputs"]) > max((counts[word] for word in others), default=0)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put back the states of `random` and `numpy.random`, which lm_eval draws from."""
    ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 - lm_eval draws from it
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)  # noqa: NPY002 - lm_eval draws from it


RULER_TASKS = {"ruler_vt": _Kind(_chains, 30), "ruler_fwe": _Kind(_frequent_words, 50)}
"""The tasks that need nothing but words which are made up, by their names in lm_eval."""
