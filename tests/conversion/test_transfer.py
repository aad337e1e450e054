"""Attention transfer: an exact copy has no error, the model computes as before, and layers do not touch one another."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from polysketch import replace_attention
from polysketch.conversion import AttentionTransfer
from polysketch.conversion.stages import begin_transfer
from polysketch.conversion.task import changed_tensors


@pytest.fixture
def model(softmax_model):
    return AutoModelForCausalLM.from_pretrained(softmax_model)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(97, 117, (2, 32), generator=torch.Generator().manual_seed(0))


def test_softmax_attention_copies_itself(model, ids):
    errors = AttentionTransfer(replace_attention(model, "softmax")).errors(ids)
    assert list(errors) == [0, 1]
    assert all(error < 1e-10 for error in errors.values())


def test_layers_see_what_the_softmax_model_computes(model, ids):
    """The second layer's error is the same whatever stands in the first."""
    alone = replace_attention(model, "polysketch-paper", layers=[1], local_chunk=4)
    mechanism = alone.model.layers[1].self_attn.polysketch
    expected = AttentionTransfer(alone).errors(ids)[1]
    both = replace_attention(model, "polysketch-paper", layers=[0], local_chunk=4)
    assert both.model.layers[1].self_attn.polysketch is mechanism
    assert torch.equal(AttentionTransfer(both).errors(ids)[1], expected)
    assert expected > 0.01


def test_each_error_has_gradients_in_its_own_mechanism_alone(model, ids):
    transfer = AttentionTransfer(replace_attention(model, "polysketch-paper", local_chunk=4))
    transfer.errors(ids)[0].backward()
    first, second = transfer.mechanisms["0"], transfer.mechanisms["1"]
    assert all(parameter.grad.abs().sum() > 0 for parameter in first.parameters())
    assert all(parameter.grad is None for parameter in second.parameters())


def test_the_models_own_weights_get_no_gradient(model, ids):
    """None is even computed for them, and a checkpoint of the stage holds the mechanisms alone."""
    replace_attention(model, "polysketch-paper", local_chunk=4)
    begin_transfer(model).loss(ids).backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if ".polysketch." in name}
    assert with_gradient <= changed_tensors(model).keys()
    assert all("polysketch" in name or name.startswith("buffer/") for name in changed_tensors(model))


def test_a_mechanism_that_reads_more_learns_from_all_of_it(model, ids):
    """Every weight has a gradient: of features of vectors before rotary positions, and of the layer's input."""
    replace_attention(model, "polysketch", window=4, sketch_size=6)
    begin_transfer(model).loss(ids).backward()
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if ".polysketch." in name}
    assert {"far_logit.weight", "strength_logit.weight"} <= {name.split(".polysketch.")[1] for name in trained}
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in trained.values())


def test_the_relative_error_of_nothing_is_one(model, ids):
    transfer = AttentionTransfer(replace_attention(model, "linear"))
    for mechanism in transfer.mechanisms.values():
        mechanism.forward = lambda query, key, value, **others: torch.zeros_like(query)
    assert transfer.errors(ids)[0] == pytest.approx(1.0)


def test_gradients_do_not_depend_on_the_parts_a_batch_is_computed_in(model):
    """Rows whose attention differs in size count alike."""
    transfer = AttentionTransfer(replace_attention(model, "polysketch-paper", local_chunk=4))
    ids = torch.stack([torch.full((33,), 97), torch.randint(97, 117, (33,), generator=torch.manual_seed(1))])
    whole = torch.autograd.grad(transfer.loss(ids), list(transfer.parameters()))
    parts = torch.autograd.grad((transfer.loss(ids[:1]) + transfer.loss(ids[1:])) / 2, list(transfer.parameters()))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(one.abs().max()))


def test_silent_attention_is_no_reason_for_nan(model, ids):
    transfer = AttentionTransfer(replace_attention(model, "polysketch-paper", local_chunk=4))
    torch.nn.init.zeros_(model.model.layers[0].self_attn.v_proj.weight)
    assert all(error.isfinite() for error in transfer.errors(ids).values())
