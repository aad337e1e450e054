"""The delta rule: its definition token by token, its backends, gradients and states."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attention.covering import pairs_always
from polysketch import ops
from polysketch.ops.linear.packing import expand

BACKENDS = ("reference", "chunked", "native")
BATCH, HEADS, WIDTH, FEATURES = 2, 3, 5, 12


def inputs(length: int, factors: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    """Keys of length one, which lean toward each other so that every token changes what all later ones write."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(BATCH, HEADS, length, *shape, generator=generator, dtype=torch.float64)

    key = torch.nn.functional.normalize((draw(FEATURES) + 0.5).unflatten(-1, (factors, -1)), dim=-1).flatten(-2)
    return tuple(x.to(dtype) for x in (key, draw(WIDTH), draw().sigmoid()))


def state_of(factors: int, dtype: torch.dtype = torch.float64) -> ops.LinearAttentionState:
    """A state that is not empty."""
    state = ops.LinearAttentionState.init(BATCH, HEADS, FEATURES, WIDTH, factors=factors, dtype=dtype)
    state.sums.copy_(torch.randn(state.sums.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64))
    return state


def one_by_one(key: Tensor, value: Tensor, strength: Tensor, factors: int, sums: Tensor | None) -> Tensor:
    """The definition: every token asks the sums for its key, and writes a share of what is missing."""
    phi = expand(key, 1, factors, query=True)
    sums = value.new_zeros(BATCH, HEADS, phi.shape[-1], value.shape[3]) if sums is None else sums
    written = []
    for token in range(key.shape[2]):
        features = phi[:, :, token, :, None]
        answer = (features.mT @ sums)[:, :, 0]
        written.append(strength[:, :, token, None] * (value[:, :, token] - answer))
        sums = sums + features * written[-1][:, :, None]
    return torch.stack(written, 2)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}


def dtype_of(backend: str) -> torch.dtype:
    return torch.float32 if backend == "native" else torch.float64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factors", [1, 2])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 150])
