"""`linear_attention` and `linear_attention_extend_` against the reference backend in float64 on the CPU."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks.base import DTYPES, Check, compare, moved, rounded, with_gradients
from polysketch import ops
from polysketch.ops.linear.api import BACKENDS
from polysketch.ops.linear.tiles import symmetrize

# Measured on a CPU: 2e-6, 3e-3 and 4e-4; a wrong algorithm is off by far more than any of these.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
OFFSET = 1.0
DEGREE = 4


@dataclass(frozen=True)
class Case:
    """A call of linear attention; with `history` tokens before it in a state."""

    power: int = 2
    local: int = 64
    causal: bool = True
    normalize: bool = True
    decays: bool = False
    padded: bool = False
    history: int = 0
    length: int = 211
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    features: int = 32
    head_dim: int = 64

    @property
    def name(self) -> str:
        """What differs from the ordinary case."""
        parts = [f"power {self.power}", f"local {self.local}" if self.local else "no local"]
        flags = {"not causal": not self.causal, "not normalized": not self.normalize, "decay": self.decays}
        flags |= {"mask": self.padded, "state": self.history > 0}
        return ", ".join([*parts, *(name for name, is_set in flags.items() if is_set), f"n={self.length}"])


def checks(quick: bool) -> list[Check]:
    """Power x local x (plain, decay, mask, state, all of them), and a few more; every dtype, forward and backward."""
    cases = [small(case) for case in _cases()] if quick else _cases()
    forward = [_check(case, dtype) for case in cases for dtype in DTYPES]
    decoding = [_extend_check(case, dtype) for case in cases if case.causal and case.normalize for dtype in DTYPES]
    longest = small(Case(length=4_095)) if quick else Case(length=4_095, local=256)
    return [*forward, *decoding, Check(f"linear twice: {longest.name}", partial(_twice, longest), 1e-6)]


def prefix_share(case: Case) -> float:
    """Share of the attention mass that sketched weights hold in a case's inputs: near 0 or 1 a check would be blind."""
    case = replace(case, history=0, normalize=False)
    tensors, mask, _ = inputs(case, torch.float64)
    tensors["value"] = torch.ones_like(tensors["value"])
    everything = attend(case, mask, "reference", **tensors)["output"].sum()
    tensors["query"] = torch.zeros_like(tensors["query"])
    return float(1 - attend(case, mask, "reference", **tensors)["output"].sum() / everything)


def _cases() -> list[Case]:
    plain = [Case(power=power, local=local) for power in (1, 2) for local in (64, 0)]
    changes: list[dict[str, Any]] = [{}, {"decays": True}, {"padded": True}, {"history": 100}]
    changes.append({"decays": True, "padded": True, "history": 100})
    product = [replace(case, **change) for case in plain for change in changes]
    others = [Case(causal=False, padded=True), Case(causal=False, local=0), Case(normalize=False), Case(features=20)]
    return [*product, *others, Case(length=1), Case(length=800, local=256, features=64)]


def small(case: Case) -> Case:
    """The same for a CPU in a hurry."""
    length = min(case.length, 71)
    return replace(case, length=length, local=min(case.local, 16), history=min(case.history, 21), head_dim=16)


def _check(case: Case, dtype: str) -> Check:
    return Check(f"linear: {case.name}, {dtype}", partial(_errors, case, DTYPES[dtype]), TOLERANCES[dtype])


def _extend_check(case: Case, dtype: str) -> Check:
    name = f"extend_: {case.name}, {dtype}"
    return Check(name, partial(_extend_errors, case, DTYPES[dtype]), TOLERANCES[dtype])


