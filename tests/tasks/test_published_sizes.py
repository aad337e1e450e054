"""The sizes that the papers publish can be given, and a row has what they say of it."""

import numpy as np
import pytest

from polysketch.data.recall import POWER
from polysketch.targets import NO_TARGET
from polysketch.tasks.associative_recall import AssociativeRecall
from polysketch.tasks.copying import SelectiveCopying
from polysketch.tasks.induction import Induction
from polysketch.tasks.mad import Compression, InContextRecall, Memorization


@pytest.mark.parametrize("length", [4096, 16_384, 32_768])
def test_selective_copying_of_polysketchformer(length: int):
    """Table 5: 64,000 rows to train on; 16 tokens to copy and a vocabulary of 16, which it has from Gu and Dao."""
    task = SelectiveCopying(length=length, examples=64_000)
    row = task.row("train", 63_999)
    asked = row.answer != NO_TARGET
    assert (task.num_rows("train"), task.vocab_size) == (64_000, 16)
    assert (len(row.ids), int(asked.sum()), int(np.isin(row.ids[~asked], range(1, 15)).sum())) == (length, 16, 16)


@pytest.mark.parametrize("context", [128, 256])
def test_induction_heads_of_polysketchformer(context: int):
    """F.2: 16 tokens and a special one, which stands anywhere but at the last three places, and next to last.

    The last token is the answer, which a row of ours does not hold: it is one shorter.
    """
    task = Induction(length=context - 1, vocabulary=16 + 1, examples=64_000)
    rows = [task.row("train", index) for index in range(3_000)]
    firsts = [int(np.argmax(row.ids == 16)) for row in rows]
    assert (min(firsts), max(firsts)) == (0, context - 4)
    assert all(row.ids[context - 2] == 16 and (row.ids == 16).sum() == 2 for row in rows)
    assert len({int(row.answer[-1]) for row in rows}) == 16


@pytest.mark.parametrize(
    ("length", "pairs"), [(64, 4), (128, 8), (256, 16), (256, 32), (256, 64), (512, 64), (512, 128), (1024, 256)]
)
@pytest.mark.parametrize("filler", ["zero", "random"])
def test_multi_query_recall_of_zoology_and_based(length: int, pairs: int, filler: str):
    """A vocabulary of 8,192, and 0.01 for the power law of the gaps; LLOPS has it from there. Every key is asked."""
    row = AssociativeRecall(length=length, pairs=pairs, vocabulary=8192, filler=filler).row("train", 1)
    asked = np.flatnonzero(row.answer != NO_TARGET)
    known = dict(zip(row.ids[: 2 * pairs : 2].tolist(), row.ids[1 : 2 * pairs : 2].tolist(), strict=True))
    assert POWER == 0.01
    assert len(known) == len(asked) == pairs
    assert {int(row.ids[place]): int(row.answer[place]) for place in asked} == known
    assert asked.min() >= 2 * pairs
    assert max(known) < 4096 <= min(known.values())


def test_the_baselines_of_mad():
    """Its configuration files: vocabulary, length, and what makes recall noisy and fuzzy."""
    plain, fuzzy = InContextRecall(examples=12_800), InContextRecall(examples=12_800, key_motif=3, value_motif=3)
    assert [(each.length, each.vocabulary) for each in (plain, fuzzy)] == [(128, 16)] * 2
    noisy = InContextRecall(noise_vocabulary=16, noise_share=0.2)
    assert noisy.row("train", 0).ids.max() > 16
    assert SelectiveCopying(length=256, vocabulary=16, content=16).row("train", 0).answer.max() < 15
    assert (Memorization().length, Memorization().vocabulary) == (32, 256)
    assert (Compression().length, Compression().vocabulary) == (32, 16)
