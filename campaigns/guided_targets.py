"""What guided fuzzing reads: a few files out of a folder of whole ones, which are one input, and what reads them.

An input of several files has `SEPARATOR` between them, in the order of `Target.files`. A file that an input does not
have is not there when it is read. The whole files are those of `readers.py`, and what it does not need.
"""

import dataclasses
import functools
import importlib
import json
import random
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from campaigns import readers
from campaigns.mutations import mutated
from campaigns.readers import make_sources
from campaigns.whole import read_prepared, read_state, small_model
from polysketch import ops
from polysketch.data import PreparedData, ReadOptions
from polysketch.data.corpus import Corpus
from polysketch.data.corpus.readers import read_file, reader_of
from polysketch.data.description import DataDescription
from polysketch.data.prompt_files import prompts_of
from polysketch.data.splits import SplitRule, SplitTable
from polysketch.data.tokenization import BytesTokenizer
from polysketch.data.tokenization.ids import TokenIds
from polysketch.data.tokenization.loading import described_tokenizer
from polysketch.data.unfinished import read_record
from polysketch.distributed.pieces import joined_pieces, read_pieces
from polysketch.generation import load_conversation
from polysketch.models.fingerprint import tensors_sha256
from polysketch.ops.linear.state import state_sha256
from polysketch.storage.outside import decoded
from polysketch.storage.sums import read_sums
from polysketch.studies import kept
from polysketch.studies.listing import listed
from polysketch.training.checkpoint import BEST, find_checkpoint, load_checkpoint, load_state, require_bound
from polysketch.training.comparison import compared, comparison_table
from polysketch.training.loading import load_model
from polysketch.training.manifest import MANIFEST, describe, manifest_bytes
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import RunFolder

SEPARATOR = b"\n\x00--\x00\n"
_CHECKPOINT = "checkpoints/step-00000002"


@dataclass(frozen=True)
class Target:
    """A function of bytes.

    Attributes:
        make: writes whole files into a new folder, given one for what `make_sources` makes, where they come from that.
        files: those that an input holds.
        read: reads the folder.
        again: makes right what a change of them breaks in others, as a hostile author would.
        seconds: that reading may take, on a busy core.
        late: modules that reading imports late.
        cost: of one input, in those of the fast targets: so much fewer it gets.
    """

    make: Callable[[Path, Path], Any]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    again: Callable[[Path], None] = lambda _: None
    seconds: int = 30
    late: tuple[str, ...] = ()
    cost: int = 1


def target_of(name: str) -> Target:
    """A target by its name in `TARGETS`, or by MODULE:NAME."""
    if name in TARGETS:
        return TARGETS[name]
    module, _, attribute = name.partition(":")
    found: Target = getattr(importlib.import_module(module), attribute)
    return found


def make(folder: Path, name: str) -> Path:
    """A folder of whole files for a target, below a folder that may hold those of others."""
    made = folder / "read" / re.sub(r"\W+", "-", name) / "folder"
    made.mkdir(parents=True)
    target_of(name).make(folder / "sources", made)
    return made


def example(target: Target, whole: Path) -> bytes:
    """The input that is the whole files."""
    return SEPARATOR.join((whole / name).read_bytes() for name in target.files)


def read_input(target: Target, folder: Path, content: bytes) -> None:
    """Read an input in a copy of the folder of whole files."""
    parts = dict(zip(target.files, content.split(SEPARATOR), strict=False))
    for name in target.files:
        if name in parts:
            (folder / name).write_bytes(parts[name])
        else:
            (folder / name).unlink(missing_ok=True)
    target.again(folder)
    target.read(folder)


def changed(target: Target, content: bytes, draw: random.Random, by_bytes: Callable[[bytes], bytes]) -> bytes:
    """A changed input: one of its files, what was parsed of it or its bytes.

    Args:
        target: whose input it is.
        content: the input.
        draw: what chooses.
        by_bytes: changes bytes.
    """
    parts = content.split(SEPARATOR)
    place = draw.randrange(min(len(parts), len(target.files)))
    try:
        new = mutated(parts[place], target.files[place], draw) if draw.random() < 0.5 else by_bytes(parts[place])
    except Exception:  # noqa: BLE001 - what is no JSON any more cannot be changed as JSON
        new = by_bytes(parts[place])
    return SEPARATOR.join([*parts[:place], new, *parts[place + 1 :]])


