"""The operator in PyTorch's own tools: tracing, export, autocast, operation counts; and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention.covering import first_always
from ops.linear_cases import Case, empty_state, make, relative_error, run
from polysketch import ops
from polysketch.ops.native import why_unavailable

LOCAL = Case(length=40, batch=1, decays=True)
FACTORS = replace(LOCAL, power=1, factors=2, local_chunk=0, decays=False)


def flat_arguments(case: Case, backend: str) -> tuple:
    """Arguments of the raw operator for a case."""
    t = make(case).map(lambda x: x.requires_grad_(x.is_floating_point()))
    sums = empty_state(case)
    return (
        *(t.query, t.key, t.value, t.local_query, t.local_key, t.log_decay, sums.sums, sums.normalizer, None),
        *(case.power, case.factors, True, case.offset, True, case.degree, case.local_chunk or 16, 1, True, backend),
    )


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("chunked", LOCAL),
        ("native", FACTORS),
        pytest.param("chunked", FACTORS, marks=pytest.mark.full),
        pytest.param("native", LOCAL, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_opcheck_passes(case, backend):
    if backend == "native" and why_unavailable():
        pytest.skip(str(why_unavailable()))
    dtype = torch.float32 if backend == "native" else torch.float64
    case = replace(case, length=20, heads=2, key_heads=1, dtype=dtype)
    torch.library.opcheck(torch.ops.polysketch.linear_attention.default, flat_arguments(case, backend))


def test_compiles_without_a_graph_break_and_computes_the_same():
    torch.compiler.reset()
    case = replace(LOCAL, dtype=torch.float32)
    tensors = make(case)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(query, key, value, local_query, local_key, log_decay):
        local = ops.LocalPolynomial(local_query, local_key, 4, 16)
        return ops.linear_attention(
            query, key, value, power=2, causal=True, offset=1.0, local=local, log_decay=log_decay
        ).output

    leaves = {name: x.clone().requires_grad_() for name, x in tensors.leaves().items()}
    output = compiled(*leaves.values())
    expected = run(case, replace(tensors, **leaves)).output
    assert relative_error(output, expected) < 1e-6
    found = torch.autograd.grad(output.square().sum(), list(leaves.values()))
    wanted = torch.autograd.grad(expected.square().sum(), list(leaves.values()))
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("options", first_always([{}, {"power": 1, "factors": 2, "local_chunk": 0}]), ids=str)
def test_compiles_with_a_mask_and_a_state(options):
    torch.compiler.reset()
    case = replace(LOCAL, batch=2, padded=True, dtype=torch.float32, **options)
    tensors, state = make(case), run(case, make(case, 21), return_state=True).state

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(tensors, state):
        return run(case, tensors, state=state, return_state=True)

    found, expected = compiled(tensors, state), run(case, tensors, state=state, return_state=True)
    assert relative_error(found.output, expected.output) < 1e-6
    assert relative_error(found.denominator, expected.denominator) < 1e-6
    assert relative_error(found.state.sums, expected.state.sums) < 1e-6
    assert found.state.position.tolist() == expected.state.position.tolist()


def test_exports():
    class Module(torch.nn.Module):
        def forward(self, query, key, value):
            return ops.linear_attention(query, key, value, power=2, causal=True, offset=1.0).output

    tensors = make(replace(LOCAL, dtype=torch.float32))
    given = (tensors.query, tensors.key, tensors.value)
    program = torch.export.export(Module(), given)
    assert torch.equal(program.module()(*given), Module()(*given))


def test_autocast_leaves_the_op_alone():
    case = replace(LOCAL, dtype=torch.float32)
    plain = run(case, make(case)).output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(case, make(case)).output, plain)


def test_operations_are_counted_from_the_formula():
    case = Case(length=64, batch=1, heads=2, key_heads=2, features=32, head_dim=64, value_dim=64, local_chunk=16)
    tensors = make(case).map(lambda x: x.requires_grad_())
    with FlopCounterMode(display=False) as counter:
        output = run(case, tensors).output
    forward = counter.get_total_flops()
    assert forward == 2 * 64 * (4 * (32 * 33 // 2) * 65 + 16 * (64 + 65))
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 2 * forward
    with FlopCounterMode(display=False) as counter:
        run(replace(case, power=1, factors=2), tensors)
    assert counter.get_total_flops() == 2 * 64 * (4 * 16**2 * 65 + 16 * (64 + 65))


def test_auto_names_its_backend_and_unknown_ones_are_refused():
    few, many = make(LOCAL), make(LOCAL, 300)
    assert ops.linear_attention_backend(few.query, few.key) == "reference"
    assert ops.linear_attention_backend(few.query, few.key, backend="chunked") == "chunked"
    assert ops.linear_attention_backend(few.query, few.key, state=empty_state(LOCAL)) == "chunked"
    assert ops.linear_attention_backend(many.query, many.key) == "chunked"
    with pytest.raises(ValueError, match=r"unknown backend 'fast'.*'chunked', 'native', 'reference'"):
        run(LOCAL, make(LOCAL), backend="fast")


def changed(**changes):
    return lambda t: replace(t, **{name: change(getattr(t, name)) for name, change in changes.items()})


BAD_TENSORS = {
    "query is torch.float32|query_features is torch.float64|one dtype": changed(value=lambda x: x.float()),
    "must be float32": changed(query=lambda x: x.long(), key=lambda x: x.long(), value=lambda x: x.long()),
    r"\(batch, heads, length, width\)": changed(query=lambda x: x[0]),
    "agree in batch, heads and length": changed(value=lambda x: x[:, :, :-1]),
    "agree in batch and width": changed(query=lambda x: x[..., :-1]),
    "multiple of key heads": changed(query=lambda x: x[:, :3]),
    "equal query and key lengths": changed(query=lambda x: x[:, :, :-1]),
    r"local.key must have shape": changed(local_key=lambda x: x[:, :, :-1]),
    "log_decay must be at most 0, .* got 0.5": changed(log_decay=lambda x: x.abs().clamp(min=0.5)),
    "log_decay must have shape": changed(log_decay=lambda x: x[..., None]),
    "key_mask must be bool": changed(key_mask=lambda x: torch.ones(1, 40)),
    r"key_mask must be \(batch, key_length\) = \(1, 40\), got \(1, 39\)": changed(
        key_mask=lambda x: torch.ones(1, 39, dtype=torch.bool)
    ),
    "query_features, key_features, value must be on one device": changed(value=lambda x: x.to("meta")),
    "value, log_decay must be on one device": changed(log_decay=lambda x: x.to("meta")),
    "key, key_mask must be on one device": changed(
        key_mask=lambda x: torch.ones(1, 40, dtype=torch.bool, device="meta")
    ),
}
BAD_OPTIONS = {
    "power must be 1 or 2": {"power": 3},
    "factors must be 1 or 2, got 3": {"factors": 3},
    "factors=2 goes with power=1.*got power=2": {"factors": 2},
    "compute_chunk must be at least 1": {"compute_chunk": 0},
    "log_decay needs causal=True": {"causal": False},
    "offset must be finite and not negative, got nan": {"offset": math.nan},
    "offset must be finite and not negative, got inf": {"offset": math.inf},
    "offset must be finite and not negative, got -1.0": {"offset": -1.0},
    "local.degree must be even": {"local": ops.LocalPolynomial(None, None, 3, 16)},
    "local.chunk must be at least 1": {"local": ops.LocalPolynomial(None, None, 4, 0)},
    "the state does not fit": {"state": empty_state(replace(LOCAL, features=8))},
}


@pytest.mark.parametrize("message", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(message):
    with pytest.raises((ValueError, TypeError), match=message):
        run(LOCAL, BAD_TENSORS[message](make(LOCAL)))


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_options_that_do_not_fit_are_refused(message):
    with pytest.raises(ValueError, match=message):
        run(LOCAL, make(LOCAL), **BAD_OPTIONS[message])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power": 2.0}, "power must be 1 or 2, got 2.0"),
        ({"power": True}, "power must be 1 or 2, got True"),
        ({"factors": 2.0}, "factors must be 1 or 2, got 2.0"),
        ({"compute_chunk": 2.5}, "compute_chunk must be an integer, got 2.5"),
        ({"local": ops.LocalPolynomial(None, None, 4.0, 16)}, "local.degree must be an integer, got 4.0"),
        ({"local": ops.LocalPolynomial(None, None, 4, 2.5)}, "local.chunk must be an integer, got 2.5"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_numbers_that_are_no_integers_are_refused_by_every_backend(options, message, backend):
    with pytest.raises((ValueError, TypeError), match=message):
        run(LOCAL, make(LOCAL), backend=backend, **options)


def test_an_odd_width_has_no_halves():
    case = replace(LOCAL, power=1, factors=2, features=9)
    with pytest.raises(ValueError, match="even width, two halves, got 9"):
        ops.linear_attention(*(torch.ones(1, 1, 4, width) for width in (9, 9, 3)), factors=2)
    with pytest.raises(ValueError, match="the state does not fit"):
        run(replace(case, features=20), make(replace(case, features=20)), state=empty_state(replace(case, factors=1)))


def test_a_state_without_an_order_is_refused():
    case = replace(LOCAL, causal=False, decays=False)
    with pytest.raises(ValueError, match="a state needs causal=True"):
        run(case, make(case), return_state=True)
