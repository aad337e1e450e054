"""Feature maps and all mechanisms, whole and decoding, on the device against float64 copies on the CPU."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.checks.base import DTYPES, Check, compare, moved, rounded, with_gradients
from polysketch import attention
from polysketch.benchmarking.mechanisms import checked_options
from polysketch.feature_maps import GaussianSketch, LearnedSketch

# Networks and norms round at every layer in the working dtype, and the degree multiplies relative errors by four.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}
_CANCELLATION = 3  # gradients of parameters are sums over all tokens that cancel: so many times the error is allowed
_HEADS, _WIDTH, _HIDDEN = 4, 64, 32

_SKETCHES: dict[str, tuple[type, dict[str, Any]]] = {
    "learned": (LearnedSketch, {}),
    "learned, degree 8": (LearnedSketch, {"degree": 8}),
    "learned, per head": (LearnedSketch, {"share": "head", "num_kv_heads": _HEADS}),
    "random": (GaussianSketch, {}),
}
_MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "polynomial": ("polynomial", {}),
    "polysketch learned": ("polysketch", {}),
    "polysketch learned, no local": ("polysketch", {"local_chunk": None}),
    "polysketch random": ("polysketch", {"learned": False}),
    "polysketch gain": ("polysketch", {"prefix_gain": 0.5}),
    "polysketch gate": ("polysketch", {"prefix_gain": 0.5, "decay_gate": True, "hidden_size": _HIDDEN}),
    "llops not negative": ("llops", {"nonnegative": True, "normalize": True}),
    "performer relu": ("performer", {"kind": "relu"}),
    "polarity gate": ("polarity", {"output_gate": True, "hidden_size": _HIDDEN}),
}
_OPTIONS: dict[str, dict[str, Any]] = {"nystrom": {"num_landmarks": 16}, "skyformer": {"num_landmarks": 16}}
"""Of mechanisms that the table above does not name: fewer landmarks than tokens; else the defaults."""

_NAMED = {kind for kind, _ in _MECHANISMS.values()} - {"llops", "performer", "polarity"}
_MECHANISMS |= {name: (name, _OPTIONS.get(name, {})) for name in attention.MECHANISMS if name not in _NAMED}


def checks(quick: bool) -> list[Check]:
    """Every map and mechanism in every dtype, forward and backward, parameters too."""
    length, local = (50, 16) if quick else (600, 128)
    maps = [_sketch_check(name, dtype, length) for name in _SKETCHES for dtype in DTYPES]
    whole = [_mechanism_check(name, dtype, length, local) for name in _MECHANISMS for dtype in DTYPES]
    decoded = [
        _decoding_check(name, dtype, length, local)
        for name, (kind, _) in _MECHANISMS.items()
        for dtype in ("float32", "bfloat16")
        if attention.mechanism_class(kind).is_causal
    ]
    # More rows than one piece of the networks' loop: pieces are larger on a GPU.
    several_pieces = partial(_sketch_errors, "learned", "float32", 300 if quick else 9_000)
    return [*maps, Check("sketch: learned, several pieces, float32", several_pieces, 1e-3), *whole, *decoded]


def compiled_checks(quick: bool) -> list[Check]:
    """A mechanism as one compiled graph."""
    length, local = (50, 16) if quick else (600, 128)
    return [Check("compiled: polysketch, float32", partial(_compiled, length, local), 1e-3)]


def _sketch_check(name: str, dtype: str, length: int) -> Check:
    return Check(f"sketch: {name}, {dtype}", partial(_sketch_errors, name, dtype, length), _TOLERANCES[dtype])


def _mechanism_check(name: str, dtype: str, length: int, local: int) -> Check:
    errors = partial(_mechanism_errors, name, dtype, length, local)
    return Check(f"mechanism: {name}, {dtype}", errors, _TOLERANCES[dtype])


def _decoding_check(name: str, dtype: str, length: int, local: int) -> Check:
    errors = partial(_decoding_errors, name, dtype, length, local)
    return Check(f"decoding: {name}, {dtype}", errors, _TOLERANCES[dtype])


def _sketch_errors(name: str, dtype: str, length: int, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    kind, options = _SKETCHES[name]
    module = kind(_WIDTH, **options)
    inputs = {"x": torch.randn(2, _HEADS, length, _WIDTH, dtype=torch.float64)}
    return _module_errors(module, inputs, DTYPES[dtype], device, call=lambda one, x: one.map_keys(x))


def _mechanism_errors(name: str, dtype: str, length: int, local: int, device: torch.device) -> dict[str, float]:
    module, inputs = _mechanism(name, length, local)
    return _module_errors(module, inputs, DTYPES[dtype], device, call=_attend)


def _attend(module: nn.Module, **given: Tensor) -> Tensor:
    return module(**given, causal=module.is_causal)


@torch.no_grad()
def _decoding_errors(name: str, dtype: str, length: int, local: int, device: torch.device) -> dict[str, float]:
    """Spans and single tokens over a chunk's end, against the float64 copy that is given all tokens at once."""
    module, inputs = _mechanism(name, length, local)
    rough = copy.deepcopy(module).to(DTYPES[dtype])
    exact, inputs = copy.deepcopy(rough).double(), rounded(inputs, DTYPES[dtype])
    spans = [2 * local - 3, 1, 1, 1, 1, 1, length - 2 * local - 2]
    found = _decode(rough.to(device), moved(inputs, device, DTYPES[dtype]), spans)
    return compare({"output": found}, {"output": _decode(exact, inputs, [length])})