def _of(reader: str, *files: str, **more: Any) -> Target:
    """A target that reads files of a reader as that does."""
    return Target(readers.READERS[reader].make, files, **{"read": readers.READERS[reader].read, **more})


def _text(name: str) -> Callable[[Path], None]:
    """Reads a file of text or of a table."""

    def read(folder: Path) -> None:
        reader = reader_of(folder / name)
        assert reader is not None
        for _ in read_file(folder / name, reader, ReadOptions(cut_text=100)):
            pass

    return read


def _make_tables(sources: Path, folder: Path) -> None:
    readers.READERS["tables of text"].make(sources, folder)
    (folder / "rows.txt").write_text(readers.TEXT * 5, encoding="utf-8")


def _read_foreign(name: str) -> Callable[[Path], None]:
    """Reads tokens of others, all of them."""

    def read(folder: Path) -> None:
        data = PreparedData.open(folder / name, BytesTokenizer())
        for split in data.description.splits:
            tokens = data.split(split).tokens
            int(tokens[: min(len(tokens), 5000)].sum())

    return read


def _read_run(folder: Path) -> None:
    """As `polysketch generate` does."""
    _, description = load_model(folder)
    description.tokenizer.encode(readers.TEXT)


def _make_best(sources: Path, folder: Path) -> None:
    """A run whose newest checkpoint says that it is the best."""
    readers.READERS["a run"].make(sources, folder)
    path = folder / _CHECKPOINT / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), BEST: {"step": 2, "loss": 1.5}}))
    _reseal_checkpoint_state(folder)


def _reseal_checkpoint_state(folder: Path) -> None:
    """A new line of the manifest for a changed state.json."""
    path, state = folder / _CHECKPOINT / MANIFEST, folder / _CHECKPOINT / "state.json"
    entries = json.loads(path.read_bytes())["files"]
    if state.exists():
        path.write_bytes(manifest_bytes({**entries, state.name: describe(state.read_bytes())}))


def _read_checkpoint_state(folder: Path) -> None:
    """As resuming a run does, without the weights."""
    find_checkpoint(folder / "checkpoints", BEST)
    path = find_checkpoint(folder / "checkpoints")
    require_bound(path, load_state(path), RunFolder(folder).identity())


def _read_metrics(folder: Path) -> None:
    comparison_table([compared(folder)])
    MetricsFile(folder / "metrics.jsonl").drop_after(1)


def _make_pieces(_: Path, folder: Path) -> None:
    """A tensor that is whole, and half of another, as one of two processes writes them."""
    described = {"b": {"shape": [2, 3], "offsets": [0, 0]}}
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    (folder / "a.safetensors").write_bytes(safetensors.torch.save(tensors, {"pieces": json.dumps(described)}))


def _read_pieces(folder: Path) -> None:
    path = folder / "a.safetensors"
    read_pieces(path)
    joined_pieces([(path, path.read_bytes())])


def _resealed(name: str, sum_of: Callable[[Mapping[str, torch.Tensor], Mapping[str, str]], str]) -> Callable[..., None]:
    """Puts the right sum into the header of the one file of tensors, where it can be read."""

    def again(folder: Path) -> None:
        path = next(folder.glob("*.safetensors"))
        content = path.read_bytes()
        try:
            (length,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + length])
            header["__metadata__"][name] = sum_of(safetensors.torch.load(content), header["__metadata__"])
            written = json.dumps(header).encode()
        except Exception:  # noqa: BLE001 - it is no file of tensors any more, and stays so
            return
        path.write_bytes(struct.pack("<Q", len(written)) + written + content[8 + length :])

    return again


def _state_sum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    return state_sha256(tensors, {name: metadata.get(name, "") for name in ("power", "factors")})


