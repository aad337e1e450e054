"""Calls that `campaigns.fuzz` found to end in an error of Python's: each is refused in words."""

import io
import json
import sys

import numpy as np
import pytest
import torch

from polysketch import attention, evaluation, feature_maps, generation, models, nn, ops
from polysketch.cli import main
from polysketch.data import PreparedData
from polysketch.data.corpus import readers
from polysketch.data.corpus.document import ReadOptions
from polysketch.data.splits import SplitTable
from polysketch.generation import sampling
from polysketch.ops.linear.state import LinearAttentionState
from polysketch.tasks import open_task, verify_task, write_task
from polysketch.tasks.stored import Classification, ClassifiedRows

EMPTY, X = torch.ones(1, 1, 3, 0), torch.ones(1, 1, 3, 4)
FLAT = torch.ones(4)
HUGE = 10**30
OFFSETS = torch.tensor([0, 2, 2**31 - 1], dtype=torch.int32)
MECHANISM = attention.build("linear", num_heads=1, head_dim=4)
STATE = LinearAttentionState.init(1, 1, 4, 4)
CALLS = {
    "no numbers in a head": lambda: ops.softmax_attention(EMPTY, EMPTY, X),
    "no numbers in a landmark": lambda: ops.nystrom_attention(EMPTY, EMPTY, X, num_landmarks=2),
    "a block of more than 64 bits": lambda: ops.softmax_attention(X, X, X, causal=True, block_size=HUGE),
    "a degree of more than 64 bits": lambda: evaluation.sketch_error(X, X, X, X, HUGE),
    "weights of a degree of more than 64 bits": lambda: evaluation.polynomial_weights(X, X, HUGE),
    "a transform of one number": lambda: ops.hadamard_transform(torch.tensor(1.0)),
    "codes of one number": lambda: ops.hash_codes(torch.tensor(1.0), torch.ones(3, 2)),
    "a backend for no heads": lambda: ops.linear_attention_backend(FLAT, FLAT),
    "another backend for no heads": lambda: ops.polynomial_attention_backend(FLAT, FLAT),
    "a state of one dimension": lambda: LinearAttentionState(*[FLAT] * 8, power=1),
    "spans of nothing": lambda: attention.add_spans([], []),
    "a length of more than 64 bits": lambda: attention.advance_positions(torch.zeros(1, dtype=torch.int64), HUGE),
    "a layer of no inputs": lambda: feature_maps.lecun_normal_(X.clone(), 0),
    "weights that are no real numbers": lambda: feature_maps.lecun_normal_(X.to(torch.complex64), 4),
    "weights of a scale that is no number": lambda: feature_maps.lecun_normal_(X.clone(), 4, scale=float("nan")),
    "next tokens without heads": lambda: ops.linear_attention_extend_(FLAT, FLAT, FLAT, STATE),
    "an inverse without end": lambda: ops.nystrom_attention(X, X, X, num_landmarks=2, iterations=2**62),
    "powers without end": lambda: feature_maps.SymmetricPowers(2**31, degree=2**31),
    "rows without end": lambda: nn.ContinuedDocuments(OFFSETS, 2**31, positions=[2], goes_on=[]),
    "ids beyond a vocabulary": lambda: generation.tokens_seen([[0, 8]], 8),
    "ids below zero": lambda: generation.tokens_seen([[-1]], 8),
    "a scale of one number": lambda: evaluation.common_scale(torch.tensor(1.0), X),
    "weights of one number": lambda: evaluation.column_alpha(torch.tensor(1.0)),
    "shares of no matrix": lambda: evaluation.mass_beyond_window(FLAT, 2),
    "weights of no keys": lambda: evaluation.mechanism_weights(MECHANISM, X, torch.tensor(1.0)),
    "no heads": lambda: nn.MultiheadAttention(8, 0),
    "positions of no width": lambda: nn.rotation_at(torch.arange(3), 0),
    "a base of 0": lambda: nn.rotation_at(torch.arange(3), 4, 0.0),
    "a picture of no height": lambda: nn.sinusoidal_positions_on_grid((0, 3), 8),
    "a picture of more than 64 bits": lambda: nn.sinusoidal_positions_on_grid((HUGE, HUGE), 8),
    "a loss of one token without a batch": lambda: models.mean_token_loss(
        FLAT, X[0, 0], torch.ones(3), torch.tensor(1)
    ),
    "layers of more than 64 bits": lambda: models.ModelConfig(8, HUGE, 8, 1),
    "ranks of no weights": lambda: evaluation.optimal_frobenius_error(EMPTY, [1]),
    "a median of no pairs": lambda: evaluation.median_relative_error(EMPTY, EMPTY),
    "logits of no batch": lambda: sampling.draw(FLAT, FLAT),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_cannot_be_is_refused(call):
    with pytest.raises(ValueError, match=r"expected|must|needs|power of two") as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_weights_of_scale_zero_are_zeros():
    weight = X.clone()
    feature_maps.lecun_normal_(weight, 4, scale=0.0)
    assert not weight.any()


def test_no_ranks_are_no_errors():
    assert evaluation.optimal_frobenius_error(X, []).shape == (1, 1, 0)


def rows(count: int, classes: list[int] | None = None) -> ClassifiedRows:
    return ClassifiedRows.of([np.arange(1, 4)] * count, classes or [number % 2 for number in range(count)])


def test_rows_of_a_class_that_has_no_name_are_refused():
    with pytest.raises(ValueError, match="train: expected classes below 2, found 7"):
        Classification({"train": rows(4, [0, 1, 7, 0])}, 9, ["a", "b"])


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": [9]},
        {"vocab_size": "9"},
        {"class_names": [1, 2]},
        {"class_names": "ab"},
        {"class_names": 7},
        {"alphabet": 7},
    ],
)
def test_a_task_of_other_types_is_refused(change):
    with pytest.raises(ValueError, match="expected"):
        Classification(**{"splits": {"train": rows(4)}, "vocab_size": 9, "class_names": ["a", "b"]} | change)