def _errors(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    tensors, mask, state = inputs(case, dtype)
    expected = with_gradients(partial(attend, case, mask, "reference"), {**tensors, **state})
    on_device = moved(tensors, device, dtype) | moved(state, device, torch.float32)
    mask = None if mask is None else mask.to(device)
    errors: dict[str, float] = {}
    for backend in backends_for(on_device["query"]):
        found = with_gradients(partial(attend, case, mask, backend), on_device)
        pairs = compare(_symmetric(case, found), _symmetric(case, expected))
        errors |= {f"{backend}: {name}": error for name, error in pairs.items()}
    return errors


def _symmetric(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums as every state has them, and their gradients: a backend may keep nothing else of x_a x_b and x_b x_a."""
    if case.power == 1:
        return tensors

    def symmetric(name: str, tensor: Tensor) -> Tensor:
        if not name.endswith(("state_sums", "state_normalizer")):
            return tensor
        columns = tensor if name.endswith("sums") else tensor[..., None]
        return symmetrize(columns, case.features).reshape(tensor.shape)

    return {name: symmetric(name, tensor) for name, tensor in tensors.items()}


def backends_for(query: Tensor) -> list[str]:
    """Those that run on tensors like this one, but for the reference: "chunked", and what is compiled."""
    return [name for name in BACKENDS if name != "reference" and _runs(name, query)]


def _runs(name: str, query: Tensor) -> bool:
    try:
        ops.linear_attention_backend(query, query, backend=name)
    except RuntimeError:
        return False
    return True


def _extend_errors(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Output and final state of `extend_` over uneven spans, single tokens among them."""
    tensors, mask, state = inputs(case, dtype)
    expected = attend(case, mask, "reference", return_state=True, **tensors, **state)
    found_state = _empty_state(case, device)
    if state:
        found_state.copy_(_state(case, {name: tensor.to(device) for name, tensor in state.items()}, case.history))
    on_device, mask = moved(tensors, device, dtype), None if mask is None else mask.to(device)
    outputs, start = [], 0
    for span in (1, 2, 1, case.length // 3, case.length):
        part = slice(start, min(case.length, start + span))
        if part.start < part.stop:
            outputs.append(_extend(case, on_device, mask, part, found_state))
        start += span
    found = {"output": torch.cat(outputs, 2)} | _named_state(found_state)
    return compare(found, expected)


def _twice(case: Case, device: torch.device) -> dict[str, float]:
    """The same call twice: an error that moves is a race."""
    tensors = moved(inputs(case, torch.float32)[0], device, torch.float32)
    errors: dict[str, float] = {}
    for backend in backends_for(tensors["query"]):
        call = partial(attend, case, None, backend)
        errors[backend] = max(compare(with_gradients(call, tensors), with_gradients(call, tensors)).values())
    return errors


def attend(
    case: Case, mask: Tensor | None, backend: str, return_state: bool = False, **tensors: Tensor
) -> dict[str, Tensor]:
    """Output and, where asked for or where there is a history, the state after the last token."""
    state = {name: tensor for name, tensor in tensors.items() if name.startswith("state_")}
    return_state = return_state or bool(state)
    result = ops.linear_attention(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        **_options(case, tensors),
        causal=case.causal,
        key_mask=mask,
        state=_state(case, state, case.history) if state else None,
        return_state=return_state,
        backend=backend,
    )
    return {"output": result.output} | (_named_state(result.state) if return_state else {})


def _extend(
    case: Case, tensors: dict[str, Tensor], mask: Tensor | None, part: slice, state: ops.LinearAttentionState
) -> Tensor:
    here = {name: tensor[:, :, part] for name, tensor in tensors.items()}
    return ops.linear_attention_extend_(
        here["query"],
        here["key"],
        here["value"],
        state,
        key_mask=None if mask is None else mask[:, part],
        **_options(case, here),
    )


def _options(case: Case, tensors: dict[str, Tensor]) -> dict[str, Any]:
    local = None
    if case.local:
        local = ops.LocalPolynomial(tensors["local_query"], tensors["local_key"], DEGREE, case.local)
    decay = tensors.get("log_decay")
    return {
        "power": case.power,
        "offset": OFFSET,
        "normalize": case.normalize,
        "local": local,
        "log_decay": decay,
    }


def inputs(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor | None, dict[str, Tensor]]:
    """Tensors in float64, the mask, and the state after the history; sketched and exact weights of like size."""
    generator = torch.Generator().manual_seed(0)
    tensors = rounded(_random(case, case.length, generator), dtype)
    state: dict[str, Tensor] = {}
    if case.history:
        before = _random(replace(case, padded=False), case.history, generator)
        fresh = replace(case, history=0)
        state = attend(fresh, None, "reference", return_state=True, **before)
        state = {name: tensor.float().double() for name, tensor in state.items() if name != "output"}
    return tensors, _mask(case, generator) if case.padded else None, state


def _random(case: Case, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(case.batch, heads, length, width, generator=generator, dtype=torch.float64)

    tensors = {
        "query": normal(case.heads, case.features).abs() / case.features**0.5,
        "key": normal(case.key_heads, case.features).abs() / case.features**0.5,
        "value": normal(case.key_heads, case.head_dim),
    }
    if case.local:
        chunks = max(1.0, length / (2 * case.local))  # sketched keys are that many times as many as exact ones
        mean_weight = (2 / torch.pi) ** case.power * chunks
        tensors["local_query"] = normal(case.heads, case.head_dim) * (mean_weight / 3) ** (1 / DEGREE)
        tensors["local_key"] = normal(case.key_heads, case.head_dim) / case.head_dim**0.5
    if case.decays:
        uniform = torch.rand(case.batch, case.key_heads, length, generator=generator, dtype=torch.float64)
        tensors["log_decay"] = -0.01 * uniform
    return tensors


def _mask(case: Case, generator: torch.Generator) -> Tensor:
    """Some tokens masked everywhere, the first third of row 0 padding."""
    mask = torch.rand(case.batch, case.length, generator=generator) > 0.2
    mask[0, : case.length // 3] = False
    mask[:, case.length // 3] = True
    return mask


def _empty_state(case: Case, device: torch.device) -> ops.LinearAttentionState:
    return ops.LinearAttentionState.init(
        case.batch,
        case.key_heads,
        case.features,
        case.head_dim,
        power=case.power,
        local_chunk=case.local,
        local_dim=case.head_dim if case.local else 0,
        device=device,
    )


def _named_state(state: ops.LinearAttentionState) -> dict[str, Tensor]:
    named = state.tensors().items()
    return {f"state_{name}": tensor for name, tensor in named if name != "position" and tensor.numel()}


def _state(case: Case, tensors: dict[str, Tensor], position: int) -> ops.LinearAttentionState:
    """A state of these tensors; the empty ones, where there is no local part, are made here."""
    like = next(iter(tensors.values()))
    empty = _empty_state(case, like.device)
    given = {name.removeprefix("state_"): tensor for name, tensor in tensors.items()}
    absent = {name: tensor.to(like.dtype) for name, tensor in empty.tensors().items() if name not in given}
    absent["position"] = torch.full((case.batch,), position, dtype=torch.int64)
    return ops.LinearAttentionState(**given, **absent, power=case.power)
