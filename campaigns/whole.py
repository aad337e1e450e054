"""Small folders and files as the library writes them, and how they are read, with all that is checked then."""

import contextlib
import functools
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from polysketch import ops
from polysketch.data import PreparedData
from polysketch.generation import load_conversation, save_conversation
from polysketch.integrations.transformers_folder import load_transformers
from polysketch.models import PRESETS, ModelConfig, TransformerLM
from polysketch.models.fingerprint import tensors_sha256, weights_sha256
from polysketch.training import load_model
from polysketch.training.checkpoint import list_checkpoints, load_checkpoint, require_bound
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import RunFolder
from polysketch.training.verification import verify


def read_prepared(folder: Path) -> object:
    """As `polysketch train` and `evaluate` do."""
    data = PreparedData.open(folder)
    data.verify()
    tokens = {name: hashlib.sha256(data.split(name).tokens.tobytes()).hexdigest() for name in data.description.splits}
    return data.description, data.tokenizer.sha256, tokens


def read_run(folder: Path) -> object:
    """As `polysketch generate` does, as `--resume` does of every checkpoint, and as `verify` does of metrics."""
    model, description = load_model(folder)
    run = RunFolder(folder)
    whole = []
    for path in list_checkpoints(run.checkpoints):
        found = load_checkpoint(path)
        require_bound(path, found.state, run.identity())
        whole.append((tensors_sha256({**found.model, **found.optimizer, **found.random}), dict(found.state)))
    metrics = MetricsFile(run.metrics)
    if metrics.damaged():
        raise ValueError(f"{run.metrics}: damaged lines")
    seen = weights_sha256(model), model.config.to_dict(), description.tokenizer.sha256, whole, run.read_config()
    return *seen, metrics.read()


def read_verified(folder: Path) -> object:
    """As `polysketch verify` does, its first problem as a refusal."""
    found = verify(folder)
    if found.problems:
        raise ValueError(found.problems[0])
    return found


def read_exported(folder: Path) -> object:
    """As `polysketch evaluate` does, and as `import` does into a new folder, whose run is read."""
    from polysketch.integrations.huggingface import import_model  # of an extra, which others do without

    model, tokenizer = load_transformers(folder)
    seen = weights_sha256(model), model.config.to_dict(), tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template
    generation = model.generation_config.to_dict()
    with tempfile.TemporaryDirectory() as new:
        imported, description = load_model(import_model(folder, Path(new) / "run"))
        back = weights_sha256(imported), imported.config.to_dict(), description.tokenizer.sha256, description.step
    return *seen, generation, back


def read_state(folder: Path) -> object:
    """A state of linear attention."""
    state = ops.LinearAttentionState.load(folder / "state.safetensors")
    return tensors_sha256(state.tensors()), state.power, state.factors


@functools.cache
def small_model() -> TransformerLM:
    """The model of the conversation, which no reader changes."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=40, num_layers=1, hidden_size=32, num_heads=1, attention="linear")
    return TransformerLM(config).eval()


def read_talk(folder: Path) -> object:
    """A conversation."""
    tokens, state = load_conversation(folder / "talk.safetensors", small_model())
    return tokens, state.position.tolist()


def write_state(folder: Path) -> None:
    """A state of linear attention with the tokens of an open chunk."""
    folder.mkdir(parents=True)
    feature = torch.rand(1, 2, 21, 8, generator=torch.Generator().manual_seed(0))
    local = ops.LocalPolynomial(feature, feature, 2, 8)
    result = ops.linear_attention(feature, feature, feature, power=2, local=local, causal=True, return_state=True)
    assert result.state is not None
    result.state.save(folder / "state.safetensors")


def write_talk(folder: Path) -> None:
    """A conversation of nine tokens."""
    folder.mkdir(parents=True)
    model = small_model()
    with torch.inference_mode():
        state = model.extend(torch.arange(9)[None], model.init_state(1))[1]
    save_conversation(folder / "talk.safetensors", model, list(range(9)), state)


@contextlib.contextmanager
def tiny_means(hidden_size: int) -> Iterator[None]:
    """Models of the preset "tiny" are of one head and so wide inside."""
    with mock.patch.dict(PRESETS, {"tiny": {**PRESETS["tiny"], "hidden_size": hidden_size, "num_heads": 1}}):
        yield
