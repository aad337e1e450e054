"""The same seed gives the same function, and the same function gives the same numbers, under checkpointing too."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention.cases import Case
from polysketch import attention


def output_and_gradients(mechanism: attention.Mechanism, case: Case, *, checkpointed: bool) -> list[Tensor]:
    """The output, then the gradients of query, key, value and every parameter that has one."""
    query, key, value, hidden = (x.requires_grad_() for x in case.inputs(dtype=torch.float32))

    def attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        return mechanism(query, key, value, hidden=hidden, causal=mechanism.is_causal)

    arguments = (query, key, value, hidden)
    # Without the generator's state of forward in backward, which would hide a draw in forward.
    options = {"use_reentrant": False, "preserve_rng_state": False}
    output = checkpoint(attend, *arguments, **options) if checkpointed else attend(*arguments)
    torch.rand(1)
    inputs = (query, key, value, *mechanism.parameters())
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


def assert_all_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_seed_gives_the_function(case: Case):
    one, same, other = (case.build(seed=seed, dtype=torch.float32) for seed in (3, 3, 4))
    assert_all_equal(list(one.state_dict().values()), list(same.state_dict().values()))
    first, again, another = (output_and_gradients(x, case, checkpointed=False) for x in (one, same, other))
    assert_all_equal(again, first)
    assert not one.state_dict() or not torch.equal(another[0], first[0])


def test_the_function_does_not_depend_on_the_global_generator_nor_draws_from_it(case: Case):
    mechanism, outputs = case.build(dtype=torch.float32), []
    for seed in (5, 6):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        query, key, value, hidden = case.inputs(dtype=torch.float32)
        outputs.append(mechanism(query, key, value, hidden=hidden, causal=mechanism.is_causal))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*outputs)


def test_activation_checkpointing_gives_the_same_output_and_gradients(case: Case):
    mechanism = case.build(dtype=torch.float32)
    plain, checkpointed = (output_and_gradients(mechanism, case, checkpointed=flag) for flag in (False, True))
    assert_all_equal(checkpointed, plain)
