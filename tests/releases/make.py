"""The small folder of a release: `python tests/releases/make.py` writes tests/releases/VERSION, which is committed.

It holds a file of every kind that this release writes, and `expected.json` with what came of each: losses, tokens,
outputs. `test_releases.py` opens the folders of all releases by today's code. A folder of a release that is out is
never made again.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import polysketch
from polysketch import attention, ops
from polysketch.cli import main
from polysketch.generation import generate
from polysketch.models.presets import PRESETS
from polysketch.training import load_model

PRESET = "of-the-releases"
SIZES = {"vocab_size": 257, "num_layers": 2, "hidden_size": 8, "num_heads": 1, "feedforward_size": 16}
AROUND = {"projection_convolution": 4, "query_key_norm": True, "input_positions": False}
STOPPED, STEPS = 200, 208
PROMPT, NEW_TOKENS = "the fox 7 and the ", 16
CLEAR = 0.05  # of logits: another machine's rounding changes no token whose lead is this large

_SHARED = f"--preset {PRESET} --batch-size 4 --log-every 8 --device cpu --dtype float32 --no-tensorboard --no-keep-best"
_ONE_CHECKPOINT = "--save-every 100 --keep 1"
_PATTERN = (
    "--attention polysketch,sliding-window --attention-options polysketch.sketch_size=4 polysketch.window=8 "
    "sliding-window.window=8"
)
_CONVERTED = "--attention polysketch --attention-options sketch_size=4 window=8"
RESUMED = f"--steps {STEPS} --save-every {STOPPED} --keep 2 --eval-every {STEPS} --eval-tokens 500"
STUDY = "reversal --size smoke --only softmax --set steps=2 --out studies"
COMMANDS = (
    "prepare text --tokenizer bpe:280 --out prepared --no-progress --validation-share 0.2 --test-share 0.1",
    f"train --data prepared --out run {_SHARED} {_PATTERN} --context 64 --learning-rate 0.02 {RESUMED}",
    f"export run exported --checkpoint step-{STOPPED:08d}",
    "task reversal --set length=8 --set examples=64 --out task",
    f"train --data task --out task-run {_SHARED} --layers 1 --attention softmax --steps 2 --eval-every 2 "
    f"--eval-tokens 500 {_ONE_CHECKPOINT}",
    f"convert llama --data prepared --out converted {_CONVERTED} --context 32 --batch-size 2 --transfer-steps 2 "
    f"--tuning-steps 2 --eval-tokens 400 --device cpu --dtype float32 {_ONE_CHECKPOINT}",
    f"study {STUDY}",
)


def write_release(folder: Path) -> None:
    """Write the folder of today's version.

    Args:
        folder: new.

    Raises:
        FileExistsError: it is there.
        RuntimeError: a command failed, or tokens whose lead is not clear.
    """
    if folder.exists():
        raise FileExistsError(f"expected no folder yet, found {folder}: that of a release is never made again")
    with tempfile.TemporaryDirectory(prefix="polysketch-") as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        os.chdir(made)
        _write_parts()
        os.chdir(temporary)
        shutil.copytree(made, folder)


def _write_parts() -> None:
    PRESETS[PRESET] = {**SIZES, **AROUND}
    _write_text(Path("text"))
    _run(COMMANDS[0])
    _write_llama(Path("llama"))
    for command in COMMANDS[1:]:
        _run(command)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    after = [line for line in lines if line["kind"] == "train" and line["step"] > STOPPED]
    shutil.rmtree(f"run/checkpoints/step-{STEPS:08d}")  # as it is when a run is killed before its last save
    expected = {
        "preset": {"name": PRESET, "sizes": PRESETS[PRESET]},
        "train": {"stopped": STOPPED, "steps": STEPS, "losses": {line["step"]: line["loss"] for line in after}},
        "figures": {name: _figures(name) for name in ("run", "exported", "task-run", "converted/model")},
        "generated": _generated(),
        "logits": _logits(),
        "mechanisms": _write_mechanisms(Path("mechanisms.safetensors")),
        "study": STUDY,
    }
    _write_state(Path("state.safetensors"), Path("continued.safetensors"))
    Path("expected.json").write_text(json.dumps(expected) + "\n")
    for path in (Path("text"), Path("llama"), *Path().glob("studies/*/softmax-*")):
        shutil.rmtree(path)
    for path in (*Path().rglob("*.png"), *Path().rglob("lock")):
        path.unlink()


def _run(command: str) -> None:
    if main(command.split()):
        raise RuntimeError(f"failed: polysketch {command}")


def _write_text(folder: Path) -> None:
    folder.mkdir()
    for number in range(40):
        text = f"the fox {number} and the hare met, and the fox said to the hare: good day {number}. " * 3
        (folder / f"{number}.txt").write_text(text)


def _write_llama(folder: Path) -> None:
    """A small softmax model, for `convert`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    vocabulary = json.loads(Path("prepared/description.json").read_text())["tokenizer"]["vocab_size"]
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    more = {"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes, **more)).save_pretrained(folder)


def _figures(model: str) -> dict[str, Any]:
    """What `evaluate` measures: losses, counts and shares; no times."""
    _run(f"evaluate {model} --device cpu --out figures.json --data {'task' if model == 'task-run' else 'prepared'}")
    figures = json.loads(Path("figures.json").read_text())["figures"]
    Path("figures.json").unlink()
    return {name: value for name, value in figures.items() if isinstance(value, int | float) and "second" not in name}


def _generated() -> dict[str, Any]:
    """The most probable tokens after a prompt, every one of a clear lead."""
    model, described = load_model("run")
    prompt = described.tokenizer.encode(PROMPT)
    tokens = generate(model, [prompt], max_new_tokens=NEW_TOKENS, temperature=0.0).tokens[0]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
    first, second = logits.topk(2).values.T
    if (first - second).min() < CLEAR:
        raise RuntimeError(f"expected tokens of a clear lead, found one of {float((first - second).min()):.3f}")
    return {"prompt": prompt, "tokens": list(map(int, tokens)), "text": described.tokenizer.decode(tokens)}


def _logits() -> dict[str, Any]:
    """Those of the exported model, in transformers, of the last token of the prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import polysketch.integrations.huggingface  # noqa: F401 - makes transformers know the model

    ids = AutoTokenizer.from_pretrained("exported")(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained("exported")(ids).logits[0, -1]
    return {"prompt": PROMPT, "ids": ids[0].tolist(), "last": logits.tolist()}


def examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """A name and options for every mechanism, small where the defaults are large."""
    small = {"polysketch-paper": {"sketch_size": 4, "local_chunk": 8}, "polysketch-heavy": {"sketch_size": 4}}
    small |= {name: {"num_features": 8} for name in ("performer", "llops")}
    small |= {name: {"num_landmarks": 4} for name in ("nystrom", "skyformer")}
    for name in attention.MECHANISMS:
        hidden = {"hidden_size": 6} if "hidden_size" in attention.option_names(name) else {}
        yield name, {**attention.mechanism_class(name).examples[0], **small.get(name, {}), **hidden}


def _write_mechanisms(path: Path) -> list[dict[str, Any]]:
    """The weights of every mechanism and what it makes of the same inputs; returns how each was built."""
    torch.manual_seed(0)
    inputs = {name: torch.randn(1, 2, 16, 4) for name in ("query", "key", "value")}
    inputs["hidden"] = torch.randn(1, 16, 6)
    tensors, built = {f"input/{name}": tensor for name, tensor in inputs.items()}, []
    for name, options in examples():
        mechanism = attention.build(name, num_heads=2, head_dim=4, **options).eval()
        built.append({"name": name, "options": options, "causal": mechanism.is_causal})
        tensors |= {f"{name}/weight/{key}": value.clone() for key, value in mechanism.state_dict().items()}
        with torch.no_grad():
            tensors[f"{name}/output"] = mechanism(**inputs, causal=mechanism.is_causal).clone()
    save_file(tensors, path)
    return built


def state_call(inputs: dict[str, torch.Tensor], first: int, last: int, **more: Any) -> ops.LinearAttentionResult:
    """`ops.linear_attention` of tokens first to last: power 2, decay, and chunks of four that are exact."""
    part = {name: tensor[:, :, first:last] for name, tensor in inputs.items()}
    local = ops.LocalPolynomial(part["query"], part["key"], 4, 4)
    return ops.linear_attention(
        part["query"],
        part["key"],
        part["value"],
        power=2,
        causal=True,
        offset=1.0,
        local=local,
        log_decay=part["log_decay"],
        **more,
    )


def _write_state(state: Path, continued: Path) -> None:
    """A state after ten tokens, and the inputs and outputs of the ten that come then."""
    torch.manual_seed(0)
    inputs = {name: torch.randn(1, 2, 20, 4) for name in ("query", "key", "value")}
    inputs["log_decay"] = -torch.rand(1, 2, 20)
    begun = state_call(inputs, 0, 10, return_state=True)
    begun.state.save(state)
    output = state_call(inputs, 10, 20, state=begun.state).output
    save_file({**inputs, "output": output.clone()}, continued)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        raise SystemExit(__doc__)
    write_release(Path(__file__).resolve().parent / polysketch.__version__)