def _decode(module: nn.Module, inputs: dict[str, Tensor], spans: list[int]) -> Tensor:
    state, outputs, start = module.init_state(2), [], 0
    for span in spans:
        hidden = inputs["hidden"].narrow(1, start, span)
        query, key, value = (inputs[part].narrow(2, start, span) for part in ("query", "key", "value"))
        output, state = module.extend(query, key, value, state, hidden=hidden)
        outputs.append(output)
        start += span
    return torch.cat(outputs, 2)


def _compiled(length: int, local: int, device: torch.device) -> dict[str, float]:
    """One graph, without breaks; on a CPU the compiler's own back end is left out, for it needs a C++ compiler."""
    module, inputs = _mechanism("polysketch learned", length, local)
    back_end = "inductor" if device.type == "cuda" else "aot_eager"
    call = lambda one, **given: torch.compile(one, fullgraph=True, backend=back_end)(**given)  # noqa: E731
    return _module_errors(module, inputs, torch.float32, device, call=call)


def _mechanism(name: str, length: int, local: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The module and its inputs; with a local part the prefix is given half of the mass where it has a gain."""
    torch.manual_seed(0)
    kind, options = _MECHANISMS[name]
    if kind == "polysketch":
        options = {"local_chunk": local, "prefix_gain": None, **options}
    options = checked_options(kind, options, local)
    module = attention.build(kind, num_heads=_HEADS, head_dim=_WIDTH, num_kv_heads=_HEADS // 2, **options)
    heads = {"query": _HEADS, "key": _HEADS // 2, "value": _HEADS // 2}
    inputs = {part: torch.randn(2, count, length, _WIDTH, dtype=torch.float64) for part, count in heads.items()}
    inputs["hidden"] = torch.randn(2, length, _HIDDEN, dtype=torch.float64)
    if getattr(module, "prefix_gain", None) is not None:
        given = moved(inputs, torch.device("cpu"), torch.float32)
        module.calibrate(given["query"], given["key"], hidden=given["hidden"])
    return module, inputs


def _module_errors(
    module: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype, device: torch.device, *, call: Any
) -> dict[str, float]:
    """Output and gradients of inputs and parameters, against a float64 copy of the rounded module."""
    rough = copy.deepcopy(module).to(dtype)
    exact, inputs = copy.deepcopy(rough).double(), rounded(inputs, dtype)
    found = _run(rough.to(device), moved(inputs, device, dtype), call)
    errors = compare(found, _run(exact, inputs, call))
    summed = {f"gradient of {name}" for name, _ in module.named_parameters()}
    return {name: error / _CANCELLATION if name in summed else error for name, error in errors.items()}


def _run(module: nn.Module, inputs: dict[str, Tensor], call: Any) -> dict[str, Tensor]:
    return with_gradients(lambda **given: {"output": call(module, **given)}, inputs, dict(module.named_parameters()))