def _read_state(folder: Path) -> None:
    """Load the state, and go on from it by the programs in C++."""
    read_state(folder)
    state = ops.LinearAttentionState.load(folder / "state.safetensors")
    feature = torch.rand(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    local = ops.LocalPolynomial(feature, feature, 2, 8)
    ops.linear_attention(feature, feature, feature, power=2, local=local, causal=True, state=state, return_state=True)


@functools.cache
def _model() -> Any:
    return small_model()


@torch.inference_mode()
def _read_talk(folder: Path) -> None:
    """Load the conversation, and go on from it."""
    _, state = load_conversation(folder / "talk.safetensors", _model())
    _model().extend(torch.tensor([[1]]), state)


def _make_index(sources: Path, folder: Path) -> None:
    """An exported model whose weights have an index."""
    shutil.copytree(make_sources(sources) / "exported", folder, dirs_exist_ok=True)
    readers.without_sums(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = safetensors.torch.load_file(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _read_model(folder: Path) -> None:
    from polysketch.integrations.transformers_folder import read_model

    read_model(folder)


def _make_replaced(sources: Path, folder: Path) -> None:
    """A small Llama with its attention replaced."""
    from polysketch.integrations.replacement import replace_attention, save_replaced
    from polysketch.integrations.transformers_folder import new_model

    readers.READERS["a Llama, converted"].make(sources, folder)
    model = new_model(json.loads((folder / "config.json").read_bytes()))
    replace_attention(model, "polysketch", window=8, sketch_size=4)
    shutil.rmtree(folder)
    save_replaced(model, folder)


def _make_chat(sources: Path, folder: Path) -> None:
    """An exported model whose tokenizer has a chat template."""
    shutil.copytree(make_sources(sources) / "exported", folder, dirs_exist_ok=True)
    template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}{{ eos_token }}"
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))


def _read_chat(folder: Path) -> None:
    from polysketch.integrations.chat import load_chat

    load_chat(folder, BytesTokenizer()).render([{"role": "user", "content": "7 foxes"}])


def _make_record(sources: Path, folder: Path) -> None:
    """What a preparation had done when it was stopped."""
    made = make_sources(sources)
    shutil.copytree(made / "data", folder, dirs_exist_ok=True)
    (folder / "a.txt").write_text(readers.TEXT)
    described = DataDescription.read(folder / "description.json")
    place = {
        "part": -1,
        "section": 0,
        "row": 0,
        "sources": "",
        "source_bytes": 0,
        "text_bytes": 0,
        "rows": [[0, "a", 1]],
    }
    splits = {name: dataclasses.asdict(split) for name, split in described.splits.items()}
    record = {"job": {"seed": 1}, "place": place, "splits": splits}
    record["tokenizer"] = dataclasses.asdict(described.tokenizer)
    (folder / "unfinished.json").write_text(json.dumps(record))


def _read_record(folder: Path) -> None:
    corpus = Corpus([str(folder / "a.txt")], ReadOptions(cut_text=0), SplitRule())
    record = read_record(folder, {"seed": 1}, corpus)
    if record is not None:
        described_tokenizer(folder, record.tokenizer)


def _make_evaluation(sources: Path, folder: Path) -> None:
    from polysketch.integrations.lm_eval import bigbench  # noqa: F401 - now, and not in the first input

    readers.READERS["documents of evaluation tasks"].make(sources, folder)
    (folder / "own.jsonl").write_text(json.dumps({"question": "a?", "choices": ["b", "c"], "answer": 1}) + "\n")
    scored = {"input": "x", "target_scores": {"a": 1, "b": 0}}
    (folder / "task.json").write_text(json.dumps({"task_prefix": "", "examples": [scored]}))


def _read_own_questions(folder: Path) -> None:
    from polysketch.integrations.lm_eval.choices import read_questions

    read_questions(folder / "own.jsonl")


