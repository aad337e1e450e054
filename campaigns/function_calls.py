"""Calls of public functions and classes, their arguments drawn by name and type from what `inspect.signature` says.

Types fit, values and shapes often do not: it is a call that a person may make by mistake. What cannot be drawn, a model
for instance, leaves its function out, and is counted.
"""

import inspect
import os
import random
import shutil
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch._dynamo  # a call with a tensor on meta imports it, which takes seconds
from torch import Tensor

from campaigns.isolated import MEMORY, complaint, isolated, refusing
from campaigns.readers import make_sources
from polysketch import (
    attention,
    benchmarking,
    conversion,
    data,
    evaluation,
    feature_maps,
    generation,
    models,
    nn,
    ops,
    tasks,
    training,
)

PACKAGES = (
    ops,
    feature_maps,
    attention,
    nn,
    models,
    generation,
    evaluation,
    tasks,
    data,
    training,
    conversion,
    benchmarking,
)
_READING = ("evaluation", "tasks", "data", "training", "conversion", "benchmarking")
"""Those of which functions read files."""
SECONDS, SECONDS_OF_ENDLESS = 30, 6
_ENDLESS = ("training.train", "conversion.convert", "benchmarking.time_", "benchmarking.measure_")
"""How the names of functions begin that may be asked for work of any length: they count as well ended while at work."""
_PATHS = (
    "data",
    "run",
    "exported",
    "text",
    "text/0.txt",
    "run/config.json",
    "new",
    "new/deep",
    "no/such",
    "",
    "\x1b\n",
)
"""Of `make_sources`, in a copy of which a call works; and others."""
_SIZES = (0, 1, 1, 2, 2, 3, 4, 4, 5, 8, 16, 17)
_DTYPES = (torch.float32,) * 8 + (
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.complex64,
)
_INTS = (-1, 0, 0, 1, 1, 2, 2, 3, 4, 8, 16, 2**31, 2**63 - 1, 10**30, True)
_FLOATS = (0.0, 0.5, 1.0, 2.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), -0.0)
_WORDS = (
    "auto",
    "reference",
    "chunked",
    "native",
    "triton",
    "layer",
    "head",
    "softmax",
    "relu",
    "",
    "no-such",
    "\x1b[0m",
)
_NAMES = {"Tensor": Tensor} | {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
"""What annotations may name that are imported for type checkers alone."""


class CannotDrawError(Exception):
    """A type whose values the campaign does not make."""


class _Shapes:
    """Sizes that one call's tensors share, mostly."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.batch, self.heads = draw.choice((1, 1, 2, 0)), draw.choice((1, 2, 4))
        self.length, self.width = draw.choice(_SIZES), draw.choice((1, 2, 4, 8, 0))

    def of(self, name: str) -> tuple[int, ...]:
        batch, heads, length, width = self.batch, self.heads, self.length, self.width
        known = {
            "key_mask": (batch, length),
            "log_decay": (batch, heads, length),
            "strength": (batch, heads, length),
            "hyperplanes": (heads, width, 3),
            "samples": (batch, heads, 4, width),
            "ids": (batch, length),
            "hidden": (batch, length, 5),
            "position": (batch,),
            "coefficients": (3,),
            "logits": (batch, 7),
        }
        shape = known.get(name, (batch, heads, length, width))
        kind = self.draw.random()
        if kind < 0.75:
            return shape
        if kind < 0.9:  # one size is another
            place = self.draw.randrange(len(shape))
            return (*shape[:place], self.draw.choice(_SIZES), *shape[place + 1 :])
        return tuple(self.draw.choice(_SIZES) for _ in range(self.draw.randrange(6)))


def tensor(name: str, shapes: _Shapes, dtype: torch.dtype) -> Tensor:
    """A tensor for a parameter of a name: often as it should be."""
    draw = shapes.draw
    if name == "cu_seqlens":
        good = [0, shapes.length // 2, shapes.length]
        edges = draw.choice([good, good, good, [0, shapes.length], [0], [], [1, 3], [0, 5, 2], [0, 2**31 - 1], [-1, 2]])
        return torch.tensor(edges, dtype=draw.choice((torch.int32, torch.int32, torch.int64, torch.float32)))
    shape = shapes.of(name)
    made = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    if name == "ids" or "codes" in name or name == "position":
        made = (made.abs() * 20).long() - draw.choice((0, 0, 0, 3))
    elif name.endswith("mask"):
        made = made > -1
    else:
        made = (made * draw.choice((1, 1, 1, 0, 1e20, float("nan"), float("inf")))).to(dtype)
    if name == "log_decay":
        made = -made.abs() if not (made.is_complex() or made.dtype == torch.bool) else made
    way = draw.random()
    if way < 0.05 and made.dim() >= 2:
        made = made.transpose(0, 1).contiguous().transpose(0, 1)
    elif way < 0.08 and made.dim():
        made = made[..., :1].expand(made.shape) if made.shape[-1] else made
    elif way < 0.1:
        made = made.to("meta")
    elif way < 0.14 and made.is_floating_point():
        made.requires_grad_()
    return made


def value_of(name: str, hint: Any, shapes: _Shapes, dtype: torch.dtype, depth: int = 0) -> Any:
    """A value of a type.

    Raises:
        CannotDrawError: no values of the type are made.
    """
    draw, kind, inner = shapes.draw, typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        makable = [one for one in inner if one is not type(None)]
        if type(None) in inner and draw.random() < 0.6:
            return None
        return value_of(name, draw.choice(makable), shapes, dtype, depth)
    if kind is Literal:
        return draw.choice((*inner, *inner, "no-such"))
    if hint is Tensor:
        return tensor(name, shapes, dtype if draw.random() < 0.95 else draw.choice(_DTYPES))
    if hint is np.ndarray:
        return tensor(name, shapes, torch.float32).nan_to_num().detach().resolve_conj().cpu().numpy()
    if hint in (int, float, bool, str):
        return draw.choice({int: _INTS, float: _FLOATS, bool: (True, False), str: _words(name)}[hint])
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return tuple(value_of(name, one, shapes, dtype, depth) for one in inner)
    if kind in (tuple, list, Sequence, typing.get_origin(typing.Iterable[int])) and inner:
        return [value_of(name, inner[0], shapes, dtype, depth) for _ in range(draw.randrange(4))]
    if hint is torch.dtype:
        return draw.choice(_DTYPES)
    if hint is Path:
        return Path(draw.choice(_PATHS))
    if hint is torch.device:
        return torch.device("cpu")
    if inspect.isclass(hint) and hint.__module__.startswith("polysketch") and depth < 3:
        return hint(**arguments(hint, shapes, dtype, depth + 1))
    raise CannotDrawError(f"{name}: {hint}")


def _words(name: str) -> tuple[str, ...]:
    return (*attention.MECHANISMS, "no-such") if name in ("name", "attention") else _WORDS


def arguments(callee: Callable[..., Any], shapes: _Shapes, dtype: torch.dtype, depth: int = 0) -> dict[str, Any]:
    """Arguments for a function or a class.

    Raises:
        CannotDrawError: one of them cannot be drawn and has no default.
    """
    hints = typing.get_type_hints(callee.__init__ if inspect.isclass(callee) else callee, localns=_NAMES)
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(callee).parameters.items():
        needed = parameter.default is inspect.Parameter.empty
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or (
            not needed and shapes.draw.random() < 0.6
        ):
            continue
        try:
            given[name] = value_of(name, hints.get(name, Any), shapes, dtype, depth)
        except CannotDrawError:
            if needed:
                raise
    return given


def _used(made: Any, shapes: _Shapes, dtype: torch.dtype) -> None:
    """What was made is used as it is meant to be: a mechanism attends, a map maps, a model computes a loss."""
    if isinstance(made, attention.Mechanism):
        query, key, value = (tensor(name, shapes, dtype) for name in ("query", "key", "value"))
        made(query, key, value, causal=made.is_causal)
        if made.is_causal:
            state = made.init_state(shapes.batch)
            made.extend(query, key, value, state)
    elif isinstance(made, feature_maps.FeatureMap):
        made.map_queries(tensor("query", shapes, dtype))
        made.map_keys(tensor("key", shapes, dtype))
    elif isinstance(made, models.ModelConfig):
        models.TransformerLM(made).loss(tensor("ids", shapes, dtype))


def callees() -> list[tuple[str, Callable[..., Any]]]:
    """Every public function and class that is called, by its name."""
    found = []
    for package in PACKAGES:
        for name in package.__all__:
            one = getattr(package, name)
            abstract = one in (attention.Mechanism, attention.LinearizedAttention, feature_maps.FeatureMap)
            if callable(one) and not abstract and not inspect.isabstract(one):
                found.append((f"{package.__name__.removeprefix('polysketch.')}.{name}", one))
    return found


def attack(name: str, callee: Callable[..., Any], seed: str, place: Path) -> tuple[str, str | None]:
    """One call with arguments of a seed, in a copy of a folder: what came of it, and what is wrong."""
    draw = random.Random(f"{name} {seed}")
    shapes, dtype = _Shapes(draw), draw.choice(_DTYPES)
    torch.manual_seed(draw.randrange(2**31))

    def work() -> None:
        os.chdir(copy)
        given = arguments(callee, shapes, dtype)
        if callee is attention.build and draw.random() < 0.9:
            given.update(num_heads=shapes.heads, head_dim=shapes.width or 4)
        made = callee(**given)
        with torch.autograd.set_grad_enabled(draw.random() < 0.5):
            _used(made, shapes, dtype)

    def unless_it_cannot_be_drawn() -> int:
        try:
            return refusing(work)()
        except CannotDrawError as error:
            print(error)
            return 2

    is_endless = name.startswith(_ENDLESS)
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(place, Path(folder) / "place")
        seconds = SECONDS_OF_ENDLESS if is_endless else SECONDS
        ended = isolated(unless_it_cannot_be_drawn, seconds=seconds, memory=MEMORY)
    if ended.status == 2:
        return "cannot be drawn", None
    if is_endless and ended.is_hang:
        return "at work until stopped", None
    return "refused" if ended.status else "done", complaint(ended)


def attacks(package: str, count: int, draw: random.Random, sources: Path) -> Iterator[tuple[str, str | None, str]]:
    """So many calls of what is public in a package: what was called, what is wrong, and what came of it.

    Calls of packages that read files work in a copy of the folder of sources, which are made if they are not there.
    """
    place = make_sources(sources) if package in _READING else sources.with_name("nothing")
    place.mkdir(exist_ok=True, parents=True)
    known = [one for one in callees() if one[0].startswith(f"{package}.")]
    for _ in range(count):
        name, callee = draw.choice(known)
        seed = str(draw.randrange(2**63))
        outcome, wrong = attack(name, callee, seed, place)
        if outcome == "cannot be drawn":
            known = [one for one in known if one[0] != name]
        yield f"{name}, arguments of {seed}", wrong, outcome


def packages() -> list[str]:
    """Those whose public names are called."""
    return [package.__name__.removeprefix("polysketch.") for package in PACKAGES]
