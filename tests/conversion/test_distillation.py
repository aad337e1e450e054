"""Distillation: the divergence from what the model gave before, with a teacher that nothing changes."""

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from polysketch import replace_attention
from polysketch.conversion import ConversionConfig
from polysketch.conversion.distillation import Distillation, frozen_copy
from polysketch.conversion.stages import begin_distillation
from polysketch.conversion.task import changed_tensors
from polysketch.training.options import StepOptions
from polysketch.training.step import Updater


@pytest.fixture
def model(softmax_model):
    return AutoModelForCausalLM.from_pretrained(softmax_model)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(97, 117, (2, 33), generator=torch.Generator().manual_seed(0))


def replaced(model):
    """With a mechanism that knows nothing of the model."""
    torch.manual_seed(0)
    return replace_attention(model, "polysketch-paper", local_chunk=4, sketch_size=8)


def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient(model, ids):
    distillation = Distillation(model, frozen_copy(model))
    loss = distillation.loss(ids)
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in distillation.parameters())


def test_the_loss_is_the_divergence_of_the_models_own_logits(model, ids):
    teacher = frozen_copy(model)
    student = replaced(model)
    with torch.no_grad():
        logits = [each(ids[:, :-1], use_cache=False).logits.double() for each in (student, teacher)]
        found = Distillation(student, teacher).loss(ids)
    log_student, log_teacher = (each.log_softmax(-1).flatten(0, 1) for each in logits)
    expected = kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    assert expected > 0.3  # replacing attention costs
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_all_weights_and_mechanisms_learn_and_the_teacher_stays_as_it_was(model, ids, options):
    teacher = frozen_copy(model)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    trained = begin_distillation(replaced(model), teacher, ConversionConfig(**options, out="out"))
    assert model.training
    updater = Updater(trained, StepOptions(steps=4, warmup=0, learning_rate=3e-3), torch.float32)
    losses = []
    for step in range(4):
        losses.append(updater.compute_gradient(ids).loss)
        assert all(parameter.grad.any() for parameter in model.parameters())
        updater.apply(step)
    assert losses[-1] < losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in teacher.parameters())


def test_the_teacher_is_in_no_checkpoint(model, options):
    """Neither among the tensors nor with the optimizer, which go by the parameters of the two."""
    teacher = frozen_copy(model)
    trained = begin_distillation(replaced(model), teacher, ConversionConfig(**options, out="out"))
    assert changed_tensors(model).keys() >= dict(model.named_parameters()).keys()
    kept = {tensor.data_ptr() for tensor in (*changed_tensors(model).values(), *trained.state_dict().values())}
    assert not kept & {tensor.data_ptr() for tensor in teacher.state_dict().values()}
    assert sum(each.numel() for each in trained.parameters()) == sum(each.numel() for each in model.parameters())


def test_the_teacher_has_no_dropout_while_the_student_has(ids):
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.5, bos_token_id=None, eos_token_id=None)).train()
    teacher = frozen_copy(model)
    assert not any(module.training for module in teacher.modules())
    assert Distillation(frozen_copy(model), teacher).loss(ids) == 0
    assert Distillation(model, teacher).loss(ids) > 0.001
    assert model.training


def test_gradients_do_not_depend_on_the_parts_a_batch_is_computed_in(model, ids):
    teacher = frozen_copy(model)
    distillation = Distillation(replaced(model), teacher)
    parameters = list(distillation.parameters())
    whole = torch.autograd.grad(distillation.loss(ids), parameters)
    parts = torch.autograd.grad((distillation.loss(ids[:1]) + distillation.loss(ids[1:])) / 2, parameters)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(one.abs().max()))


def test_capped_logits_are_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, final_logit_softcapping=0.01)).eval()
    with pytest.raises(ValueError, match="it scales, caps or transforms"):
        Distillation(model, frozen_copy(model))
