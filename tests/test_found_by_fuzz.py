"""Calls that `campaigns.fuzz` and `campaigns.guided` found to end in an error of Python's: each is refused in words."""

import csv
import io
import json
import sys

import numpy as np
import pytest
import torch

from polysketch import attention, evaluation, feature_maps, generation, models, nn, ops
from polysketch.cli import main
from polysketch.data import load_tokenizer
from polysketch.data.corpus import Corpus, Place, readers
from polysketch.data.corpus.document import ReadOptions
from polysketch.data.description import DataDescription, TokenizerDescription
from polysketch.data.splits import SplitRule, SplitTable
from polysketch.data.tokenization import decoders
from polysketch.data.unfinished import read_record
from polysketch.distributed.pieces import joined_pieces
from polysketch.generation import sampling
from polysketch.integrations import transformers_folder
from polysketch.models import former
from polysketch.ops.linear.state import LinearAttentionState
from polysketch.studies import kept
from polysketch.tasks import open_task, verify_task, write_task
from polysketch.tasks.stored import Classification, ClassifiedRows
from polysketch.training.checkpoint import load_state
from polysketch.training.comparison import compared, comparison_table
from polysketch.training.manifest import describe, manifest_bytes
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import RunFolder

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


@pytest.mark.parametrize("change", [{"holds": "yes"}, {"runs": None}, {"study": None}, {"rows": "1"}, {"papers": []}])
def test_a_summary_that_is_none_is_refused(tmp_path, capsys, change):
    words = {"study": "reversal", "size": "smoke", "told": "", "papers": {}, "ours": "it", "holds": True}
    summary = {**words, **dict.fromkeys(("runs", "rows", "own_rows", "of_rows"), 1)}
    changed = {name: value for name, value in {**summary, **change}.items() if value is not None}
    (tmp_path / "reversal-smoke").mkdir()
    (tmp_path / "reversal-smoke" / "summary.json").write_text(json.dumps(changed))
    assert main(["study", "--list", "--results", str(tmp_path)]) == 1
    assert "summary.json: expected" in capsys.readouterr().err


def test_a_line_of_a_table_that_fills_the_memory_is_not_read(monkeypatch, tmp_path):
    monkeypatch.setattr(readers, "LONGEST_LINE", 100)
    whole_process = csv.field_size_limit()
    (tmp_path / "rows.csv").write_text("text,other\n" + '"' + "a" * 500)
    with pytest.raises(ValueError, match=r"expected lines of at most 100 letters, found a longer one at .*rows\.csv:2"):
        list(readers.read_file(tmp_path / "rows.csv", readers.read_comma_separated, ReadOptions()))
    csv.field_size_limit(whole_process)


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


@pytest.mark.parametrize(
    "decoder", [{"prefix": "##"}, {"type": []}, {"type": "Sequence", "decoders": None}, {"type": "Sequence"}, [], "x"]
)
def test_a_decoder_without_a_type_is_refused(decoder):
    with pytest.raises(ValueError, match="expected a decoder with a type, found"):
        decoders.is_byte_level(decoder)


def test_a_vocabulary_without_its_unknown_word_is_refused(tmp_path):
    words = {"</s>": 0, "a": 1}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": words}
    end = {"id": 0, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    described = {
        "version": "1.0",
        "added_tokens": [{**end, "special": True}],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {**model, "max_input_chars_per_word": 100},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"expected a tokenizer\.json that encodes any text"):
        load_tokenizer(tmp_path / "tokenizer.json").encode("what is this?")


@pytest.mark.parametrize("change", [{"attention": 1.5}, {"attention": ["polysketch", []]}, {"attention_options": 3}])
@pytest.mark.parametrize("written", [1, 2])
def test_names_of_mechanisms_that_are_none_are_refused(written, change):
    fields = {"attention": "polysketch", "attention_options": {}, **change}
    with pytest.raises(ValueError, match=r"expected (the name of a mechanism|options of mechanisms)"):
        former.attention_of_format(written, fields)


def test_options_of_a_pattern_that_are_none_are_refused():
    fields = {"attention": ["polysketch", "softmax"], "attention_options": {"polysketch": 3}}
    with pytest.raises(ValueError, match="expected options of mechanisms by name"):
        former.attention_of_format(2, fields)


TRAIN = {"kind": "train", "step": 1, "loss": 2.0, "tokens": 10, "seconds": 1.0}


@pytest.mark.parametrize(
    "change",
    [{"kind": 1}, {"step": "1"}, {"loss": "2"}, {"tokens": []}, {"seconds": float("nan")}, {"loss": 10**400}],
)
def test_a_line_of_metrics_with_other_values_is_left_out(tmp_path, change):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({**TRAIN, **change}) + "\n" + json.dumps({**TRAIN, "step": 2, "loss": None}) + "\n")
    assert [line["step"] for line in MetricsFile(path).read()] == [2]


