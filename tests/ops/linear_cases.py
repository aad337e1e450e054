"""Inputs for tests of linear attention at which every part carries weight, and the comparison that all of them use."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polysketch import ops
from polysketch.ops.linear.packing import expand_tiles, pad_features

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """What a call of linear attention is made of; `length` new tokens, `history` tokens before them in a state."""

    power: int = 2
    factors: int = 1
    causal: bool = True
    block_size: int | None = None
    normalize: bool = True
    offset: float = 1.0
    local_chunk: int = 16
    degree: int = 4
    decays: bool = False
    padded: bool = False
    length: int = 63
    history: int = 0
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    features: int = 20
    head_dim: int = 12
    value_dim: int = 9
    compute_chunk: int | None = 32
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name))


@dataclass
class Tensors:
    """The differentiable inputs of a case, and its mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    local_query: Tensor | None
    local_key: Tensor | None
    log_decay: Tensor | None
    key_mask: Tensor | None

    def leaves(self) -> dict[str, Tensor]:
        """The inputs that have a gradient."""
        return {name: x for name, x in vars(self).items() if x is not None and name != "key_mask"}

    def map(self, function) -> "Tensors":
        """The same with `function` applied to every tensor."""
        return replace(self, **{name: function(x) for name, x in vars(self).items() if x is not None})

    def span(self, start: int, stop: int) -> "Tensors":
        """Tokens `start`..`stop`."""
        return self.map(lambda x: x[:, start:stop] if x.dtype == torch.bool else x[:, :, start:stop])


