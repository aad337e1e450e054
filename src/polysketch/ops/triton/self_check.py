"""Programs that this machine has not run yet are compared once with plain PyTorch before "auto" takes them.

The first call with new widths and options makes a small input of its own, runs both, and keeps the answer in the user's
cache folder: for the same device, driver, Triton, PyTorch and source of the programs it is not asked again. Most of the
time is what the call would need anyway, compiling. Where they disagree a warning gives the figures, and "auto" takes
plain PyTorch from then on: for this process alone where something but Triton raised an error. A backend that is asked
for by its name is never checked.
"""

import contextlib
import json
import math
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.compiling import asked_once
from polysketch.ops.triton import assembler, provenance
from polysketch.ops.triton.launch import precision
from polysketch.user_cache import user_cache

TOLERANCES = {"ieee": 1e-3, "tf32": 2e-2, "bfloat16": 5e-2}
"""Largest relative error of an output by what products are made of; gradients may have four times as much.

Rounding makes a tenth of that. What is broken is off by far more.
"""
_GRADIENTS = 4.0
_Run = Callable[..., Tensor]
_answers: dict[tuple[str, str], bool] = {}
"""(device, call) -> whether the programs agreed: what this process has asked already."""
_lock = threading.Lock()


def passed(op: str, like: Tensor, call: Mapping[str, Any], attempt: Callable[[bool], Mapping[str, float]]) -> bool:
    """Whether the programs may be taken for calls like this one.

    Args:
        op: its name.
        like: a tensor of the call: its device and dtype.
        call: widths and options that make another program; never lengths.
        attempt: (whether gradients are wanted) -> errors as `disagreements` gives them, 1 is what is allowed.

    Nothing is tried while a compiler traces, a graph is captured or a backward pass runs: what is known then decides.

    Cost: a dictionary's look-up, after the first call.
    """
    named = [f"{name}={value}" for name, value in call.items()]
    asked = " ".join([op, str(like.dtype).removeprefix("torch."), *named])
    if torch.compiler.is_compiling():
        return not known_bad(str(like.device), asked)
    if type(like) is not Tensor or like.is_meta:
        return True  # somebody traces: there is nothing to run
    backward, device = torch.is_grad_enabled(), str(like.device)
    key = f"{asked} products={_products(like.dtype)} backward="
    answer = _answers.get((device, f"{key}{backward}"))
    again = answer is None and _in_a_backward_pass()
    if again:  # recomputation, of a forward pass that was perhaps without gradients
        answer = _answers.get((device, f"{key}{False}"))
    if answer is not None:
        return answer
    if again or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return not known_bad(device, asked)
    with _lock:
        return _ask(like.device, f"{key}{backward}", lambda: attempt(backward))


def _in_a_backward_pass() -> bool:
    """Whether PyTorch's engine calls this. A device has one thread of the engine's: a check of gradients would wait for
    it, and it for the check.
    """
    number = getattr(torch._C, "_current_graph_task_id", None)  # not public; without it nothing is known
    return number is not None and number() != -1


def disagreements(
    run: _Run, definition: _Run, inputs: Mapping[str, Tensor], like: Tensor, *, backward: bool
) -> dict[str, float]:
    """Errors of `run` in the dtype of a tensor against `definition` in float64, both on its device; 1 is allowed.

    Args:
        run, definition: give the output, of tensors by the names of `inputs`.
        inputs: in float64 on the CPU.
    """
    rounded = {name: tensor.to(like.dtype) for name, tensor in inputs.items()}
    found = _results(run, {name: tensor.to(like.device) for name, tensor in rounded.items()}, backward)
    expected = _results(
        definition, {name: tensor.to(like.device).double() for name, tensor in rounded.items()}, backward
    )
    allowed = TOLERANCES[_products(like.dtype)]
    factors = [1.0] + [_GRADIENTS] * len(inputs)
    names = ["output", *(f"gradient of {name}" for name in inputs)]
    return {
        name: _error(one, other) / (allowed * factor)
        for name, factor, one, other in zip(names, factors, found, expected, strict=False)
    }


