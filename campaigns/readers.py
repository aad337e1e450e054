"""Every reader of outside bytes, with real files for it: what fuzzing changes, and where hostile files are planted."""

import contextlib
import csv
import gzip
import io
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from campaigns.harness import prepare_text, run_of
from campaigns.whole import read_state, read_talk, small_model
from polysketch import ops
from polysketch.cli import main
from polysketch.data import PreparedData, ReadOptions, load_tokenizer
from polysketch.data.corpus.readers import read_file, reader_of
from polysketch.data.prompt_files import prompts_of
from polysketch.data.splits import SplitTable
from polysketch.data.tokenization import BytesTokenizer
from polysketch.generation import save_conversation
from polysketch.tasks import open_task, verify_task
from polysketch.training.manifest import MANIFEST, describe, manifest_bytes
from polysketch.training.verification import verify

ONE_STEP = ["--layers", "1", "--context", "16", "--batch-size", "1", "--steps", "1", "--eval-tokens", "16"]
TEXT = "Once upon a time, 7 foxes\u2014said\u00e9 \U0001f600\n"


@dataclass(frozen=True)
class Reader:
    """What reads files that others made.

    Attributes:
        make: writes whole ones into a new folder, given one for what `make_sources` makes, where they come from that.
        read: reads the folder; gives an exit status where it is a command.
        again: makes right what a change of one file breaks in others, as a hostile author would.
        seconds: that reading may take, on a busy core.
    """

    make: Callable[[Path, Path], None]
    read: Callable[[Path], Any]
    again: Callable[[Path], None] = lambda _: None
    seconds: int = 30


def make_sources(folder: Path) -> Path:
    """Text, prepared data, a run and an exported model in a folder, unless they are there."""
    if folder.exists():
        return folder
    text = folder / "text"
    text.mkdir(parents=True)
    for number in range(12):
        (text / f"{number}.txt").write_text(
            "\n".join(f"{left} plus {number} is {left + number}." for left in range(60))
        )
    prepare_text(text, folder / "data")
    run_of(folder / "data", folder / "run", steps=2, eval_every=0)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if main(["export", str(folder / "run"), str(folder / "exported")]):
            raise RuntimeError("expected an exported model, found that `polysketch export` fails")
    return folder


def _copied(name: str) -> Callable[[Path, Path], None]:
    return lambda sources, folder: shutil.copytree(make_sources(sources) / name, folder, dirs_exist_ok=True)


def _command(*line: str) -> Callable[[Path], int]:
    """A command on a folder, whose name stands for FOLDER; it writes to nothing that stays."""
    return lambda folder: main([word.replace("FOLDER", str(folder)) for word in line])


def _used_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode(TEXT))
    tokenizer.token_bytes()


def _make_bpe_json(sources: Path, folder: Path) -> None:
    shutil.copy(make_sources(sources) / "data" / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "add_bos_token": False}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))


def _make_pair(sources: Path, folder: Path) -> None:
    model = json.loads((make_sources(sources) / "data" / "tokenizer.json").read_bytes())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")


def _make_other_json(_: Path, folder: Path) -> None:
    """WordPiece, which normalises."""
    words = ["[UNK]", "</s>", "once", "a", "##s", "time", "7", ","]
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
                "padding": None,
                "added_tokens": [_special(0, "[UNK]"), _special(1, "</s>")],
                "normalizer": {
                    "type": "BertNormalizer",
                    "clean_text": True,
                    "handle_chinese_chars": True,
                    "strip_accents": None,
                    "lowercase": True,
                },
                "pre_tokenizer": {"type": "BertPreTokenizer"},
                "post_processor": None,
                "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
                "model": {
                    "type": "WordPiece",
                    "unk_token": "[UNK]",
                    "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100,
                    "vocab": {word: index for index, word in enumerate(words)},
                },
            }
        )
    )


def _special(index: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **flags}


def _make_pieces(sources: Path, folder: Path) -> None:
    from polysketch.data.tokenization import SentencePieceTokenizer

    texts = [path.read_text() for path in sorted((make_sources(sources) / "text").iterdir())]
    SentencePieceTokenizer.train(texts, 320).save(folder)


def _read_files(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        reader = reader_of(path)
        for _ in read_file(path, reader, ReadOptions(cut_text=100)) if reader else ():
            pass


def _make_tables(_: Path, folder: Path) -> None:
    rows = [{"text": TEXT * number, "other": [number]} for number in range(1, 5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "rows.jsonl").write_bytes(lines)
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(lines))
    for name, between in (("rows.csv", ","), ("rows.tsv", "\t")):
        with (folder / name).open("w", newline="") as file:
            table = csv.writer(file, delimiter=between)
            table.writerows([["text", "other"], *([row["text"], "x"] for row in rows)])


def _make_parquet(_: Path, folder: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"text": [TEXT] * 40, "other": list(range(40))}), folder / "rows.parquet")


