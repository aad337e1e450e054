"""From a folder of transformers back to a run folder, which our own commands read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import PreTrainedConfig

from polysketch.data import DataDescription, PreparedData, TokenizerLike, load_tokenizer, require_same_tokenizer
from polysketch.data.description import DESCRIPTION_FILE, READABLE_VERSIONS, TokenizerDescription
from polysketch.data.tokenization import TOKENIZERS
from polysketch.data.tokenization.bpe import BpeTokenizer
from polysketch.integrations.huggingface.causal_lm import PolysketchForCausalLM
from polysketch.integrations.huggingface.configuration import PolysketchConfig
from polysketch.integrations.huggingface.export import original_tokenizer
from polysketch.integrations.huggingface.quiet import reading
from polysketch.integrations.huggingface.tokenizer import NOT_OF_TRAINING
from polysketch.integrations.transformers_folder import check_import
from polysketch.models.fingerprint import weights_sha256
from polysketch.models.former import FORMAT
from polysketch.storage import whole_folder
from polysketch.storage.sums import require_sums
from polysketch.training.checkpoint import Checkpoint, save_checkpoint
from polysketch.training.environment import describe_environment
from polysketch.training.run_folder import RunFolder
from polysketch.training.tensors import random_tensors

_DEFAULT_CONTEXT = 2048
_KNOWN = {"step": int, "metrics": dict, "environment": dict | None, "data": dict}
_KNOWN_OF_DATA = {"name": str, "description_sha256": str, "sources": list, "splits": dict, "dtype": str}


def import_model(
    folder: str | Path, run: str | Path, *, tokenizer: str | Path | None = None, data: str | Path | None = None
) -> Path:
    """Make a run folder of a model that `export_run` or `save_pretrained` wrote, for instance after fine-tuning.

    The run can be evaluated, generated from, and trained on with `init_from`; it cannot be resumed, for there is no
    optimizer state. Its step is that of the exported run while the weights are still the same, else 0. It appears whole
    or not at all.

    Args:
        folder: with config.json and safetensors; nothing is downloaded, and nothing unpickled.
        run: to write; new or empty.
        tokenizer: a tokenizer file, a run's tokenizer folder or a prepared folder, where the folder has lost the
            original: `Trainer` and `save_pretrained` keep no sentencepiece model, nor a foreign file byte for byte.
        data: a prepared folder to evaluate on by default.

    Returns:
        The run folder.

    Raises:
        FileNotFoundError: no such folder, or no model in it.
        FileExistsError: the run folder has contents.
        ValueError: a model of another kind, files that are not those of its SHA256SUMS, weights that do not fit, or
            another tokenizer than the model's.
    """
    folder, run = Path(folder), Path(run)
    require_sums(folder)
    check_import(folder, run, data=data)
    config = _read_config(folder)
    known = known_of_run(config, folder)
    ours = find_tokenizer(folder, known.get("tokenizer"), tokenizer)
    description = _description(known, ours, folder)
    if ours.vocab_size > config.vocab_size:
        raise ValueError(f"expected a tokenizer of at most {config.vocab_size} ids, found {ours.name}")
    opened = None if data is None else _open_data(Path(data), ours, folder)
    with reading(folder):
        model = PolysketchForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    unchanged = weights_sha256(model.inner) == known.get("weights_sha256")
    with whole_folder(run) as temporary:
        run_folder = RunFolder(temporary)
        _write(run_folder, model, known if unchanged else {**known, "step": 0, "metrics": {}}, description, opened)
        ours.save(run_folder.tokenizer)
    return run


def find_tokenizer(folder: Path, expected: dict[str, Any] | None, given: str | Path | None = None) -> TokenizerLike:
    """The tokenizer of our own that an exported model was trained with.

    Args:
        folder: the exported model.
        expected: what its configuration says about the tokenizer; None where it says nothing.
        given: where else to look; see `import_model`.

    Raises:
        ValueError: another one than expected, or none that can be found.
    """
    _check_described(expected, folder)
    if given is not None:
        return _require_expected(load_tokenizer(given), expected, str(given))
    if expected is None:
        return _from_fast_file(folder)
    kind = TOKENIZERS.get(expected["kind"])
    if kind is None:
        raise ValueError(f"expected a tokenizer of {', '.join(TOKENIZERS)}, found {expected['kind']!r} in {folder}")
    if kind.file_name is None:
        return kind.load(folder)
    original = original_tokenizer(folder, expected)
    if original.exists():
        return _require_expected(kind.load(original), expected, str(original))
    if kind is not BpeTokenizer:
        raise ValueError(
            f"found no {original.name} in {folder}, which transformers does not keep: say with --tokenizer where the "
            f"model's own {expected['name']} is, for instance the folder of prepared data"
        )
    return _require_expected(_from_fast_file(folder), expected, str(folder / "tokenizer.json"))


def _check_described(expected: Any, folder: Path) -> None:
    """Refuse what does not tell a tokenizer: the folder may come from a stranger."""
    if expected is None:
        return
    texts = [expected.get(name) for name in ("kind", "name", "sha256")] if isinstance(expected, dict) else [None]
    if not all(isinstance(text, str) for text in texts) or not isinstance(expected.get("file"), str | None):
        raise ValueError(
            f"expected kind, name, sha256 and file of a tokenizer in {folder / 'config.json'}, found others"
        )


def _from_fast_file(folder: Path) -> TokenizerLike:
    """Byte-level BPE out of the file that transformers wrote, in the form in which `BpeTokenizer` writes its own."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"found no tokenizer in {folder}: say with --tokenizer where the model's own is")
    contents = BpeTokenizer.load(path).serialized()
    plain = tokenizers.Tokenizer.from_str(json.dumps(json.loads(contents) | NOT_OF_TRAINING)).to_str(pretty=False)
    return BpeTokenizer(tokenizers.Tokenizer.from_str(plain), plain.encode())


