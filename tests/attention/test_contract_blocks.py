"""Causal between blocks of tokens, and not inside them: what holds for every mechanism that can."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attention.cases import BATCH, CASES, LENGTH, Case, marks_of, others_full
from attention.test_contract import TIGHT, pad_left, run
from attention.test_contract_packed import LENGTHS, given_to, named, offsets
from polysketch import attention

SIZES = (1, 4, 8, 16, LENGTH)
"""Within local chunks and windows of 8, as long as they are, several of them, and all tokens."""


def can(mechanism: attention.Mechanism, block_size: int) -> bool:
    """Whether it takes blocks of so many tokens."""
    return mechanism.why_not_blocks(block_size) is None


def sizes_of(case: Case) -> list[int]:
    """Sizes of blocks, more than one token and less than all, that a case takes: the least and the largest."""
    mechanism = case.example
    able = [size for size in SIZES[1:-1] if can(mechanism, size)]
    return sorted({able[0], able[-1]}) if able else []


COMPLETE = [case for case in CASES if not case.leaves_out]
ABLE = [(case, size) for case in COMPLETE for size in sizes_of(case)]
SIZED = [case for case in COMPLETE if sizes_of(case) and not marks_of(case)]
ALWAYS = [(case, sizes_of(case)[place % 2 - 1]) for place, case in enumerate(SIZED)]
"""Cases that run always, each with one size: the least and the largest in turn."""
PAIRS = [
    pytest.param(*pair, id=f"{pair[0]} blocks of {pair[1]}", marks=[pytest.mark.full] * (pair not in ALWAYS))
    for pair in ABLE
]
ONCE = [
    pytest.param(case, size, id=f"{case} blocks of {size}", marks=marks_of(case))
    for case, size in ABLE
    if size == sizes_of(case)[0]
]
"""With the least size of a block alone."""


def blockwise(mechanism: attention.Mechanism, inputs: tuple[Tensor, ...], block_size: int, **options) -> Tensor:
    query, key, value, hidden = inputs
    return mechanism(query, key, value, hidden=hidden, block_size=block_size, **options)


def through_own_block(mechanism: attention.Mechanism, inputs: tuple[Tensor, ...], block_size: int) -> Tensor:
    """The definition: a block is what attention to both sides gives the last tokens of all that it may see."""
    length, outputs = inputs[0].shape[2], []
    for start in range(0, length, block_size):
        stop = min(start + block_size, length)
        seen = tuple(x.narrow(-2, 0, stop) for x in inputs)
        outputs.append(run(mechanism, seen, causal=False)[:, :, start:])
    return torch.cat(outputs, 2)


def extend_over(
    mechanism: attention.Mechanism, inputs: tuple[Tensor, ...], sizes: list[int], block_size: int
) -> Tensor:
    """The output of `extend` over a sequence split into spans of these sizes."""
    state, outputs, edges = mechanism.init_state(inputs[0].shape[0], dtype=inputs[0].dtype), [], [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    for start, stop in pairwise(edges):
        query, key, value, hidden = (x.narrow(-2, start, stop - start) for x in inputs)
        output, state = mechanism.extend(query, key, value, state, hidden=hidden, block_size=block_size)
        outputs.append(output)
    return torch.cat(outputs, 2)


def test_the_mechanisms_that_can():
    """A change here is one of the table in docs/encoders.md."""
    assert {case.name for case, _ in ABLE} == {
        *("softmax", "polynomial", "squared-polynomial", "polysketch", "polysketch-window", "polysketch-paper"),
        *("polysketch-heavy", "linear", "performer", "based", "hedgehog", "symmetric-power", "llops"),
        *("sliding-window", "local"),
    }


@pytest.mark.parametrize(("case", "block_size"), [pair for pair in PAIRS if pair.values[0].example.is_bidirectional])
def test_a_block_sees_what_it_sees_of_both_sides_where_nothing_follows_it(case: Case, block_size: int):
    mechanism = case.build()
    inputs = tuple(x.requires_grad_() for x in case.inputs())
    found, expected = (each(mechanism, inputs, block_size) for each in (blockwise, through_own_block))
    torch.testing.assert_close(found, expected, **TIGHT)
    upstream = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(7))
    wanted = [*inputs, *mechanism.parameters()]
    gradients = [
        torch.autograd.grad(output, wanted, upstream, allow_unused=True, materialize_grads=True)
        for output in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize(("case", "block_size"), PAIRS)
def test_a_token_sees_its_own_block_and_nothing_of_later_ones(case: Case, block_size: int):
    mechanism, inputs, others = case.build(), case.inputs(), case.inputs(seed=2)
    start = LENGTH // block_size // 2 * block_size
    last, before = min(start + block_size, LENGTH) - 1, blockwise(mechanism, inputs, block_size)
    for token in (last, last + 1):
        only = (torch.arange(LENGTH) == token)[:, None]
        changed = (inputs[0], *(torch.where(only, y, x) for x, y in zip(inputs[1:3], others[1:3], strict=True)))
        after = blockwise(mechanism, (*changed, inputs[3]), block_size)
        difference = (after - before).abs().amax((0, 1, 3))
        unchanged = difference[: last + 1] <= 1e-15  # of float64: other sizes of products round otherwise
        assert bool(unchanged.all()) == (token > last)
        if token == last:
            assert not difference[:start].any()
            assert (difference[max(start, last - case.first_sees + 1) : last + 1] > 1e-7).all()


@pytest.mark.parametrize("case", others_full([case for case in COMPLETE if can(case.example, 1)]), ids=str)
def test_blocks_of_one_token_are_causal_attention(case: Case):
    mechanism, inputs = case.build(), case.inputs()
    torch.testing.assert_close(blockwise(mechanism, inputs, 1), run(mechanism, inputs), **TIGHT)


@pytest.mark.parametrize(
    "case", others_full([case for case in COMPLETE if can(case.example, 48) and case.example.is_bidirectional]), ids=str
)
def test_a_block_of_everything_is_attention_to_both_sides(case: Case):
    mechanism, inputs = case.build(), case.inputs()
    both = run(mechanism, inputs, causal=False)
    torch.testing.assert_close(blockwise(mechanism, inputs, 48), both, **TIGHT)


@pytest.mark.parametrize(("case", "block_size"), PAIRS)
def test_forward_equals_extend_over_blocks(case: Case, block_size: int):
    mechanism, inputs = case.build(), case.inputs()
    expected = blockwise(mechanism, inputs, block_size)
    blocks = [block_size] * (LENGTH // block_size)
    for sizes in (blocks, [blocks[0], sum(blocks[1:])]):
        found = extend_over(mechanism, inputs, [*sizes, LENGTH % block_size], block_size)
        torch.testing.assert_close(found, expected, **TIGHT)


@pytest.mark.parametrize(("case", "block_size"), ONCE)
def test_a_state_inside_a_block_is_refused_and_stays(case: Case, block_size: int):
    mechanism, inputs = case.build(), case.inputs()
    state = mechanism.init_state(BATCH, dtype=torch.float64)
    parts = [tuple(x.narrow(-2, *span) for x in inputs) for span in ((0, 3), (3, 1), (4, block_size))]
    for part in parts[:1]:
        mechanism.extend(*part[:3], state, hidden=part[3], block_size=block_size)
    with pytest.raises(ValueError, match=r"between two blocks of block_size=\d+ tokens, got rows after \[3, 3\]"):
        mechanism.extend(*parts[1][:3], state, hidden=parts[1][3], block_size=block_size)
    assert state.position.tolist() == [3, 3]


@pytest.mark.parametrize("count", [5, 8])
@pytest.mark.parametrize(("case", "block_size"), ONCE)
def test_blocks_count_from_the_first_real_token(case: Case, block_size: int, count: int):
    mechanism, inputs = case.build(), case.inputs()
    padded, mask = pad_left(inputs, row=0, count=count)
    expected, found = blockwise(mechanism, inputs, block_size), blockwise(mechanism, padded, block_size, key_mask=mask)
    torch.testing.assert_close(found[0, :, count:], expected[0], **TIGHT)
    torch.testing.assert_close(found[1], blockwise(mechanism, padded, block_size)[1], **TIGHT)
    state = mechanism.init_state(BATCH, dtype=torch.float64)
    query, key, value, hidden = padded
    read, _ = mechanism.extend(query, key, value, state, hidden=hidden, block_size=block_size, key_mask=mask)
    torch.testing.assert_close(read[0, :, count:], expected[0], **TIGHT)
    torch.testing.assert_close(read[1], found[1], **TIGHT)


@pytest.mark.parametrize(("case", "block_size"), ONCE)
def test_packed_documents_have_blocks_of_their_own(case: Case, block_size: int):
    mechanism = case.build()
    tensors = given_to(mechanism, case, LENGTHS)
    found = mechanism.forward_packed(
        *tensors[:3], offsets(LENGTHS), block_size=block_size, **named(mechanism, tensors[3:])
    )
    every = zip(*(x.split(LENGTHS, -2) for x in tensors), strict=True)
    apart = [mechanism(*x[:3], block_size=block_size, **named(mechanism, list(x[3:]))) for x in every]
    torch.testing.assert_close(found, torch.cat(apart, 2), **TIGHT)


@pytest.mark.parametrize(("case", "block_size"), ONCE)
def test_float32_programs_agree(case: Case, block_size: int):
    """Programs of a CPU too, whose arithmetic float64 does not run."""
    exact = blockwise(case.build(), case.inputs(), block_size)
    found = blockwise(case.build().float(), case.inputs(dtype=torch.float32), block_size)
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", [case for case in CASES if not case.example.is_blockwise], ids=str)
def test_a_mechanism_that_cannot_names_those_that_can(case: Case):
    mechanism, inputs = case.build(), case.inputs()
    with pytest.raises(ValueError, match=r"softmax, polynomial|decay_gate=True") as error:
        blockwise(mechanism, inputs, 4)
    assert "\n" not in str(error.value)
    if mechanism.is_causal:
        state = mechanism.init_state(BATCH, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"softmax, polynomial|decay_gate=True"):
            mechanism.extend(*inputs[:3], state, hidden=inputs[3], block_size=4)


@pytest.mark.parametrize("case", others_full([case for case in COMPLETE if sizes_of(case)]), ids=str)
def test_sizes_that_mean_nothing_are_refused(case: Case):
    mechanism, inputs = case.build(), case.inputs()
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        blockwise(mechanism, inputs, 0)
    with pytest.raises(TypeError, match=r"block_size must be an integer, got 2\.0"):
        blockwise(mechanism, inputs, 2.0)
    with pytest.raises(ValueError, match="causal"):
        blockwise(mechanism, inputs, 4, causal=False)
    refused = [size for size in (5, 9, 16) if not can(mechanism, size)]
    for size in refused:
        with pytest.raises(ValueError, match=rf"block_size must .* got {size}"):
            blockwise(mechanism, inputs, size)
