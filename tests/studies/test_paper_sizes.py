"""The sizes called `paper` are the published configurations, key by key."""

import pytest

from polysketch.studies.catalogue import study_called
from polysketch.studies.task_study import TaskSettings


def paper(study: str, size: str = "paper") -> TaskSettings:
    return study_called(study).sizes[size]


@pytest.mark.parametrize(
    ("study", "size", "length"),
    [
        ("selective-copying", "paper", 4_096),
        ("selective-copying", "paper-16k", 16_384),
        ("selective-copying", "paper-32k", 32_768),
        ("induction", "paper", 127),  # and the answer
        ("induction", "paper-256", 255),
    ],
)
def test_appendix_f_of_polysketchformer(study: str, size: str, length: int):
    """64,000 rows, 64 of them a step, 400,000 steps, 2 layers of 8 heads of 16, chunks of 1,024, r = 32."""
    one = paper(study, size)
    assert one.task == {"length": length, "examples": 64_000}
    assert (one.steps, one.batch_size, one.layers, one.preset, one.nearby) == (400_000, 64, 2, "tasks-paper", 0)


def test_reversal_of_the_thesis():
    """Chapter 5: 50 digits, 10,000 steps of 128 rows; a loss every 100 steps."""
    one = paper("reversal")
    assert (one.task, one.preset, one.layers, one.nearby) == ({}, "reversal-paper", 1, 0)
    assert (one.steps, one.batch_size, one.steps // one.evaluations) == (10_000, 128, 100)
    reversal = study_called("reversal").task_of(one, seed=0)
    assert (reversal.length, reversal.symbols) == (50, 10)


def test_recall_of_zoology():
    """iclr24_zoology_figure2: 100,000 rows, 64 epochs, 3,000 rows to test, a cosine; 128 rows a step at 512 tokens."""
    one = paper("recall")
    assert one.task == {"length": 512, "pairs": 64, "examples": 100_000}
    assert (one.steps * one.batch_size, one.batch_size, one.test_rows) == (64 * 100_000, 128, 3_000)
    assert one.training == {"schedule": "cosine"}
    assert one.learning_rate == pytest.approx(10 ** (-4 + 2 * 2 / 3), rel=1e-2)


@pytest.mark.parametrize(
    ("study", "batch_size", "steps", "warmup"),
    [
        ("listops", 32, 5_000, 1_000),
        ("reviews", 32, 20_000, 8_000),
        ("retrieval", 32, 30_000, 800),
        ("image", 256, 35_000, 175),
        ("pathfinder", 256, 62_400, 312),
    ],
)
def test_long_range_arena_of_nystromformer(study: str, batch_size: int, steps: int, warmup: int):
    """LRA/code/lra_config.py."""
    one = paper(study)
    assert (one.batch_size, one.steps, one.training) == (batch_size, steps, {"warmup": warmup, "weight_decay": 0.0})
    assert (one.preset, one.layers, one.learning_rate) == ("arena-paper", 2, 1e-4)
    assert one.task.get("max_tokens") == (4_000 if study in ("reviews", "retrieval") else None)


@pytest.mark.parametrize(
    ("study", "task", "examples"),
    [
        ("in-context-recall", {}, 12_800),
        ("noisy-recall", {"noise_vocabulary": 16, "noise_share": 0.2}, 12_800),
        ("fuzzy-recall", {"key_motif": 3, "value_motif": 3}, 12_800),
        ("mad-copying", {"length": 256}, 12_800),
        ("compression", {}, 12_800),
        ("memorization", {}, 256),
    ],
)
def test_the_baselines_of_mad(study: str, task: dict, examples: int):
    """configs/tasks: what is no default of ours; 200 epochs in batches of 128."""
    one = paper(study)
    assert one.task == {**task, "examples": examples}
    assert one.steps * one.batch_size == 200 * examples


def test_recall_of_llops():
    """Its tables 4 and 5 and figure 3: p, m and the width; 256 features and degree 4 where nothing else is said."""
    study = study_called("recall-features")
    plain = "llops+rotary=False"
    assert {"llops", "based", plain, f"{plain}+degree=2", f"{plain}+degree=6"} <= set(study.rows)
    assert {f"{plain}+num_features={features}" for features in (64, 128, 192)} <= set(study.rows)
    assert [study.sizes[size].preset for size in ("gpu", "gpu-wide")] == ["tiny", "tiny-wide"]