def make(case: Case, length: int | None = None) -> Tensors:
    """Seeded random inputs; local queries are scaled so that sketched and exact weights hold half of the mass each."""
    generator = torch.Generator().manual_seed(case.seed)
    length = case.length if length is None else length

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = normal(case.batch, case.heads, length, case.features).abs()
    key = normal(case.batch, case.key_heads, length, case.features).abs()
    tensors = Tensors(
        query=query / case.features**0.5,
        key=key / case.features**0.5,
        value=normal(case.batch, case.key_heads, length, case.value_dim),
        local_query=None,
        local_key=None,
        log_decay=None,
        key_mask=None,
    )
    if case.local_chunk:
        tensors.local_query = normal(case.batch, case.heads, length, case.head_dim) / case.head_dim**0.5
        tensors.local_key = normal(case.batch, case.key_heads, length, case.head_dim)
    if case.decays:
        tensors.log_decay = -0.05 * torch.rand(
            case.batch, case.key_heads, length, generator=generator, dtype=torch.float64
        )
    if case.padded:
        real = torch.rand(case.batch, length, generator=generator) > 0.2
        real[0, : length // 3] = False
        real[0, length // 3] = True
        tensors.key_mask = real
    if length > case.local_chunk > 0:
        share = prefix_share(case, tensors)
        tensors.local_query *= (share / (1 - share)) ** (1 / case.degree)
    return tensors.map(lambda x: x if x.dtype == torch.bool else x.to(case.dtype))


def empty_state(case: Case) -> ops.LinearAttentionState:
    """The state before the first token of a case."""
    return ops.LinearAttentionState.init(
        case.batch,
        case.key_heads,
        case.features,
        case.value_dim,
        power=case.power,
        factors=case.factors,
        local_chunk=case.local_chunk,
        local_dim=case.head_dim if case.local_chunk else 0,
        dtype=case.dtype,
    )


def arguments(case: Case, tensors: Tensors) -> dict:
    """Keyword arguments that every call on these tensors shares."""
    local = None
    if tensors.local_query is not None:
        local = ops.LocalPolynomial(tensors.local_query, tensors.local_key, case.degree, case.local_chunk)
    return {
        "power": case.power,
        "factors": case.factors,
        **({} if case.block_size is None else {"block_size": case.block_size}),
        "offset": case.offset,
        "normalize": case.normalize,
        "local": local,
        "log_decay": tensors.log_decay,
        "key_mask": tensors.key_mask,
    }


def run(case: Case, tensors: Tensors, *, backend: str = "chunked", state=None, return_state=False, **changes):
    """`ops.linear_attention` on a case."""
    # No union by |: the compiler of older releases of PyTorch, with which tests trace this, does not know it.
    keywords = {**arguments(case, tensors), "causal": case.causal, "compute_chunk": case.compute_chunk, **changes}
    return ops.linear_attention(
        tensors.query,
        tensors.key,
        tensors.value,
        state=state,
        return_state=return_state,
        backend=backend,
        **keywords,
    )


def prefix_share(case: Case, tensors: Tensors) -> float:
    """Share of all attention mass that sketched weights hold, as the reference defines them."""
    plain = replace(case, normalize=False, offset=0.0)
    ones = replace(tensors, value=torch.ones_like(tensors.value))
    everything = run(plain, ones, backend="reference").output.sum()
    exact = run(plain, replace(ones, query=torch.zeros_like(tensors.query)), backend="reference").output.sum()
    return float(1 - exact / everything)


def gradients(case: Case, tensors: Tensors, backend: str, state=None) -> dict[str, Tensor]:
    """Output, denominator, final state if there is one, and every input's gradient under a fixed random cotangent."""
    tensors = tensors.map(lambda x: x if x.dtype == torch.bool else x.detach().clone().requires_grad_())
    leaves = tensors.leaves()
    if state is not None:
        state = state.clone()
        parts = {name: x for name, x in state.tensors().items() if name != "position" and x.numel()}
        for x in parts.values():
            x.requires_grad_()
        leaves = leaves | {f"state {name}": x for name, x in parts.items()}
    result = run(case, tensors, backend=backend, state=state, return_state=state is not None)
    largest = float(result.denominator.detach().abs().amax()) or 1.0  # else gradients may leave the range of float16
    outputs = {"output": result.output, "denominator": result.denominator / largest}
    if state is not None:
        outputs |= {f"final {name}": x for name, x in result.state.tensors().items() if name != "position"}
    generator = torch.Generator().manual_seed(1)
    # Drawn in one dtype, or the cotangents of two dtypes would be unrelated numbers.
    drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs.values()]
    if state is not None and case.power == 2:
        drawn = [_fit_for_a_state(x, case) if name in _SUMS else x for name, x in zip(outputs, drawn, strict=True)]
    loss = sum((x * cotangent.to(x.device)).sum() for x, cotangent in zip(outputs.values(), drawn, strict=True))
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {name: x.detach() for name, x in outputs.items()} | {
        f"gradient of {name}": gradient for name, gradient in zip(leaves, found, strict=True)
    }


_SUMS = ("final sums", "final normalizer")


def _fit_for_a_state(cotangent: Tensor, case: Case) -> Tensor:
    """Zero where features are padding, where every state is zero and a backend need keep nothing.

    Not symmetric: a state stands for the mean of x_a x_b and x_b x_a, so that the gradient is symmetric all the same.
    """
    real = expand_tiles(pad_features(torch.ones(case.features)), double_off_diagonal=False)[:, None] > 0
    wide = cotangent if cotangent.dim() == 4 else cotangent[..., None]
    return torch.where(real, wide, 0.0).to(cotangent.dtype).reshape(cotangent.shape)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what was expected (or over 1e-5 if that is more); infinite for a NaN."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    error = (found - expected).norm() / expected.norm().clamp(min=1e-5)
    return float(torch.nan_to_num(error, nan=torch.inf))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every entry agrees to `tolerance`."""
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if error > tolerance}
    assert not wrong, f"relative errors beyond {tolerance}: {wrong}"


def assert_backends_agree(case: Case, *, backend: str = "chunked", tolerance: float = 1e-10) -> None:
    """`backend` computes what the reference defines: output, gradients, and with a history the states."""
    tensors, state = make(case), None
    if case.history:
        before = make(replace(case, seed=case.seed + 1, padded=False), case.history)
        state = run(case, before, backend="reference", return_state=True).state
    assert_same(gradients(case, tensors, backend, state), gradients(case, tensors, "reference", state), tolerance)


def on(device: torch.device, tensors: Tensors, state: ops.LinearAttentionState | None = None):
    """Inputs and a state in the memory of a device; positions stay on the host."""
    if state is not None:
        moved = {name: x.to(device) for name, x in state.tensors().items() if name != "position"}
        state = replace(state, **moved)
    return tensors.map(lambda x: x.to(device)), state


def assert_precision_agrees(
    case: Case,
    backend: str,
    tolerance: float = 2e-5,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> None:
    """Output, every gradient and, with a history, the states: on the device against the reference in float64."""
    rounded = make(replace(case, dtype=dtype))
    state = exact_state = None
    if case.history:
        before = make(replace(case, seed=case.seed + 1, padded=False, dtype=dtype), case.history)
        state = run(case, before, backend="reference", return_state=True).state
        exact = before.map(lambda x: x if x.dtype == torch.bool else x.double())
        exact_state = run(case, exact, backend="reference", return_state=True).state
    doubled = rounded.map(lambda x: x if x.dtype == torch.bool else x.double())
    here, state = on(device, rounded, state)
    assert_same(gradients(case, here, backend, state), gradients(case, doubled, "reference", exact_state), tolerance)