def random_inputs(**shapes: Sequence[int]) -> dict[str, Tensor]:
    """Seeded normal numbers in float64 on the CPU; no generator of the user's is touched."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def _products(dtype: torch.dtype) -> str:
    return "bfloat16" if dtype == torch.bfloat16 else precision(dtype)


def _results(run: _Run, tensors: Mapping[str, Tensor], backward: bool) -> list[Tensor]:
    if not backward:
        with torch.no_grad():
            return [run(**tensors)]
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    output = run(**leaves)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(tuple(output.shape), generator=generator, dtype=torch.float64, device="cpu")
    cotangent = drawn.to(output.device, output.dtype)
    return [output.detach(), *torch.autograd.grad(output, list(leaves.values()), cotangent)]


def _error(found: Tensor, expected: Tensor) -> float:
    error = float((found.double() - expected).norm() / expected.norm().clamp(min=1e-12))
    return error if math.isfinite(error) else math.inf


def _ask(device: torch.device, key: str, attempt: Callable[[], Mapping[str, float]]) -> bool:
    """Out of the file, or by trying; said where the answer is no."""
    kept, lasting = _kept(device), True
    errors = kept.get(key)
    if errors is None:
        try:
            errors = {name: _number(error) for name, error in _apart(attempt).items()}
        except torch.OutOfMemoryError:
            return True  # says nothing about the programs; the next call asks again
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises: the call itself goes on without
            errors = {f"{type(error).__name__}: {error}".splitlines()[0][:200]: "raised"}
            # A C compiler that is missing, or an earlier program's fault that shows now, says nothing of later days.
            lasting = type(error).__module__.startswith("triton.")
        if lasting:
            _keep(device, {**kept, key: errors})
    wrong = _wrong(errors)
    _answers[str(device), key] = not wrong
    if wrong:
        warnings.warn(
            f"programs in Triton disagree with plain PyTorch, which is used instead, on"
            f" {provenance.device_name(device)}: {key}; errors over what is allowed: {wrong}."
            f" {f'Kept in {_file()}' if lasting else 'The next process asks again'}",
            stacklevel=2,
        )
    return not wrong


def _apart(attempt: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    """In a thread of its own: there no mode, hook or recomputation of the caller's sees what is computed."""
    found: list[Mapping[str, float]] = []
    raised: list[BaseException] = []

    def work() -> None:
        """The attempt; what it raises waits for the thread's end."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the call itself gives them; as errors they are no disagreement
                found.append(attempt())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


@asked_once
def known_bad(device: str, key: str) -> bool:
    """Whether calls that begin so have disagreed before: all that can be asked while a compiler or a graph looks on."""
    kept = _kept(torch.device(device))
    known = {one for (where, one), answer in _answers.items() if where == device and not answer}
    return any(
        f"{one} ".startswith(f"{key} ") for one in known | {one for one, errors in kept.items() if _wrong(errors)}
    )


def _wrong(errors: Mapping[str, float | str]) -> dict[str, float | str]:
    return {name: error for name, error in errors.items() if not isinstance(error, float) or error > 1}


def _number(error: float) -> float | str:
    return float(error) if math.isfinite(error) else "not finite"  # JSON has no infinity


def _file() -> Path:
    return user_cache() / "triton" / "self_check.json"


@cache
def _here(device: torch.device) -> str:
    """What an answer holds for."""
    modules = [path for path in provenance.OPS.rglob("*.py") if "triton" in path.relative_to(provenance.OPS).as_posix()]
    parts = (provenance.device_name(device), provenance.capability(device), _driver(), torch.version.cuda)
    versions = (provenance.triton_version(), _assembler(device), torch.__version__, provenance.digest(modules))
    return " | ".join(map(str, (*parts, *versions)))


def _assembler(device: torch.device) -> str:
    """Release of CUDA whose ptxas is used; "" where nothing is compiled, as under the interpreter."""
    return assembler.version(torch.cuda.get_device_capability(device)) if device.type == "cuda" else ""


def _driver() -> str:
    """Version of the NVIDIA driver; "" where the system does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    return ""


def _kept(device: torch.device) -> dict[str, dict[str, Any]]:
    """Call -> errors, for what is here."""
    found = _everything().get(_here(device), {})
    return {key: errors for key, errors in found.items() if isinstance(errors, dict)} if isinstance(found, dict) else {}


def _everything() -> dict[str, Any]:
    """The file; nothing where there is none, or another program wrote something else into it."""
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(device: torch.device, answers: Mapping[str, Any]) -> None:
    """Write the file as a whole; a folder that cannot be written to is no error: the next process asks again."""
    text = json.dumps({**_everything(), _here(device): answers}, indent=1)
    with contextlib.suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=_file().parent, suffix=".partial")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(partial).replace(_file())
