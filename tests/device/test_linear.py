"""Linear attention by every backend of a device: beside the plain formula, with states, and decoding."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from device import plain
from device.yardstick import DTYPES, Device, assert_as_good_as_plain, assert_within, named, refusal
from ops.linear_cases import Case, Tensors, arguments, assert_precision_agrees, empty_state, make, on, run
from ops.test_linear_backends import PAIRWISE, WITH_HISTORY
from polysketch import ops
from polysketch.ops.linear.backends import BACKENDS

# Measured on a CPU: 2e-6, 3e-3 and 4e-4; a wrong algorithm is off by far more than any of these.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
USUAL = Case(
    length=1_501, local_chunk=256, batch=1, key_heads=4, features=32, head_dim=64, value_dim=64, compute_chunk=None
)
SIZED = [
    *(replace(USUAL, features=size) for size in (16, 32, 64, 128)),
    replace(USUAL, local_chunk=0),
    replace(USUAL, head_dim=128, value_dim=128),
    replace(USUAL, head_dim=48, value_dim=48, features=20),
    replace(USUAL, key_heads=2, decays=True, padded=True, batch=2),
    replace(USUAL, local_chunk=0, key_heads=2, decays=True),
    *(replace(USUAL, power=1, local_chunk=0, features=size) for size in (64, 256)),
    replace(USUAL, power=1, features=64, decays=True),
    replace(USUAL, power=1, factors=2, local_chunk=0, features=48, decays=True),
    replace(USUAL, causal=False, local_chunk=0, padded=True, batch=2),
    replace(USUAL, normalize=False),
    replace(USUAL, length=1),
    replace(USUAL, length=257),
    replace(USUAL, length=4_095, heads=2, key_heads=2),
]
SPANS = (1, 2, 1, 11, 1, 10_000)


def fitting(case: Case, device: Device) -> Case:
    """The same with small sizes where the device asks for them."""
    if not device.small:
        return case
    width = {"head_dim": 16, "value_dim": 16} if case.value_dim > 16 else {}
    longest = 33 if device.name == "interpreter" else 71
    sizes = {"length": min(case.length, longest), "local_chunk": min(case.local_chunk, 16), "heads": 2}
    return replace(case, **sizes, **width, key_heads=min(case.key_heads, 2), features=min(case.features, 20))


def backends(device: Device, dtype: torch.dtype) -> list[str]:
    """What runs here, or the test is skipped."""
    like = torch.ones(1, 1, 1, 1, dtype=dtype, device=device.where)
    why_not = lambda name: refusal(lambda: ops.linear_attention_backend(like, like, backend=name))  # noqa: E731
    return device.backends(BACKENDS, why_not) or pytest.skip(f"no backend of the {device.name} computes {dtype}")


def formula(case: Case, mask: Tensor | None, **tensors: Tensor) -> Tensor:
    """The plain one."""
    return plain.linear_attention(
        **tensors,
        power=case.power,
        factors=case.factors,
        causal=case.causal,
        offset=case.offset,
        normalize=case.normalize,
        degree=case.degree,
        local=case.local_chunk,
        key_mask=mask,
    )


def attend(case: Case, mask: Tensor | None, backend: str, **tensors: Tensor) -> Tensor:
    """The op, of tensors by their names."""
    absent = dict.fromkeys(("local_query", "local_key", "log_decay"))
    return run(case, Tensors(**{**absent, **tensors}, key_mask=mask), backend=backend).output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SIZED, ids=str)
def test_every_backend_errs_like_the_plain_formula(case, dtype, device, record_property):
    case = fitting(case, device)
    tensors = make(case)
    mask = None if tensors.key_mask is None else tensors.key_mask.to(device.where)
    for backend in backends(device, dtype):
        with named(backend):
            assert_as_good_as_plain(
                lambda **leaves: attend(case, mask, backend, **leaves),  # noqa: B023
                lambda **leaves: formula(case, mask, **leaves),
                tensors.leaves(),
                dtype,
                device.where,
                lambda name, value: record_property(f"{backend} {name}", value),  # noqa: B023
            )


@pytest.mark.parametrize("case", [case for case in SIZED if case.length > 1], ids=str)
def test_the_plain_formula_in_float64_is_the_reference(case):
    case = fitting(case, Device("cpu"))
    tensors = make(case)
    found = formula(case, tensors.key_mask, **tensors.leaves())
    torch.testing.assert_close(found, run(case, tensors, backend="reference").output, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*PAIRWISE, *WITH_HISTORY, replace(USUAL, history=300)], ids=str)
def test_states_masks_and_every_gradient_agree_with_the_reference(case, dtype, device):
    case = fitting(case, device) if case.length > 100 else case
    for backend in backends(device, dtype):
        with named(backend):
            assert_precision_agrees(case, backend, TOLERANCES[dtype], dtype=dtype, device=device.where)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in [*PAIRWISE, USUAL] if case.causal and case.length > 1], ids=str)
def test_decoding_over_uneven_spans_gives_the_outputs_and_the_state_of_the_whole(case, dtype, computer):
    case = replace(fitting(case, computer), dtype=dtype)
    tensors = make(case)
    exact = tensors.map(lambda x: x if x.dtype == torch.bool else x.double())
    expected = run(case, exact, backend="reference", return_state=True)
    here, state = on(computer.where, tensors, empty_state(case))
    results, start = [], 0
    # Spans are whole blocks; behind padding rows come to the ends of their blocks at different times.
    block = 1 if case.block_size is None else case.length if case.padded else case.block_size
    for span in SPANS:
        stop = start + -(-span // block) * block  # whole blocks
        part = here.span(start, min(case.length, stop))
        if start < case.length:
            given = (part.query, part.key, part.value)
            results.append(ops.linear_attention_extend_(*given, state, **arguments(case, part)))
        start = stop
    ends = {name: x for name, x in expected.state.tensors().items() if x.numel()}
    rows = ("output", "denominator")
    found = {name: torch.cat([getattr(result, name) for result in results], 2) for name in rows}
    wanted = {name: getattr(expected, name) for name in rows}
    assert_within({**found, **state.tensors()}, {**wanted, **ends}, TOLERANCES[dtype])