_DOCUMENTS: dict[str, dict[str, Any]] = {
    "hellaswag": {"ctx": "A: b. the c", "endings": ["d", "e"], "label": "1"},
    "piqa": {"goal": "a", "sol1": "b", "sol2": "c", "label": 0},
    "lambada_openai": {"context": "a ", "continuation": " b"},
    "arc_easy": {"question": {"stem": "a", "choices": [{"text": "b", "label": "A"}]}, "answerKey": "A"},
    "winogrande": {"context_options": ["a b", "a c"], "continuation": "d", "gold": 1},
    "openbookqa": {"query": "a\nAnswer:", "choices": ["b", "c"], "gold": 0},
    "boolq": {"query": "Passage: a\nQuestion: b?\n", "choices": ["no", "yes"], "gold": 1},
    "copa": {"query": "a, because", "choices": ["b", "c"], "gold": 0},
    "wsc": {
        "text": "The a b",
        "target": {"span1_index": 0, "span1_text": "the a", "span2_index": 2, "span2_text": "b"},
        "label": False,
    },
}
"""A document of each task, in the layout with most to read."""


def _make_documents(_: Path, folder: Path) -> None:
    for name, document in _DOCUMENTS.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(document) + "\n")


def _read_documents(folder: Path) -> None:
    from polysketch.integrations.lm_eval.tasks import LOCAL_TASKS, documents_of

    for name in _DOCUMENTS:
        documents_of(folder / f"{name}.jsonl", LOCAL_TASKS[name])


def _read_bigbench(folder: Path) -> None:
    from polysketch.integrations.lm_eval.bigbench import bigbench_config, require_bigbench

    require_bigbench(folder / "task.json")
    bigbench_config(folder / "task.json", "task")


def _make_requests(_: Path, folder: Path) -> None:
    shared = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 1, "n": 1, "stop": ["x"]}
    (folder / "completion.json").write_text(json.dumps({"model": "m", "prompt": ["a", [1, 2]], **shared}))
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    (folder / "chat.json").write_text(json.dumps({"messages": messages, **options, **shared}))