@pytest.mark.parametrize("missing", ["kind", "tokens", "seconds"])
def test_a_line_of_metrics_without_what_is_compared_is_left_out(monkeypatch, tmp_path, missing):
    config = {"model": {"attention": "softmax"}, "data": {"description_sha256": "x"}, "training": {"steps": 2}}
    monkeypatch.setattr(RunFolder, "read_config", lambda self: config)
    lines = [{**TRAIN, "step": 2}, {name: value for name, value in TRAIN.items() if name != missing}]
    lines.append({"kind": "evaluation", "step": 1})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compared(tmp_path)
    assert (found.steps, found.validation) == ((2, 2), [])
    assert comparison_table([found])


def test_rows_of_a_split_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="expected a split of train, found 'test'"):
        Classification({"train": rows(4)}, 9, ["a", "b"]).row("test", 0)


@pytest.mark.parametrize("change", [{"vocab_size": "9"}, {"class_names": 3}, {"alphabet": 1}, {"documents": []}])
def test_options_of_a_task_of_other_types_are_refused(tmp_path, change):
    write_task(Classification({"train": rows(4)}, 9, ["a", "b"]), tmp_path / "task")
    described = json.loads((tmp_path / "task" / "task.json").read_bytes())
    described["options"] |= change
    (tmp_path / "task" / "task.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=f"expected the sizes of classification, found others: {next(iter(change))}"):
        open_task(tmp_path / "task")


def test_a_record_of_a_study_whose_settings_are_none_is_refused(tmp_path):
    (tmp_path / "record.json").write_text('{"settings": [1]}')
    with pytest.raises(ValueError, match="expected an object as settings, found list"):
        kept.kept_or_made(tmp_path / "record.json", {}, dict)


@pytest.mark.parametrize("change", [{"kind": []}, {"file": 5}, {"file": "../x"}, {"sha256": 1.5}, {"end_of_text": "x"}])
def test_a_record_of_a_preparation_with_another_tokenizer_is_refused(tmp_path, change):
    whole = {"kind": "bytes", "name": "bytes", "file": None, "sha256": "x", "vocab_size": 257, "end_of_text": 256}
    place = {"part": -1, "section": 0, "row": 0, "sources": "", "source_bytes": 0, "text_bytes": 0, "rows": []}
    record = {"job": {}, "place": place, "splits": {}, "tokenizer": {**whole, "lossless": True, **change}}
    (tmp_path / "unfinished.json").write_text(json.dumps(record))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="expected a record of unfinished work, found another"):
        read_record(tmp_path, {}, Corpus([str(tmp_path / "a.txt")], ReadOptions(), SplitRule()))


@pytest.mark.parametrize(
    "change", [{"part": "x"}, {"row": 1.5}, {"sources": 3}, {"skipped": []}, {"rows": [[0, 1, 2]]}]
)
def test_a_place_in_a_corpus_of_other_types_is_refused(change):
    place = {
        "part": 0,
        "section": 0,
        "row": 1,
        "sources": "x",
        "source_bytes": 0,
        "text_bytes": 0,
        "rows": [[0, "a", 1]],
    }
    assert Place.from_dict(place).row == 1
    with pytest.raises(TypeError, match="expected the place of a preparation"):
        Place.from_dict({**place, **change})


def test_a_zero_byte_in_a_split_table_is_refused(tmp_path):
    (tmp_path / "splits.tsv").write_text("file\tsplit\na\0.txt\ttrain\n")
    with pytest.raises(ValueError, match=r"expected names of files in the split table .*, found 'a\\x00.txt'"):
        SplitTable(tmp_path / "splits.tsv")