@pytest.mark.parametrize("continued", [False, True])
def test_every_backend_writes_what_the_definition_does(backend: str, factors: int, length: int, continued: bool):
    dtype = dtype_of(backend)
    state = state_of(factors) if continued else None
    expected = one_by_one(*inputs(length, factors), factors, None if state is None else state.sums)
    state = state_of(factors, dtype) if continued else None
    found = ops.delta_writes(*inputs(length, factors, dtype), factors=factors, state=state, backend=backend)
    torch.testing.assert_close(found, expected.to(dtype), **tolerance(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factors", [1, 2])
@pytest.mark.parametrize("continued", [False, True])
def test_gradients_of_every_backend_are_those_of_the_definition(backend: str, factors: int, continued: bool):
    length = 70
    upstream = inputs(length, factors, seed=3)[1]
    found = []
    for dtype, by_definition in ((torch.float64, True), (dtype_of(backend), False)):
        given = [x.requires_grad_() for x in inputs(length, factors, dtype)]
        state = state_of(factors, dtype) if continued else None
        if state is not None:
            state.sums.requires_grad_()
        if by_definition:
            output = one_by_one(*given, factors, None if state is None else state.sums)
        else:
            output = ops.delta_writes(*given, factors=factors, state=state, backend=backend)
        wanted = given if state is None else [*given, state.sums]
        found.append(torch.autograd.grad(output, wanted, upstream.to(dtype)))
    for expected, gradient in zip(*found, strict=True):
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(gradient, expected.to(gradient.dtype), **tolerance(gradient.dtype))


@pytest.mark.parametrize("split", [[1] * 6 + [64], [40, 30], [33, 1, 36]])
def test_a_state_carries_what_was_written(split: list[int]):
    """Spans one after another, each behind the state of those before it, write what the whole sequence does."""
    tensors = inputs(sum(split), 2)
    whole = ops.delta_writes(*tensors, factors=2)
    state, parts = ops.LinearAttentionState.init(BATCH, HEADS, FEATURES, WIDTH, factors=2, dtype=torch.float64), []
    for key, value, strength in zip(*(x.split(split, 2) for x in tensors), strict=True):
        parts.append(ops.delta_writes(key, value, strength, factors=2, state=state))
        ops.linear_attention_extend_(key, key, parts[-1], state, factors=2, normalize=False)
    torch.testing.assert_close(torch.cat(parts, 2), whole)


QUERY_HEADS = 6


def queries(length: int, factors: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Two query heads for a head of keys."""
    return torch.cat([inputs(length, factors, dtype, seed)[0] for seed in (5, 6)], 1)


def answers_one_by_one(query: Tensor, key: Tensor, value: Tensor, strength: Tensor, factors: int) -> Tensor:
    """The definition of `delta_attention`: each token is written, and then its queries ask the sums."""
    written = one_by_one(key, value, strength, factors, None).repeat_interleave(2, 1)
    phi, of_query = (expand(x, 1, factors, query=True) for x in (key.repeat_interleave(2, 1), query))
    return (of_query @ phi.mT).tril() @ written


# Lanes of vectors are 4, 8 or 16; the last column travels by itself where the width is one more.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factors", [1, 2])
@pytest.mark.parametrize("split", [[1] * 40, [3, 1, 1, 20, 1]])
def test_decoding_gives_the_answers_of_the_whole(dtype: torch.dtype, factors: int, split: list[int]):
    """In steps of any length, by heads that share sums; the state then is that of sums over what was written."""
    key, value, strength = inputs(sum(split), factors)
    query, last = queries(sum(split), factors), split[-1]
    whole = ops.delta_attention(query, key, value, strength, factors=factors, backend="reference")
    state = ops.LinearAttentionState.init(BATCH, HEADS, FEATURES, WIDTH, factors=factors, dtype=dtype)
    sums, parts = state.sums.data_ptr(), []
    for tokens in zip(*(x.to(dtype).split(split, 2) for x in (query, key, value, strength)), strict=True):
        parts.append(ops.delta_attention_extend_(*tokens, state, factors=factors))
    torch.testing.assert_close(torch.cat(parts, 2).double(), whole, **tolerance(dtype))
    written = ops.delta_writes(key, value, strength, factors=factors, backend="reference")
    expected = ops.LinearAttentionState.init(BATCH, HEADS, FEATURES, WIDTH, factors=factors, dtype=torch.float64)
    ops.linear_attention_extend_(key, key, written, expected, factors=factors, normalize=False)
    torch.testing.assert_close(state.sums.double(), expected.sums, **tolerance(dtype))
    torch.testing.assert_close(state.normalizer.double(), expected.normalizer, **tolerance(dtype))
    assert state.sums.data_ptr() == sums
    assert state.position.tolist() == [sum(split)] * BATCH
    assert parts[-1].shape == (BATCH, QUERY_HEADS, last, WIDTH)


def test_a_step_reads_tensors_of_any_strides_and_refuses_what_does_not_fit():
    key, value, strength = inputs(1, 2, torch.float32)
    query = queries(1, 2, torch.float32)
    answers = []
    for turn in (False, True):
        state = state_of(2, torch.float32)
        tokens = [x.mT.contiguous().mT if turn and x.dim() == 4 else x for x in (query, key, value, strength)]
        answers.append(ops.delta_attention_extend_(*tokens, state, factors=2))
    assert torch.equal(*answers)
    with pytest.raises(ValueError, match="the state does not fit"):
        ops.delta_attention_extend_(query, key, value[..., :3], strength, state, factors=2)
    with pytest.raises(ValueError, match="query_features must be"):
        ops.delta_attention_extend_(query[..., :4], key, value, strength, state, factors=2)
    with pytest.raises(ValueError, match="must agree"):
        ops.delta_attention_extend_(query, key, value, strength[:, :2], state, factors=2)
    with pytest.raises(TypeError, match="cast the tokens"):
        ops.delta_attention_extend_(query, key, value.double(), strength, state, factors=2)


ANSWERED = {"width": (1, 5, 16, 17, 33), "factors": (1, 2), "length": (1, 31, 32, 33, 100)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "factors", "length"), pairs_always(ANSWERED))
def test_answers_and_their_gradients_are_those_of_the_definition(width: int, backend: str, factors: int, length: int):
    found = []
    for dtype, by_definition in ((torch.float64, True), (dtype_of(backend), False)):
        key, _, strength = inputs(length, factors, dtype)
        generator = torch.Generator().manual_seed(8)
        shapes = ((BATCH, HEADS, length, width), (BATCH, QUERY_HEADS, length, width))
        value, upstream = (torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes)
        given = [x.requires_grad_() for x in (queries(length, factors, dtype), key, value, strength)]
        if by_definition:
            output = answers_one_by_one(*given, factors)
        else:
            output = ops.delta_attention(*given, factors=factors, backend=backend)
        found.append((output, *torch.autograd.grad(output, given, upstream)))
    for expected, answer in zip(*found, strict=True):
        torch.testing.assert_close(answer, expected.to(answer.dtype), **tolerance(answer.dtype))


def test_the_native_backend_answers_in_one_pass(monkeypatch: pytest.MonkeyPatch):
    """Not by its two parts; the answers of strided inputs are those of contiguous ones."""
    given = (queries(70, 2, torch.float32), *inputs(70, 2, torch.float32))
    expected = ops.delta_attention(*given, factors=2, backend="chunked")
    monkeypatch.setattr("polysketch.ops.delta.api.linear_attention", None)
    torch.testing.assert_close(ops.delta_attention(*given, factors=2), expected, **tolerance(torch.float32))
    strided = [x.movedim(2, 0).contiguous().movedim(0, 2) for x in given]
    torch.testing.assert_close(ops.delta_attention(*strided, factors=2), expected, **tolerance(torch.float32))


def test_the_operator_of_answers_keeps_pytorchs_rules():
    given = [x.requires_grad_() for x in (queries(40, 2, torch.float32), *inputs(40, 2, torch.float32))]
    operator = torch.ops.polysketch.delta_attention.default
    torch.library.opcheck(operator, (*given, 2))
    query, key, value, strength = (x.detach() for x in given)
    output, errors = operator(query, key, value, strength, 2)
    backward = torch.ops.polysketch.delta_attention_backward.default
    torch.library.opcheck(backward, (torch.randn_like(output), errors, query, key, strength, 2))


@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        (torch.ones(BATCH, 4, 8, FEATURES), ValueError, "a multiple of their heads"),
        (torch.ones(BATCH, 6, 7, FEATURES), ValueError, "query_features must be"),
        (torch.ones(BATCH, 6, 8, FEATURES).long(), TypeError, "query_features must be floating"),
    ],
)
@pytest.mark.parametrize("backend", ["native", "chunked"])
def test_queries_that_do_not_fit_are_refused(query: Tensor, error: type[Exception], message: str, backend: str):
    with pytest.raises(error, match=message):
        ops.delta_attention(query, *inputs(8, 2, torch.float32), factors=2, backend=backend)


def test_answers_to_half_precision_and_to_nothing():
    given = [queries(40, 2, torch.bfloat16), *inputs(40, 2, torch.bfloat16)]
    found = ops.delta_attention(*given, factors=2)
    torch.testing.assert_close(found, ops.delta_attention(*(x.float() for x in given), factors=2))
    assert ops.delta_attention(*(x[:0] for x in given), factors=2).shape == (0, QUERY_HEADS, 40, WIDTH)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sums_answer_each_key_with_its_newest_value(backend: str):
    """With strength one, whatever the other keys are. Sums that only add give a mixture of all values."""
    dtype = dtype_of(backend)
    key, value, _ = inputs(8, 2, dtype)
    key, value = torch.cat([key, key[:, :, :3]], 2), torch.cat([value, value[:, :, 3:6]], 2)
    tokens = (key, value, torch.ones(BATCH, HEADS, 11, dtype=dtype))
    written = ops.delta_writes(*tokens, factors=2, backend=backend)
    answers = ops.linear_attention(key, key, written, factors=2, causal=True, normalize=False).output
    torch.testing.assert_close(answers, value, rtol=1e-4, atol=1e-4)
    added = ops.linear_attention(key, key, value, factors=2, causal=True, normalize=False).output
    assert (added - value)[:, :, 4:].abs().mean() > 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_of_strength_zero_changes_nothing(backend: str):
    key, value, strength = inputs(40, 2, dtype_of(backend))
    strength[:, :, 7] = 0.0
    kept = [index for index in range(40) if index != 7]
    written = ops.delta_writes(key, value, strength, factors=2, backend=backend)
    without = ops.delta_writes(*(x[:, :, kept] for x in (key, value, strength)), factors=2, backend=backend)
    assert written[:, :, 7].eq(0).all()
    torch.testing.assert_close(written[:, :, kept], without)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype):
    tensors = inputs(100, 2, dtype)
    found = ops.delta_writes(*tensors, factors=2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, ops.delta_writes(*(x.float() for x in tensors), factors=2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(ops.delta_writes(*tensors, factors=2), found)


@pytest.mark.parametrize("backend", ["chunked", "native"])
def test_the_operator_keeps_pytorchs_rules(backend: str):
    given = [x.requires_grad_() for x in inputs(40, 2, dtype_of(backend))]
    operator = torch.ops.polysketch.delta_writes.default
    torch.library.opcheck(operator, (*given, None, 2, backend, None))
    plain = [x.detach() for x in given]
    outputs = operator(*plain, None, 2, backend, None)
    backward = torch.ops.polysketch.delta_writes_backward.default
    torch.library.opcheck(backward, (torch.randn_like(outputs[0]), *outputs, *plain, None, 2, backend, None))


# PyTorch's own, as it reads its formulas of forward mode for the first time.
@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_refused():
    key, value, strength = inputs(40, 2)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        ops.delta_writes(forward_ad.make_dual(key, key), value, strength, factors=2)


def test_an_empty_batch_gives_an_empty_result():
    tensors = [x[:0] for x in inputs(40, 2, torch.float32)]
    assert ops.delta_writes(*tensors, factors=2).shape == (0, HEADS, 40, WIDTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_features": torch.ones(2, 3, 4)}, "key_features must be"),
        ({"value": torch.ones(BATCH, HEADS, 3, WIDTH)}, "must agree"),
        ({"strength": torch.ones(BATCH, HEADS, 4, 1)}, "must agree"),
        ({"factors": 3}, "factors must be"),
        ({"key_features": torch.ones(BATCH, HEADS, 4, 11)}, "even width"),
        ({"state": "narrow"}, "the state does not fit"),
        ({"state": "squared"}, "the state does not fit"),
        (
            {"backend": "nothing"},
            "unknown backend 'nothing'; expected 'auto', 'chunked', 'native', 'reference', 'triton'",
        ),
    ],
)
def test_wrong_arguments_are_refused(change: dict, message: str):
    key, value, strength = inputs(4, 2, torch.float32)
    states = {"narrow": {"value_dim": 4}, "squared": {"factors": 1, "power": 2}}
    if "state" in change:
        sizes = {"feature_dim": FEATURES, "value_dim": WIDTH, "factors": 2} | states[change["state"]]
        change = {"state": ops.LinearAttentionState.init(BATCH, HEADS, **sizes)}
    call = {"key_features": key, "value": value, "strength": strength, "factors": 2} | change
    with pytest.raises(ValueError, match=message):
        ops.delta_writes(**call)


def test_what_is_no_floating_point_is_refused():
    key, value, strength = inputs(4, 2, torch.float32)
    with pytest.raises(TypeError, match="strength must be"):
        ops.delta_writes(key, value, strength.long(), factors=2)


def test_the_native_backend_says_why_it_cannot():
    with pytest.raises(RuntimeError, match="takes float32, bfloat16 and float16"):
        ops.delta_writes(*inputs(4, 2), factors=2, backend="native")
