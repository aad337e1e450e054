"""Decoding by a captured graph of the device against plain steps: logits, positions, and tokens of `generate`."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks.base import DTYPES, Check, compare
from polysketch.generation import captured, generate
from polysketch.models import ModelConfig, ModelState, TransformerLM

_VOCABULARY = 257
_LOCAL = 16
_STEPS = 2 * _LOCAL + 5  # chunks are filled on the way, in every row at another step
_PROMPT_LENGTHS = (3, 8, 1, 21)
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
_OPTIONS: dict[str, dict[str, Any]] = {
    "random": {"learned": False},
    "learned": {},
    "gated": {"decay_gate": True, "hidden_size": 128},
}


def checks(quick: bool) -> list[Check]:
    """Polysketch attention with random and learned sketches and with a gate; on CUDA devices alone."""
    return [
        Check(f"captured: polysketch {name}, {dtype}", partial(errors, name, DTYPES[dtype]), _TOLERANCES[dtype], "cuda")
        for name in _OPTIONS
        for dtype in _TOLERANCES
    ]


@torch.inference_mode()
def errors(name: str, dtype: torch.dtype, device: torch.device, local: int | None = _LOCAL) -> dict[str, float]:
    """Twice in one process, for the second graph finds what the first one left.

    Raises:
        RuntimeError: the model's step cannot be captured.
    """
    torch.manual_seed(0)
    options = {**_OPTIONS[name], "local_chunk": local, "sketch_size": 32}
    model = TransformerLM(ModelConfig(_VOCABULARY, 2, 128, 2, attention="polysketch", attention_options=options))
    model = model.to(device, dtype).eval()
    prompts = [[(7 * row + 3 * place) % _VOCABULARY for place in range(n)] for row, n in enumerate(_PROMPT_LENGTHS)]
    found: dict[str, float] = {}
    for turn in ("first", "second"):
        found |= {f"{turn} {what}": error for what, error in _step_errors(model, prompts).items()}
        tokens = [
            generate(model, prompts, max_new_tokens=_STEPS, temperature=0, graph=graph).tokens
            for graph in (True, False)
        ]
        found[f"{turn} tokens"] = 0.0 if tokens[0] == tokens[1] else math.inf
    return found


def _step_errors(model: TransformerLM, prompts: list[list[int]]) -> dict[str, float]:
    device = model.output_bias.device
    plain, state = model.init_state(len(prompts)), model.init_state(len(prompts))
    reason = captured.why_no_graph(model, state)
    if reason is not None:
        raise RuntimeError(reason)
    step = captured.CapturedStep(model, state)
    for each in (plain, state):
        _read(model, prompts, each)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(_VOCABULARY, (_STEPS, len(prompts)), generator=generator).to(device)
    expected = torch.stack([model.extend(ids[:, None], plain)[0][:, -1] for ids in chosen])
    found = torch.stack([step(ids).clone() for ids in chosen])
    return compare({"logits": found}, {"logits": expected}) | {"positions": _position_error(state, plain)}


def _read(model: TransformerLM, prompts: list[list[int]], state: ModelState) -> None:
    """Prompts of several lengths, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    device = model.output_bias.device
    model.extend_hidden(ids.to(device), state, key_mask=mask.to(device))


def _position_error(state: ModelState, plain: ModelState) -> float:
    """0 where host and device agree about every row, in the model's state and in every layer's."""
    expected = [length + _STEPS for length in _PROMPT_LENGTHS]
    parts: list[Any] = [state, *state.layers, plain, *plain.layers]
    held: list[Tensor] = [position for part in parts for position in (part.position, part.device_position)]
    return 0.0 if all(position.tolist() == expected for position in held) else math.inf
