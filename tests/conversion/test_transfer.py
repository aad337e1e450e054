"""Attention transfer: an exact copy has no error, the model computes as before, and layers do not touch one another."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from polysketch import replace_attention
from polysketch.conversion import AttentionTransfer, LayerTransfer
from polysketch.conversion.distillation import frozen_copy
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
    begin_transfer(AttentionTransfer(model), model).loss(ids).backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if ".polysketch." in name}
    assert with_gradient <= changed_tensors(model).keys()
    assert all("polysketch" in name or name.startswith("buffer/") for name in changed_tensors(model))


def test_a_mechanism_that_reads_more_learns_from_all_of_it(model, ids):
    """Every weight has a gradient: of features of vectors before rotary positions, and of the layer's input."""
    replace_attention(model, "polysketch", window=4, sketch_size=6)
    begin_transfer(AttentionTransfer(model), model).loss(ids).backward()
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


def replaced_with_teacher(model, **options):
    teacher = frozen_copy(model)
    return replace_attention(model, "polysketch-paper", local_chunk=4, **options), teacher


def test_a_layer_that_is_its_teacher_has_no_error(model, ids):
    teacher = frozen_copy(model)
    errors = LayerTransfer(replace_attention(model, "softmax"), teacher).errors(ids)
    assert list(errors) == [0, 1]
    assert all(error < 1e-10 for error in errors.values())


def test_the_error_of_a_layer_is_that_of_its_output_on_what_the_teacher_gives_it(model, ids):
    """Behind the last projection; the first layer's error does not reach the second."""
    model, teacher = replaced_with_teacher(model)
    given, wanted = {}, {}
    for index, layer in enumerate(teacher.model.layers):
        layer.register_forward_hook(lambda _, args, __, at=index: given.__setitem__(at, args[0]))
        layer.self_attn.register_forward_hook(lambda _, __, output, at=index: wanted.__setitem__(at, output[0]))
    teacher(input_ids=ids, use_cache=False)
    found = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, at=index: (given[at], *args[1:]))
        layer.self_attn.register_forward_hook(lambda _, __, output, at=index: found.__setitem__(at, output[0]))
    model(input_ids=ids, use_cache=False)
    errors = LayerTransfer(model, teacher).errors(ids)
    for index in (0, 1):
        squares = [x.square().sum((1, 2)) for x in (found[index] - wanted[index], wanted[index])]
        assert errors[index].item() == pytest.approx((squares[0] / squares[1]).mean().item(), rel=1e-4)
        assert errors[index] > 0.01


def test_whole_layers_learn_each_from_its_own_error(model, ids):
    """Projections and mechanism; nothing else of the model, nor of its teacher."""
    model, teacher = replaced_with_teacher(model)
    transfer = begin_transfer(LayerTransfer(model, teacher), model)
    transfer.errors(ids)[0].backward()
    assert all(parameter.grad.any() for parameter in transfer.layers["0"].parameters())
    assert all(parameter.grad is None for parameter in transfer.layers["1"].parameters())
    transfer.loss(ids).backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if ".self_attn." in name}
    assert with_gradient <= changed_tensors(model).keys()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_no_hook_stays_behind(model, ids):
    model, teacher = replaced_with_teacher(model)
    hooks = [dict(module._forward_hooks) for each in (model, teacher) for module in each.modules()]
    LayerTransfer(model, teacher).errors(ids)
    assert hooks == [dict(module._forward_hooks) for each in (model, teacher) for module in each.modules()]