def test_a_state_of_a_checkpoint_with_a_number_beyond_all_is_refused(tmp_path):
    folder = tmp_path / "step-00000002"
    folder.mkdir()
    content = json.dumps({"step": 2, "best": {"step": 1, "loss": 10**400}}).encode()
    (folder / "state.json").write_bytes(content)
    (folder / "manifest.json").write_bytes(manifest_bytes({"state.json": describe(content)}))
    with pytest.raises(ValueError, match="expected the state of step 2, found something else"):
        load_state(folder)


def test_a_piece_that_begins_outside_its_tensor_is_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="the extra train is not installed")
    described = {"a": {"shape": [4, 3], "offsets": [5, 0]}}
    data = safetensors.save({"a": torch.ones(2, 3)}, {"pieces": json.dumps(described)})
    with pytest.raises(ValueError, match="expected pieces of 'a' that make one tensor, found others"):
        joined_pieces([(tmp_path / "a.safetensors", data)])


def test_an_index_of_weights_with_half_a_letter_in_a_name_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "\\ud800"}}')
    with pytest.raises(ValueError, match="expected plain names of files in"):
        transformers_folder.require_plain_indexes(tmp_path)


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("piqa", {"goal": "a", "sol1": "b", "sol2": "c", "label": "9" * 5000}),
        ("hellaswag", {"ctx": "a", "endings": 5, "label": 0}),
        ("wsc", {"target": 5}),
    ],
)
def test_a_document_with_fields_of_other_types_is_refused(tmp_path, name, document):
    tasks = pytest.importorskip("polysketch.integrations.lm_eval.tasks", reason="the extra eval is not installed")
    (tmp_path / "a.jsonl").write_text(json.dumps(document) + "\n")
    with pytest.raises(ValueError, match=f"line 1 of .*a.jsonl is not one of {name}: expected"):
        tasks.documents_of(tmp_path / "a.jsonl", tasks.LOCAL_TASKS[name])


@pytest.mark.parametrize(
    "change", [{"target_scores": "x"}, {"target_scores": {"a": "None"}}, {"target_scores": 5}, {"target": 5}]
)
def test_a_task_of_bigbench_with_fields_of_other_types_is_refused(tmp_path, change):
    bigbench = pytest.importorskip("polysketch.integrations.lm_eval.bigbench", reason="the extra eval is not installed")
    (tmp_path / "task.json").write_text(json.dumps({"examples": [{"input": "x", **change}]}))
    with pytest.raises(ValueError, match="expected texts, and scores that are numbers, in"):
        bigbench.bigbench_config(tmp_path / "task.json", "task")


def test_half_a_letter_in_a_document_is_refused(tmp_path):
    files = pytest.importorskip("polysketch.integrations.lm_eval.files", reason="the extra eval is not installed")
    (tmp_path / "a.jsonl").write_text('{"a": "whole \\ud83d\\ude00 and \\\\ud800"}\n')
    assert files.read_documents(tmp_path / "a.jsonl")[0][1] == {"a": "whole \U0001f600 and \\ud800"}
    (tmp_path / "a.jsonl").write_text('{"a": "half \\ud83d"}\n')
    with pytest.raises(ValueError, match=r"expected text in .*a\.jsonl, line 1 that UTF-8 can hold"):
        files.read_documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize("settings", [b"", b"\xff\xde", b'{"model_max_length": "many"}'])
def test_settings_of_a_tokenizer_that_transformers_cannot_use_are_refused(tmp_path, settings):
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    words = {"</s>": 0, "a": 1}
    model = {"type": "WordLevel", "unk_token": "a", "vocab": words}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert transformers_folder.read_tokenizer(tmp_path)("a")["input_ids"] == [1]
    (tmp_path / "tokenizer_config.json").write_bytes(settings)
    with pytest.raises(ValueError, match=r"expected files in .* that transformers can read, found others"):
        transformers_folder.read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change", [{"dtype": {"x": 1}}, {"layout": 5}, {"sources": [5]}, {"seed": "x"}, {"skipped": [1]}]
)
def test_a_description_of_data_with_fields_of_other_types_is_refused(change):
    tokenizer = {"kind": "bytes", "name": "bytes", "file": None, "sha256": "x", "vocab_size": 257, "end_of_text": 256}
    described = DataDescription(TokenizerDescription(**tokenizer, lossless=True), "uint16", {}, ("a",)).to_dict()
    assert DataDescription.from_dict(described).sources == ("a",)
    with pytest.raises(ValueError, match=r"expected a complete description of prepared data in .*, which is no"):
        DataDescription.from_dict({**described, **change})