def test_a_split_that_a_task_has_not_is_named():
    with pytest.raises(ValueError, match="expected a split of train, found 'test'"):
        Classification({"train": rows(4)}, 9, ["a", "b"]).row("test", 0)


def test_documents_that_end_before_they_begin_are_refused():
    damaged = ClassifiedRows(np.arange(1, 9), np.array([5, 3, 8]), np.array([0, 1, 0]))
    with pytest.raises(ValueError, match="expected rows of 1 documents of at least one token"):
        Classification({"train": damaged}, 9, ["a", "b"])


def test_an_id_beyond_the_vocabulary_of_a_task_is_refused():
    task = Classification({"train": rows(4)}, 3, ["a", "b"])
    with pytest.raises(ValueError, match="train: expected ids below 3 in row 1"):
        task.row("train", 1)


@pytest.mark.parametrize("name", ["../train", "/etc/passwd"])
def test_a_task_reads_no_files_outside_its_folder(tmp_path, name):
    write_task(Classification({"train": rows(4)}, 9, ["a", "b"]), tmp_path / "task")
    described = json.loads((tmp_path / "task" / "task.json").read_bytes())
    described["splits"][name] = described["splits"].pop("train")
    (tmp_path / "task" / "task.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="expected plain names of splits and files, found"):
        open_task(tmp_path / "task")


@pytest.mark.parametrize("change", [{"holds": "yes"}, {"runs": None}, {"study": None}])
def test_a_summary_that_is_none_is_refused(tmp_path, capsys, change):
    summary = {"study": "reversal", "size": "smoke", "rows": 1, "of_rows": 1, "runs": 1, "ours": "it", "holds": True}
    changed = {name: value for name, value in {**summary, **change}.items() if value is not None}
    (tmp_path / "reversal-smoke").mkdir()
    (tmp_path / "reversal-smoke" / "summary.json").write_text(json.dumps(changed))
    assert main(["study", "--list", "--results", str(tmp_path)]) == 1
    assert "summary.json: expected" in capsys.readouterr().err


def test_a_line_of_a_table_that_fills_the_memory_is_not_read(monkeypatch, tmp_path):
    monkeypatch.setattr(readers, "LONGEST_LINE", 100)
    (tmp_path / "rows.csv").write_text("text,other\n" + '"' + "a" * 500)
    with pytest.raises(ValueError, match=r"expected lines of at most 100 letters, found a longer one at .*rows\.csv:2"):
        list(readers.read_file(tmp_path / "rows.csv", readers.read_comma_separated, ReadOptions()))


def test_texts_of_parquet_that_are_no_text_are_refused(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="the extra hf is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra hf is not installed")
    parquet.write_table(arrow.table({"text": ["a row of text, " * 9]}), tmp_path / "rows.parquet", compression="none")
    content = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(content.replace(b"a row of text, ", b"a row of \xff\xfe\xfd\xfc, "))
    with pytest.raises(ValueError, match=r"expected texts in UTF-8 in .*rows\.parquet, found other bytes"):
        list(readers.read_file(tmp_path / "rows.parquet", readers.read_parquet, ReadOptions()))


def test_standard_input_is_not_kept_through_a_planted_link(monkeypatch, tmp_path):
    (tmp_path / "thesis").write_text("mine")
    for name in ("out.stdin.txt", *(f"out.stdin.txt.{process}" for process in range(1, 4))):
        (tmp_path / name).symlink_to(tmp_path / "thesis")
    monkeypatch.setattr("os.getpid", lambda: 2)
    text = "\n".join(f"line {number}" for number in range(3000)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    shares = ["--validation-share", "0.2", "--test-share", "0", "--cut-text", "500"]
    assert main(["prepare", "-", "--out", str(tmp_path / "out"), *shares]) == 0
    assert (tmp_path / "thesis").read_text() == "mine"
    assert (tmp_path / "out" / "description.json").is_file()


def test_a_hole_of_terabytes_among_the_rows_of_a_task_is_not_summed_up(tmp_path):
    write_task(Classification({"train": rows(4)}, 9, ["a", "b"]), tmp_path / "task")
    with (tmp_path / "task" / "train.ends.bin").open("r+b") as file:
        file.truncate(2**42)
    with pytest.raises(ValueError, match="expected files of train that belong together"):
        verify_task(tmp_path / "task")


def test_a_pattern_of_brackets_without_end_is_refused():
    with pytest.raises(ValueError, match="patterns to exclude of at most 1000 letters, found one of 100002"):
        ReadOptions(exclude=("a=" + "[" * 100_000,))


def test_a_word_in_another_encoding_is_told_in_words(tmp_path, capsys):
    assert main(["task", "reversal", "--set", "length=4", "--out", str(tmp_path / "\udcff")]) == 1
    assert "expected text in UTF-8, found '\\\\udcff'" in capsys.readouterr().err


def test_a_zero_byte_in_a_table_of_splits_is_told_in_words(tmp_path):
    (tmp_path / "splits.tsv").write_bytes(b"file\tsplit\na\0.txt\ttrain\n")
    with pytest.raises(ValueError, match=r"expected names of files in .*splits\.tsv, found 'a\\x00\.txt'"):
        SplitTable(tmp_path / "splits.tsv")


def test_tokens_of_a_type_that_is_no_text_are_refused(tmp_path):
    prepare_text = ["prepare", str(tmp_path / "text"), "--out", str(tmp_path / "data"), "--validation-share", "0"]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("once upon a time " * 99)
    assert main([*prepare_text, "--test-share", "0", "--tokenizer", "bytes"]) == 0
    path = tmp_path / "data" / "description.json"
    description = json.loads(path.read_text())
    del description["sha256"]
    path.write_text(json.dumps(description | {"dtype": []}))
    with pytest.raises(ValueError, match="expected tokens of uint16"):
        PreparedData.open(tmp_path / "data")