def _make_small(_: Path, folder: Path) -> None:
    (folder / "prompts.jsonl").write_text('"Once"\n{"prompt": "upon", "other": 1}\n')
    (folder / "splits.tsv").write_text("file\tsplit\na.txt\ttrain\nb/c.txt\ttest\n")


def _read_small(folder: Path) -> None:
    prompts_of(folder / "prompts.jsonl")
    SplitTable(folder / "splits.tsv")


def _make_tokens(_: Path, folder: Path) -> None:
    """Of nanoGPT, llm.c and Megatron-LM."""
    ids = (np.arange(3000) % 250).astype("<u2")
    (folder / "nano").mkdir()
    (folder / "nano" / "train.bin").write_bytes(ids.tobytes())
    (folder / "llmc").mkdir()
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    (folder / "llmc" / "train.bin").write_bytes(header.tobytes() + ids.tobytes())
    (folder / "megatron").mkdir()
    (folder / "megatron" / "train.bin").write_bytes(ids.tobytes())
    lengths, starts = np.full(3, 1000, "<i4"), np.arange(3, dtype="<i8") * 2000
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += lengths.tobytes() + starts.tobytes() + np.arange(4, dtype="<i8").tobytes()
    (folder / "megatron" / "train.idx").write_bytes(index)


def _read_tokens(folder: Path) -> None:
    for inner in sorted(folder.iterdir()):
        data = PreparedData.open(inner, BytesTokenizer())
        for name in data.description.splits:
            tokens = data.split(name).tokens
            int(np.asarray(tokens[: min(len(tokens), 5000)]).astype(np.int64).sum())


def _make_task(_: Path, folder: Path) -> None:
    splits, line = ("train", "validation", "test"), []
    for split in splits:
        rows = [{"text": f"{split} {number}", "label": "ab"[number % 2]} for number in range(8)]
        (folder.parent / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        line += [f"--{split}", str(folder.parent / f"{split}.jsonl")]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if main(["task", "texts", *line, "--out", str(folder)]):
            raise RuntimeError("expected a task, found that `polysketch task` fails")


def _read_task(folder: Path) -> None:
    with contextlib.suppress(ValueError, OSError):
        verify_task(folder)
    task = open_task(folder)
    for split in ("train", "validation", "test"):
        task.rows(split, np.arange(2))


def _make_state(_: Path, folder: Path) -> None:
    feature = torch.rand(1, 2, 21, 8, generator=torch.Generator().manual_seed(0))
    local = ops.LocalPolynomial(feature, feature, 2, 8)
    result = ops.linear_attention(feature, feature, feature, power=2, local=local, causal=True, return_state=True)
    assert result.state is not None
    result.state.save(folder / "state.safetensors")


def _make_talk(_: Path, folder: Path) -> None:
    model = small_model()
    with torch.inference_mode():
        state = model.extend(torch.arange(9)[None], model.init_state(1))[1]
    save_conversation(folder / "talk.safetensors", model, list(range(9)), state)


def _make_metrics(sources: Path, folder: Path) -> None:
    _copied("run")(sources, folder)
    for path in sorted(folder.rglob("*.safetensors")):
        path.unlink()


def _make_records(_: Path, folder: Path) -> None:
    inner = folder / "reversal-smoke"
    inner.mkdir()
    summary = {
        "study": "reversal",
        "size": "smoke",
        "rows": 1,
        "own_rows": 1,
        "of_rows": 4,
        "told": "",
        "papers": {},
        "runs": 1,
        "ours": "it holds",
        "holds": True,
    }
    (inner / "summary.json").write_text(json.dumps(summary))


def _make_evaluation(_: Path, folder: Path) -> None:
    import polysketch.integrations.lm_eval.files  # noqa: F401 - now, and not in every attack

    (folder / "piqa.jsonl").write_text(json.dumps({"goal": "a", "sol1": "b", "sol2": "c", "label": 0}) + "\n")
    (folder / "other.json").write_text(json.dumps({"examples": [{"input": "x", "target": "y"}]}))
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n'))


def _read_evaluation(folder: Path) -> None:
    from polysketch.integrations.lm_eval.files import read_documents

    for path in sorted(folder.iterdir()):
        read_documents(path)


_OF_MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "attn_pdrop": 0.0},
}
"""Models of other people's kinds, small, by their names in transformers: their sizes."""


