"""The language model on the device: against float64 on the CPU, against its own decoding, and one autocast step."""

import copy
import math
from functools import partial

import torch
from torch import Tensor

from benchmarks.checks.base import Check, compare
from polysketch.attention import MECHANISMS, option_names
from polysketch.benchmarking.agreement import relative_error
from polysketch.models import ModelConfig, TransformerLM

_VOCABULARY = 257
_DEVICE_TOLERANCE = 1e-3
_AUTOCAST_TOLERANCE = 1e-2


def checks(quick: bool) -> list[Check]:
    """For every causal mechanism: forward and gradients, forward against extend, a training step under autocast."""
    length, local = (50, 16) if quick else (500, 128)
    kinds = {"forward": _forward_errors, "extend": _extend_errors, "autocast step": _autocast_errors}
    return [
        Check(f"model {kind}: {name}", partial(errors, name, length, local), _tolerance(kind))
        for kind, errors in kinds.items()
        for name, mechanism in MECHANISMS.items()
        if mechanism.is_causal
    ]


def _tolerance(kind: str) -> float:
    return _AUTOCAST_TOLERANCE if kind == "autocast step" else _DEVICE_TOLERANCE


def _model(name: str, local: int) -> TransformerLM:
    """Two layers of two heads of 64, every mechanism with a local part given a small one."""
    torch.manual_seed(0)
    options = {"local_chunk": local} if "local_chunk" in option_names(name) else {}
    return TransformerLM(ModelConfig(_VOCABULARY, 2, 128, 2, attention=name, attention_options=options))


def _ids(length: int) -> Tensor:
    return torch.randint(_VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))


def _forward_errors(name: str, length: int, local: int, device: torch.device) -> dict[str, float]:
    model, ids = _model(name, local), _ids(length)
    exact = copy.deepcopy(model).double()
    return compare(_loss_and_gradients(model.to(device), ids.to(device)), _loss_and_gradients(exact, ids))


def _loss_and_gradients(model: TransformerLM, ids: Tensor) -> dict[str, Tensor]:
    loss = model.loss(ids)
    loss.backward()
    gradients = {f"gradient of {name}": weight.grad for name, weight in model.named_parameters()}
    with torch.no_grad():
        return {"logits": model(ids), "loss": loss.detach(), **gradients}


@torch.no_grad()
def _extend_errors(name: str, length: int, local: int, device: torch.device) -> dict[str, float]:
    """Logits of uneven spans, single tokens among them, against those of the whole sequence at once."""
    model, ids = _model(name, local).to(device), _ids(length).to(device)
    state = model.init_state(ids.shape[0])
    pieces = ids.split([1, 1, length // 3, 1, length - length // 3 - 3], dim=1)
    logits = torch.cat([model.extend(piece, state)[0] for piece in pieces], 1)
    return compare({"logits": logits}, {"logits": model(ids)})


def _autocast_errors(name: str, length: int, local: int, device: torch.device) -> dict[str, float]:
    """The bfloat16 loss beside the float32 one; gradients and the loss after an update finite, and lower."""
    model, ids = _model(name, local).to(device), _ids(length).to(device)
    with torch.no_grad():
        expected = model.loss(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model.loss(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    learned = all(bool(weight.grad.isfinite().all()) for weight in model.parameters()) and losses[1] < losses[0]
    return {"loss": relative_error(losses[0], expected), "learning": 0.0 if learned else math.inf}