def _require_expected(found: TokenizerLike, expected: dict[str, Any] | None, where: str) -> TokenizerLike:
    if expected is not None and found.sha256 != expected["sha256"]:
        raise ValueError(
            f"expected the model's tokenizer {expected['name']} (sha256 {expected['sha256'][:12]}), found {found.name} "
            f"(sha256 {found.sha256[:12]}) in {where}: say with --tokenizer where the original is, for instance the "
            "folder of prepared data"
        )
    return found


def _read_config(folder: Path) -> PolysketchConfig:
    with reading(folder):
        config = PolysketchConfig.from_pretrained(folder, local_files_only=True)
    if config.architectures not in (None, [PolysketchForCausalLM.__name__]):
        raise ValueError(f"expected a language model in {folder}, found {config.architectures}: it has another head")
    return config


def known_of_run(config: PreTrainedConfig, folder: Path) -> dict[str, Any]:
    """What an exported run says of itself; empty where it says nothing. The folder may come from a stranger.

    Raises:
        ValueError: a fact of another type.
    """
    known = getattr(config, "training_run", None) or {}
    _require_types(known, _KNOWN, folder)
    _require_types(known.get("data", {}), _KNOWN_OF_DATA, folder)
    _require_types(known.get("metrics", {}), dict.fromkeys(known.get("metrics", {}), dict), folder)
    return known


def _require_types(facts: Any, types: dict[str, Any], folder: Path) -> None:
    wrong = None if isinstance(facts, dict) else "facts of a run"
    if wrong is None:
        wrong = next(
            (name for name, kind in types.items() if name in facts and not isinstance(facts[name], kind)), None
        )
    if wrong is not None:
        raise ValueError(
            f"expected what an exported run says of itself in {folder / 'config.json'}, found other {wrong}"
        )


def _open_data(data: Path, tokenizer: TokenizerLike, folder: Path) -> PreparedData:
    opened = PreparedData.open(data)
    require_same_tokenizer(tokenizer, opened.tokenizer, owner=f"the model {folder}", other=f"the data folder {data}")
    return opened


def _write(
    run: RunFolder, model: PolysketchForCausalLM, known: dict[str, Any], description: DataDescription, data: Any
) -> None:
    run.write_config(_run_config(model, known, data))
    run.tokenizer.mkdir()
    description.write(run.tokenizer / DESCRIPTION_FILE)
    run.checkpoints.mkdir()
    state = {"step": known.get("step", 0), "seconds": 0.0}
    save_checkpoint(run.checkpoints, Checkpoint(model.inner.state_dict(), {}, random_tensors(), state), keep=1)
    for line in known.get("metrics", {}).values():
        run.open_metrics().append(line)


def _run_config(model: PolysketchForCausalLM, known: dict[str, Any], data: PreparedData | None) -> dict[str, Any]:
    """config.json: without the options of training, so that nobody resumes what has no optimizer state."""
    recorded = known.get("data", {})
    folder = recorded.get("name", "the data of the imported model") if data is None else str(data.folder.resolve())
    return {
        "format": FORMAT,
        "imported": True,
        "training": {"context": model.config.context_length or _DEFAULT_CONTEXT, "extend": False},
        "resolved": {"device": "cpu", "dtype": "float32"},
        "model": model.inner.config.to_dict(),
        "data": {"folder": folder, "description_sha256": recorded.get("description_sha256", "")},
        "environment": known.get("environment") or describe_environment(torch.device("cpu")),
    }


def _description(known: dict[str, Any], tokenizer: TokenizerLike, folder: Path) -> DataDescription:
    """description.json beside the run's tokenizer."""
    recorded = known.get("data", {})
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    values = {"dtype": dtype} | {name: recorded[name] for name in ("dtype", "splits", "sources") if name in recorded}
    plain = DataDescription(TokenizerDescription.of(tokenizer), dtype, {}).to_dict()
    return DataDescription.from_dict(plain | {"version": max(READABLE_VERSIONS)} | values, str(folder / "config.json"))