def _make_model(kind: str) -> Callable[[Path, Path], None]:
    """A model of transformers, its tokenizer beside it, and text for it beside its folder."""

    def make(sources: Path, folder: Path) -> None:
        import torch._dynamo  # which the first optimizer imports: now, and not in every attack

        import polysketch.conversion  # noqa: F401
        from polysketch.integrations.transformers_folder import new_model

        make_sources(sources)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(sources / "exported" / name, folder)
        shutil.copytree(sources / "data", folder.with_name("data"))
        torch.manual_seed(0)
        words = PreparedData.open(sources / "data").tokenizer.vocab_size
        end = {"bos_token_id": None, "eos_token_id": None}
        new_model({"model_type": kind, "vocab_size": words, **end, **_OF_MODELS[kind]}).save_pretrained(folder)

    return make


def _convert(folder: Path) -> int:
    """`polysketch convert`, a step of each stage."""
    sizes = [
        "--context",
        "16",
        "--batch-size",
        "1",
        "--transfer-steps",
        "1",
        "--tuning-steps",
        "1",
        "--eval-tokens",
        "16",
    ]
    place = [str(folder), "--data", str(folder.with_name("data")), "--out", f"{folder}-new"]
    return main(["convert", *place, "--attention-options", "window=8", "sketch_size=4", *sizes, "--device", "cpu"])


def _make_run_and_data(sources: Path, folder: Path) -> None:
    """A run, and the data it learned from beside it."""
    _copied("run")(sources, folder)
    shutil.copytree(sources / "data", folder.with_name("data"), dirs_exist_ok=True)


def _resume(folder: Path) -> int:
    """`polysketch train --resume` of a run that has made its steps."""
    return main(["train", "--data", str(folder.with_name("data")), "--out", str(folder), "--resume"])


def _verified(folder: Path) -> None:
    """What `polysketch verify` says, as one refusal."""
    problems = verify(folder).problems
    if problems:
        raise ValueError("; ".join(problems))


def reseal_checkpoints(folder: Path) -> None:
    """New manifests for changed checkpoints."""
    for path in folder.glob("checkpoints/step-*"):
        if (path / MANIFEST).is_symlink() or not (path / MANIFEST).is_file():
            continue  # it would be written through, or a pipe would be waited for
        files = [one for one in sorted(path.iterdir()) if one.is_file() and one.name != MANIFEST]
        (path / MANIFEST).write_bytes(manifest_bytes({one.name: describe(one.read_bytes()) for one in files}))


def without_sums(folder: Path) -> None:
    """What was changed is read, and not refused for its sum."""
    (folder / "SHA256SUMS").unlink(missing_ok=True)


READERS: dict[str, Reader] = {
    "tokenizer.json": Reader(_make_bpe_json, _used_tokenizer),
    "vocab.json and merges.txt": Reader(_make_pair, _used_tokenizer),
    "tokenizer.json of another kind": Reader(_make_other_json, _used_tokenizer),
    "tokenizer.model": Reader(_make_pieces, _used_tokenizer),
    "tables of text": Reader(_make_tables, _read_files),
    "parquet": Reader(_make_parquet, _read_files),
    "prompts and split tables": Reader(_make_small, _read_small),
    "tokens of others": Reader(_make_tokens, _read_tokens),
    "prepared data": Reader(
        _copied("data"),
        _command(
            "train",
            "--data",
            "FOLDER",
            "--out",
            "FOLDER-new",
            *ONE_STEP,
        ),
    ),
    "a run": Reader(_copied("run"), _command("generate", "FOLDER", "--max-new-tokens", "1"), reseal_checkpoints),
    "a run, verified": Reader(_copied("run"), _verified),
    "a run, resumed": Reader(_make_run_and_data, _resume, reseal_checkpoints),
    "metrics": Reader(_make_metrics, _command("compare", "FOLDER", "--json")),
    "an exported model": Reader(
        _copied("exported"), _command("generate", "FOLDER", "--max-new-tokens", "1"), without_sums
    ),
    "an exported model, imported": Reader(
        _copied("exported"), _command("import", "FOLDER", "FOLDER-new"), without_sums
    ),
    "a Llama, converted": Reader(_make_model("llama"), _convert, seconds=120),
    "a GPT-2, converted": Reader(_make_model("gpt2"), _convert, seconds=120),
    "a state": Reader(_make_state, read_state),
    "a conversation": Reader(_make_talk, read_talk),
    "a task": Reader(_make_task, _read_task),
    "records of studies": Reader(_make_records, _command("study", "--list", "--results", "FOLDER")),
    "documents of evaluation tasks": Reader(_make_evaluation, _read_evaluation),
}
"""By what they read."""


def make(folder: Path, name: str) -> Path:
    """A folder of whole files for a reader, below a folder that may hold those of others."""
    sources, made = folder / "sources", folder / "read" / name.replace(" ", "-").replace(",", "") / "folder"
    made.mkdir(parents=True)
    READERS[name].make(sources, made)
    return made