def _read_request(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from polysketch.serving import asked
        from polysketch.serving.errors import ApiError
        from polysketch.serving.limits import Limits

        body = decoded((folder / f"{name}.json").read_bytes(), "the body")
        try:
            getattr(asked, f"asked_{name}")(body, "m", Limits())
        except ApiError as error:
            raise ValueError(str(error)) from error

    return read


def _make_ids(_: Path, folder: Path) -> None:
    TokenIds(300).save(folder)


def _make_study(_: Path, folder: Path) -> None:
    (folder / "record.json").write_text(json.dumps({"settings": {"steps": 3}, "loss": 1.5}))


def _read_study(folder: Path) -> None:
    kept.kept_or_made(folder / "record.json", {"steps": 3}, dict)


def _make_conversion(_: Path, folder: Path) -> None:
    options = {"model": "m", "data": "d", "attention": "polysketch-paper", "attention_options": {"window": 8}}
    (folder / "config.json").write_text(json.dumps({"format": 1, "conversion": options, "sources": {"model": "x"}}))


def _read_conversion(folder: Path) -> None:
    from polysketch.conversion.folder import ConversionFolder

    ConversionFolder(folder).read_config()


_RUN, _TABLES, _EVALUATION = readers.READERS["a run"].make, _make_tables, _make_evaluation
_IN_CHECKPOINT = f"{_CHECKPOINT}/"
_LM_EVAL = tuple(f"polysketch.integrations.lm_eval.{name}" for name in ("choices", "tasks", "bigbench"))
_TRANSFORMERS = ("polysketch.integrations.chat", "polysketch.integrations.huggingface", "transformers.models.auto")

TARGETS: dict[str, Target] = {
    "tokenizer.json": _of("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    "tokenizer.json of another kind": _of("tokenizer.json of another kind", "tokenizer.json"),
    "tokenizer.model": _of("tokenizer.model", "tokenizer.model"),
    "vocab.json and merges.txt": _of("vocab.json and merges.txt", "vocab.json", "merges.txt"),
    "token ids": Target(_make_ids, ("ids.json",), lambda folder: TokenIds.load(folder / "ids.json")),
    "manifest of a checkpoint": Target(
        _RUN, (f"{_IN_CHECKPOINT}manifest.json",), lambda folder: load_checkpoint(folder / _CHECKPOINT), cost=4
    ),
    "state of a checkpoint": Target(
        _make_best, (f"{_IN_CHECKPOINT}state.json",), _read_checkpoint_state, _reseal_checkpoint_state
    ),
    "config.json of a run": Target(_RUN, ("config.json",), _read_run, cost=10),
    "config.json of a conversion": Target(_make_conversion, ("config.json",), _read_conversion),
    "metrics.jsonl": Target(readers.READERS["metrics"].make, ("metrics.jsonl",), _read_metrics),
    "description.json": _of("prepared data", "description.json", read=read_prepared),
    "record of a preparation": Target(_make_record, ("unfinished.json",), _read_record),
    "text": Target(_TABLES, ("rows.txt",), _text("rows.txt")),
    "jsonl": Target(_TABLES, ("rows.jsonl",), _text("rows.jsonl")),
    "jsonl.gz": Target(_TABLES, ("more.jsonl.gz",), _text("more.jsonl.gz")),
    "csv": Target(_TABLES, ("rows.csv",), _text("rows.csv")),
    "tsv": Target(_TABLES, ("rows.tsv",), _text("rows.tsv")),
    "parquet": _of("parquet", "rows.parquet", read=_text("rows.parquet")),
    "prompts": _of(
        "prompts and split tables", "prompts.jsonl", read=lambda folder: prompts_of(folder / "prompts.jsonl")
    ),
    "split table": _of("prompts and split tables", "splits.tsv", read=lambda folder: SplitTable(folder / "splits.tsv")),
    "tokens of nanoGPT": _of("tokens of others", "nano/train.bin", read=_read_foreign("nano")),
    "tokens of llm.c": _of("tokens of others", "llmc/train.bin", read=_read_foreign("llmc")),
    "tokens of Megatron-LM": _of(
        "tokens of others", "megatron/train.idx", "megatron/train.bin", read=_read_foreign("megatron")
    ),
    "task": _of("a task", "task.json", cost=2),
    "summary of a study": _of("records of studies", "reversal-smoke/summary.json", read=listed),
    "record of a study": Target(_make_study, ("record.json",), _read_study),
    "questions of one's own": Target(_EVALUATION, ("own.jsonl",), _read_own_questions, late=_LM_EVAL),
    "documents of evaluation tasks": Target(
        _make_documents, tuple(f"{name}.jsonl" for name in _DOCUMENTS), _read_documents, late=_LM_EVAL
    ),
    "task of BIG-bench": Target(_EVALUATION, ("task.json",), _read_bigbench, late=_LM_EVAL),
    "SHA256SUMS": Target(readers.READERS["an exported model"].make, ("SHA256SUMS",), read_sums),
    "header of safetensors": Target(_make_pieces, ("a.safetensors",), _read_pieces),
    "a state": _of("a state", "state.safetensors", read=_read_state, again=_resealed("sha256", _state_sum)),
    "a conversation": _of(
        "a conversation",
        "talk.safetensors",
        cost=2,
        read=_read_talk,
        again=_resealed("tensors_sha256", lambda tensors, _: tensors_sha256(tensors)),
    ),
    "completion request": Target(_make_requests, ("completion.json",), _read_request("completion")),
    "chat request": Target(_make_requests, ("chat.json",), _read_request("chat")),
    "index of weights": Target(
        _make_index, ("model.safetensors.index.json",), _read_model, seconds=60, late=_TRANSFORMERS, cost=10
    ),
    "config.json of a model": Target(
        _make_index, ("config.json", "generation_config.json"), _read_model, seconds=60, late=_TRANSFORMERS, cost=10
    ),
    "config.json of a converted model": Target(
        _make_replaced, ("config.json",), _read_model, seconds=60, late=_TRANSFORMERS, cost=10
    ),
    "chat template": Target(
        _make_chat, ("tokenizer_config.json",), _read_chat, seconds=60, late=_TRANSFORMERS, cost=10
    ),
}
"""By what an input is."""
