"""One byte changed anywhere in what the library wrote: found by the command that reads it, or without effect.

    python -m campaigns.bytes --count 2000 --seed 0

The folders are a prepared one, a run with its checkpoints, and the files of a state and of a conversation. An attack
picks a file, a byte and a bit, and reads the folder as commands do. What is a fault: anything read that differs from
what was written, or an error that would be a traceback. Not attacked: the lock, plots, and metrics, whose digits carry
no sum.
"""

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from campaigns.harness import REFUSALS, Found, main, prepare_text, run_of, write_text
from polysketch import ops
from polysketch.data import PreparedData
from polysketch.generation import load_conversation, save_conversation
from polysketch.models import ModelConfig, TransformerLM
from polysketch.models.fingerprint import tensors_sha256, weights_sha256
from polysketch.training import load_model
from polysketch.training.checkpoint import list_checkpoints, load_checkpoint, require_bound
from polysketch.training.run_folder import RunFolder

_NOT_READ = ("lock", "metrics.jsonl", "loss.png")


def read_prepared(folder: Path) -> object:
    """As `polysketch train` and `evaluate` do."""
    data = PreparedData.open(folder)
    data.verify()
    tokens = {name: hashlib.sha256(data.split(name).tokens.tobytes()).hexdigest() for name in data.description.splits}
    return data.description, data.tokenizer.sha256, tokens


def read_run(folder: Path) -> object:
    """As `polysketch generate` does, and as `--resume` does of every checkpoint."""
    model, description = load_model(folder)
    run = RunFolder(folder)
    whole = []
    for path in list_checkpoints(run.checkpoints):
        found = load_checkpoint(path)
        require_bound(path, found.state, run.identity())
        whole.append((tensors_sha256({**found.model, **found.optimizer, **found.random}), dict(found.state)))
    return weights_sha256(model), model.config.to_dict(), description.tokenizer.sha256, whole, run.read_config()


def read_state(folder: Path) -> object:
    """A state of linear attention."""
    state = ops.LinearAttentionState.load(folder / "state.safetensors")
    return tensors_sha256(state.tensors()), state.power, state.factors


def small_model() -> TransformerLM:
    """The model of the conversation."""
    torch.manual_seed(0)
    return TransformerLM(ModelConfig(vocab_size=40, num_layers=1, hidden_size=32, num_heads=1, attention="linear"))


def read_talk(folder: Path) -> object:
    """A conversation."""
    tokens, state = load_conversation(folder / "talk.safetensors", small_model().eval())
    return tokens, state.position.tolist()


READERS: dict[str, Callable[[Path], object]] = {
    "prepared": read_prepared,
    "run": read_run,
    "state": read_state,
    "talk": read_talk,
}


def write_all(folder: Path) -> None:
    """What is attacked, a folder for each reader."""
    data = prepare_text(write_text(folder / "text"), folder / "prepared")
    run_of(data, folder / "run", steps=2, eval_every=0)
    for name in ("state", "talk"):
        (folder / name).mkdir()
    feature = torch.rand(1, 2, 21, 8, generator=torch.Generator().manual_seed(0))
    local = ops.LocalPolynomial(feature, feature, 2, 8)
    result = ops.linear_attention(feature, feature, feature, power=2, local=local, causal=True, return_state=True)
    assert result.state is not None
    result.state.save(folder / "state" / "state.safetensors")
    model = small_model().eval()
    with torch.inference_mode():
        state = model.extend(torch.arange(9)[None], model.init_state(1))[1]
    save_conversation(folder / "talk" / "talk.safetensors", model, list(range(9)), state)


def attack(folder: Path, draw: random.Random, wanted: dict[str, object], found: Found) -> None:
    """Change one bit, read, and change it back."""
    kind = draw.choice(list(READERS))
    files = sorted(path for path in (folder / kind).rglob("*") if path.is_file() and path.name not in _NOT_READ)
    path = draw.choice(files)
    content = path.read_bytes()
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
    name = f"{path.relative_to(folder)} byte {place} bit {bit}"
    try:
        same = READERS[kind](folder / kind) == wanted[kind]
        found.add(name, "without effect" if same else "used silently", is_fault=not same)
    except REFUSALS:
        found.add(name, "refused")
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        found.add(name, f"traceback of {type(error).__name__}", is_fault=True)
    finally:
        path.write_bytes(content)


def campaign(count: int, seed: int, folder: Path) -> Found:
    """So many changed bytes."""
    write_all(folder)
    wanted = {kind: read(folder / kind) for kind, read in READERS.items()}
    draw, found = random.Random(seed), Found()
    for _ in range(count):
        attack(folder, draw, wanted, found)
    for kind, read in READERS.items():  # what is whole must not be refused
        if read(folder / kind) != wanted[kind]:
            found.add(kind, "differs though it is whole", is_fault=True)
    return found


def run(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return main(campaign, __doc__, 2000, argv)


if __name__ == "__main__":
    sys.exit(run())
