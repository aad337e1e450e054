"""NaN and inf at masked tokens: everything is as with zeros there, to the last bit, gradients too."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attention.cases import BATCH, COMPLETE_CAUSAL_CASES, LENGTH, Case, one_of_each, others_full
from attention.covering import first_always
from attention.test_contract_cross import CROSS, mask, tensors
from attention.test_contract_packed import EACH
from polysketch import attention

NAN, INFINITE = float("nan"), float("inf")
NUMBERS = [NAN, pytest.param(INFINITE, marks=pytest.mark.full)]


def real_tokens() -> Tensor:
    """Padding before the first row, inside the second and behind it."""
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[0, :5] = real[1, [9, 10, 20]] = real[1, 33:] = False
    return real


def spoiled(x: Tensor, real: Tensor, number: float) -> Tensor:
    """x (batch, heads, length, width) or (batch, length, width) with a number at masked tokens."""
    return x.masked_fill(~(real[:, None, :, None] if x.dim() == 4 else real[:, :, None]), number)


def given_to(mechanism: attention.Mechanism, case: Case, number: float) -> list[Tensor]:
    """Query, key, value, hidden, and where they are read query and key without positions."""
    every = [*case.inputs(), *case.inputs(seed=11)[:2] * mechanism.reads_unrotated]
    return [spoiled(x, real_tokens(), number) for x in every]


def options(given: list[Tensor]) -> dict:
    unrotated = {"unrotated": tuple(given[4:])} if len(given) > 4 else {}
    return {"hidden": given[3], **unrotated}


def gradients(output: Tensor, real: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a loss that reads real tokens alone."""
    upstream = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(7))
    wanted = spoiled(upstream, real, 0.0)
    return torch.autograd.grad(output, leaves, wanted, allow_unused=True, materialize_grads=True)


def of_whole(case: Case, causal: bool, number: float) -> list[Tensor]:
    """The output at real tokens, and the gradients of all inputs and parameters."""
    mechanism, real = case.build(), real_tokens()
    given = [x.requires_grad_() for x in given_to(mechanism, case, number)]
    output = mechanism(*given[:3], causal=causal, key_mask=real, **options(given))
    return [spoiled(output.detach(), real, 0.0), *gradients(output, real, [*given, *mechanism.parameters()])]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(x.isfinite().all() for x in expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("case", "causal"), EACH)
def test_masked_tokens_are_zeros_whatever_stands_there(case: Case, causal: bool, number: float):
    assert_same_bits(of_whole(case, causal, number), of_whole(case, causal, 0.0))


def test_a_mechanism_that_leaves_them_in_is_found(monkeypatch):
    def as_given(self, query, key, value, key_mask, hidden=None):
        return query, key, value, hidden

    monkeypatch.setattr(attention.Mechanism, "real_inputs", as_given)
    for name in ("softmax", "polynomial", "linear"):  # the second leaks in gradients alone
        with pytest.raises(AssertionError):
            test_masked_tokens_are_zeros_whatever_stands_there(Case(name), True, NAN)


def of_decoding(case: Case, number: float, sizes: list[int]) -> Tensor:
    """The output of `extend` over a split, at real tokens."""
    mechanism, real = case.build(), real_tokens()
    given, outputs, state = given_to(mechanism, case, number), [], mechanism.init_state(BATCH, dtype=torch.float64)
    for start, stop in pairwise([0, *torch.tensor(sizes).cumsum(0).tolist()]):
        part = [x.narrow(-2, start, stop - start) for x in given]
        output, state = mechanism.extend(*part[:3], state, key_mask=real[:, start:stop], **options(part))
        outputs.append(output)
    return spoiled(torch.cat(outputs, 2), real, 0.0)


@pytest.mark.parametrize("sizes", first_always([[12, *[1] * 10, 15], [LENGTH]]), ids=str)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("case", one_of_each(COMPLETE_CAUSAL_CASES), ids=str)
def test_masked_tokens_are_zeros_when_decoding(case: Case, number: float, sizes: list[int]):
    assert_same_bits([of_decoding(case, number, sizes)], [of_decoding(case, 0.0, sizes)])


def of_source(case: Case, number: float) -> list[Tensor]:
    """What queries of another sequence get, by `forward` with gradients, and by what is kept of the source."""
    mechanism, (query, *source) = case.build(), tensors(case)
    source = [spoiled(x, mask(), number) for x in source]
    kept = mechanism.ask_source(query, mechanism.read_source(*source, key_mask=mask()))
    leaves = [x.requires_grad_() for x in (query, *source)]
    output = mechanism(*leaves, causal=False, key_mask=mask())
    everything = torch.ones(BATCH, query.shape[2], dtype=torch.bool)
    return [kept, output.detach(), *gradients(output, everything, [*leaves, *mechanism.parameters()])]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("case", others_full(CROSS), ids=str)
def test_masked_tokens_of_a_source_are_zeros(case: Case, number: float):
    assert_same_bits(of_source(case, number), of_source(case, 0.0))


def test_a_query_of_another_sequence_is_answered_where_a_key_is_masked():
    mechanism, (query, key, value, _) = Case("softmax").build(), Case("softmax").inputs()
    real = real_tokens()
    found = mechanism(query, key, value, causal=False, key_mask=real)
    longer = mechanism(torch.cat([query, query], 2), key, value, causal=False, key_mask=real)
    torch.testing.assert_close(found, longer[:, :, :LENGTH])


@pytest.mark.parametrize("case", [Case("polysketch-paper", {"sketch_size": 6, "local_chunk": 8, "prefix_gain": 0.5})])
def test_masked_tokens_are_zeros_when_calibrating(case: Case):
    gains = []
    for number in (NAN, INFINITE, 0.0):
        mechanism = case.build()
        query, key, _, _ = given_to(mechanism, case, number)
        mechanism.calibrate(query, key, key_mask=real_tokens())
        gains.append(
            torch.cat([mechanism.prefix_gain.log_gain, mechanism.prefix_share(query, key, key_mask=real_tokens())])
        )
    assert torch.equal(gains[0], gains[2])
    assert torch.equal(gains[1], gains[2])


@pytest.mark.parametrize("case", others_full([case for case in CROSS if case.name == "softmax"]), ids=str)
def test_without_a_mask_nothing_is_copied(case: Case):
    mechanism, (query, key, value, hidden) = case.build(), case.inputs()
    found = mechanism.real_inputs(query, key, value, None, hidden)
    assert all(one is other for one, other in zip(found, (query, key, value, hidden), strict=True))


def test_a_mask_that_does_not_fit_is_refused_in_one_line(case: Case):
    mechanism, (query, key, value, hidden) = case.build(), case.inputs()
    for wrong, error in ((real_tokens()[:, :5], ValueError), (real_tokens().int(), TypeError)):
        with pytest.raises(error, match="key_mask must be"):
            mechanism(query, key, value, causal=mechanism.is_causal, key_mask=wrong, hidden=hidden)
