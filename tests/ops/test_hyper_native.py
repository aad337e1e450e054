"""The native programs of HyperAttention compute what plain products compute in float64, and so do their gradients."""

import pytest
import torch
from torch import Tensor

from attention.covering import first_always
from polysketch import ops
from polysketch.ops.hyper import native
from polysketch.ops.hyper.approximate import Options
from polysketch.ops.hyper.calls import who_meets_whom
from polysketch.ops.native import why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

SIZES = {"min_length": 32, "chunk_size": 16, "sample_size": 24}


def tensors(length=200, keys=None, batch=2, heads=4, key_heads=2, head_dim=20, value_dim=13) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    keys = keys or length
    shapes = [(heads, length, head_dim), (key_heads, keys, head_dim), (key_heads, keys, value_dim)]
    return [torch.randn(batch, *shape, generator=generator) for shape in shapes]


def padding(length: int) -> Tensor:
    """A row with padding before, in the middle and behind, and one without any."""
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :9] = mask[0, length // 2 : length // 2 + 5] = mask[0, -7:] = False
    return mask


def attend(inputs: list[Tensor], **options) -> list[Tensor]:
    """Output, and the gradients of query, key and value of a sum that weighs every entry otherwise."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    planes = torch.randn(inputs[0].shape[3], 6, generator=torch.Generator().manual_seed(5)).to(inputs[0].dtype)
    output = ops.hyper_attention(*inputs, hyperplanes=planes, **{**SIZES, **options})
    weights = torch.arange(output.numel(), dtype=output.dtype).sin().view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def assert_native_is_exact(monkeypatch, inputs: list[Tensor], **options) -> None:
    """Within float32's rounding of the definition in float64; and the programs have run."""
    calls = []
    run = native._run
    monkeypatch.setattr(native, "_run", lambda program, *given: calls.append(program) or run(program, *given))
    found = attend(inputs, **options)
    assert calls == ["forward", "backward"]
    expected = attend([x.double() for x in inputs], **options)
    assert calls == ["forward", "backward"]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [33, 65, 128, 200])
def test_output_and_gradients_are_those_of_the_definition(monkeypatch, causal, length):
    assert_native_is_exact(monkeypatch, tensors(length), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_with_padding(monkeypatch, causal):
    assert_native_is_exact(monkeypatch, tensors(), causal=causal, key_mask=padding(200))


@pytest.mark.parametrize("keys", [90, 333])
def test_queries_of_another_number_than_keys(monkeypatch, keys):
    assert_native_is_exact(monkeypatch, tensors(150, keys))


@pytest.mark.parametrize("causal", [False, True])
def test_a_given_mask_of_large_entries(monkeypatch, causal):
    chunks = -(-200 // 16)
    heavy = torch.rand(2, 4, chunks, chunks, generator=torch.Generator().manual_seed(0)) < 0.2
    assert_native_is_exact(monkeypatch, tensors(), causal=causal, heavy_mask=heavy)


@pytest.mark.parametrize("sizes", [{"sample_size": 500}, {"sample_size": 1}, {"chunk_size": 3}, {"chunk_size": 500}])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_and_samples_of_any_size(monkeypatch, causal, sizes):
    assert_native_is_exact(monkeypatch, tensors(), causal=causal, **sizes)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(1, 1), (3, 70), (64, 64)])
def test_heads_of_any_width(monkeypatch, head_dim, value_dim):
    assert_native_is_exact(monkeypatch, tensors(head_dim=head_dim, value_dim=value_dim), causal=True)


def test_sums_are_exact_where_scores_are_far_from_zero(monkeypatch):
    """Weights of e^200 and e^-200: the largest score of all tiles is what they are relative to."""
    query, key, value = tensors()
    for shift in (-200.0, 200.0):
        queries = torch.cat([query, torch.full_like(query[..., :1], shift)], -1)
        keys = torch.cat([key, torch.ones_like(key[..., :1])], -1)
        assert_native_is_exact(monkeypatch, [queries, keys, value], causal=True, scale=1.0)


@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_the_number_of_threads_changes_no_bit(causal, key_heads):
    """One key head is worked on by several threads, each with a part of the tokens."""
    inputs, threads = tensors(batch=1, key_heads=key_heads), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attend(inputs, causal=causal)
        torch.set_num_threads(3)
        together = attend(inputs, causal=causal)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_a_row_of_numbers_that_are_none_reaches_no_other():
    """NaN at one query and at one later key: tokens of blocks before the key's, and other heads, keep their bits."""
    query, key, value = tensors()
    planes = torch.randn(20, 6, generator=torch.Generator().manual_seed(5))
    before = ops.hyper_attention(query, key, value, hyperplanes=planes, causal=True, **SIZES)
    query[0, 1, 50], key[0, 0, 150], value[0, 0, 150] = torch.nan, torch.nan, torch.nan
    after = ops.hyper_attention(query, key, value, hyperplanes=planes, causal=True, **SIZES)
    assert after[0, 1, 50].isnan().all()
    assert after[0, :2, 150].isnan().all()
    after[0, 1, 50] = before[0, 1, 50]
    assert torch.equal(after[0, :2, :128], before[0, :2, :128])
    assert torch.equal(after[0, 2:], before[0, 2:])
    assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("options", [{"sampling": "norm"}, {"capping": (1.0, 2.0)}])
def test_what_has_two_sums_of_weights_is_no_call_for_the_programs(monkeypatch, options):
    monkeypatch.setattr(native, "_run", lambda *given: pytest.fail("the programs have one sum"))
    assert attend(tensors(), causal=True, **options)[0].isfinite().all()


@pytest.mark.parametrize("causal", first_always([True, False]))
def test_the_operators_pass_opcheck(causal):
    query, key, value = tensors(70)
    key = key.transpose(1, 2).contiguous().transpose(1, 2)  # heads of a token side by side
    options = Options(torch.randn(20, 6), 16, 24, "uniform", 0, 0.3)
    met = who_meets_whom(query, key, None, causal, 32, options)
    given = [x.requires_grad_() for x in (query, key, value)]
    arguments = (*given, None, *met, 32 * causal, 0.3, "native")
    torch.library.opcheck(torch.ops.polysketch.hyper_attention.default, arguments)
