"""Our encoders in transformers compute what the models of this library compute, with every head, saved and loaded."""

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from models.test_encoder import BOTH_SIDES, OPTIONS
from polysketch.integrations.huggingface import (
    PolysketchConfig,
    PolysketchEncoderConfig,
    PolysketchEncoderForMaskedLM,
    PolysketchEncoderForSequenceClassification,
    PolysketchEncoderForTokenClassification,
    PolysketchEncoderModel,
)
from polysketch.models import (
    EncoderConfig,
    MaskedLanguageModel,
    SequenceClassifier,
    TokenClassifier,
    TransformerEncoder,
)
from polysketch.models.answering import encoder_preset

VOCABULARY, LENGTH, CLASSES = 41, 37, 3


def sizes(attention: str = "linear", **changes) -> EncoderConfig:
    fields = {"attention": attention, "attention_options": OPTIONS.get(attention, {}), "input_positions": True}
    return EncoderConfig(VOCABULARY, 2, hidden_size=32, num_heads=2, **{**fields, **changes})


def stirred(model: nn.Module) -> nn.Module:
    """No weight is what it was drawn as, nor 0, in evaluation mode."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(seed))


HEADS = {
    "masked": (MaskedLanguageModel, PolysketchEncoderForMaskedLM, AutoModelForMaskedLM, ()),
    "mean": (SequenceClassifier, PolysketchEncoderForSequenceClassification, AutoModelForSequenceClassification, (3,)),
    "each": (TokenClassifier, PolysketchEncoderForTokenClassification, AutoModelForTokenClassification, (3,)),
}


def own(head: str, attention: str = "linear", **changes):
    torch.manual_seed(0)
    kind, _, _, arguments = HEADS[head]
    return stirred(kind(sizes(attention, **changes), *arguments))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name not in ("polysketch-heavy", "performer", "nystrom")))
        for name in BOTH_SIDES
    ],
)
def test_every_mechanism_is_saved_and_loaded_bit_for_bit(name, tmp_path):
    model, ids = own("masked", name), tokens()
    wrapped = PolysketchEncoderForMaskedLM.from_transformer(model)
    assert torch.equal(wrapped(ids).logits, model(ids))
    wrapped.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is PolysketchEncoderForMaskedLM
    assert torch.equal(loaded(ids).logits, model(ids))
    assert loaded.inner.config == model.encoder.config
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state, model.encoder(ids))


@pytest.mark.parametrize("head", HEADS)
def test_every_head_is_saved_and_loaded_bit_for_bit(head, tmp_path):
    """With padding on either side, learned positions, and the names of labels."""
    model, ids, mask = own(head, learned_positions=LENGTH), tokens(), torch.ones(3, LENGTH, dtype=torch.int64)
    mask[0, -9:], mask[1, :9] = 0, 0
    _, ours, auto, arguments = HEADS[head]
    names = {"id2label": dict(enumerate("abc"))} if arguments else {}
    ours.from_transformer(model, **names).save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids, attention_mask=mask).logits, model(ids, key_mask=mask.bool()))
    assert not names or loaded.config.id2label == names["id2label"]
    assert loaded.config.to_model_config() == model.encoder.config


def test_what_no_checkpoint_holds_is_computed_anew(tmp_path):
    options = {"linear": True, "coefficients": 2}
    model, ids = own("masked", "squared-polynomial", attention_options=options), tokens()
    assert dict(model.named_buffers()).keys() - model.state_dict().keys()
    PolysketchEncoderForMaskedLM.from_transformer(model).save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN
    try:
        loaded = PolysketchEncoderForMaskedLM.from_pretrained(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(loaded(ids).logits, model(ids))


def test_auto_classes_make_our_models_of_a_configuration_alone(tmp_path):
    config = AutoConfig.for_model("polysketch-encoder", num_layers=1, hidden_size=16, num_heads=1)
    assert type(AutoModel.from_config(config)) is PolysketchEncoderModel
    for _, ours, auto, _ in HEADS.values():
        assert type(auto.from_config(config)) is ours
    PolysketchEncoderConfig.from_preset("gpt2-small", classifier_pooling="first").save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_model_config() == encoder_preset("gpt2-small")
    assert again.classifier_pooling == "first"
    assert PolysketchEncoderConfig().to_model_config() == EncoderConfig.from_dict(
        {**encoder_preset("tiny").to_dict(), "attention": "polysketch-paper"}
    )


@pytest.mark.parametrize("head", ["mean", "each"])
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_head_is_put_on_a_trained_encoder(head, pooling, tmp_path):
    """The encoder's weights are those that were saved; the head alone is new, and every parameter learns."""
    model, ids = own("masked"), tokens()
    PolysketchEncoderForMaskedLM.from_transformer(model).save_pretrained(tmp_path)
    found = HEADS[head][2].from_pretrained(tmp_path, num_labels=CLASSES, classifier_pooling=pooling)
    assert all(torch.equal(x, model.encoder.state_dict()[name]) for name, x in found.inner.state_dict().items())
    assert found.output.weight.std() > 0.05
    assert not found.output.bias.any()
    labels = torch.tensor([0, 2, 1]) if head == "mean" else ids % CLASSES
    found.train()(ids, labels=labels).loss.backward()
    assert [name for name, weight in found.named_parameters() if weight.grad is None or not weight.grad.any()] == []
    alone = PolysketchEncoderModel.from_pretrained(tmp_path)
    torch.testing.assert_close(alone(ids).last_hidden_state, model.encoder(ids), rtol=0, atol=0)


class TestLoss:
    """With labels."""

    @pytest.mark.parametrize("head", ["masked", "each"])
    def test_of_tokens_is_the_models_own_and_leaves_out_what_is_marked(self, head):
        model, ids = own(head), tokens()
        chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5
        targets = (tokens(1) % CLASSES).masked_fill(chosen, -100)
        wrapped = HEADS[head][1].from_transformer(model)
        found = wrapped(ids, labels=targets)
        torch.testing.assert_close(found.loss, model.loss(ids, targets))
        expected = nn.functional.cross_entropy(found.logits.transpose(1, 2), targets)
        torch.testing.assert_close(found.loss, expected)
        count = (targets != -100).sum()
        torch.testing.assert_close(wrapped(ids, labels=targets, num_items_in_batch=7).loss, expected * count / 7)
        assert wrapped(ids, labels=torch.full_like(ids, -100)).loss == 0
        with pytest.raises(ValueError, match=r"labels of shape \(3, 37\), got \(3, 36\)"):
            wrapped(ids, labels=targets[:, 1:])

    def test_of_masked_tokens_needs_no_logits(self):
        wrapped, ids = PolysketchEncoderForMaskedLM.from_transformer(own("masked")), tokens()
        found = wrapped(ids, labels=ids, skip_logits=True)
        assert found.logits is None
        assert torch.equal(found.loss, wrapped(ids, labels=ids).loss)

    def test_of_texts_is_the_models_own(self):
        model, ids, targets = own("mean"), tokens(), torch.tensor([2, 0, 1])
        found = PolysketchEncoderForSequenceClassification.from_transformer(model)(ids, labels=targets)
        torch.testing.assert_close(found.loss, model.loss(ids, targets))


class TestPadding:
    """An attention mask."""

    @pytest.mark.parametrize("head", HEADS)
    @pytest.mark.parametrize("attention", ["linear", "softmax", "polysketch-paper"])
    def test_changes_nothing_on_either_side(self, head, attention):
        model, ids = HEADS[head][1].from_transformer(own(head, attention)).double(), tokens()
        mask = torch.ones_like(ids)
        mask[0, -20:], mask[1, :20], mask[2, :3], mask[2, -4:] = 0, 0, 0, 0
        found = model(ids, attention_mask=mask).logits
        for row, real in enumerate((slice(0, -20), slice(20, None), slice(3, -4))):
            alone = model(ids[row : row + 1, real]).logits[0]
            torch.testing.assert_close(found[row] if head == "mean" else found[row, real], alone)
        assert (model(ids).logits - found).abs().amax((1, -1) if head != "mean" else 1).min() > 1e-4

    def test_that_is_not_understood_is_refused(self):
        model, ids = PolysketchEncoderModel.from_transformer(TransformerEncoder(sizes())), tokens()
        hole, empty = torch.ones_like(ids), torch.ones_like(ids)
        hole[1, 5], empty[2] = 0, 0
        with pytest.raises(ValueError, match="found some between them in row 1"):
            model(ids, attention_mask=hole)
        with pytest.raises(ValueError, match="padding alone in row 2"):
            model(ids, attention_mask=empty)
        with pytest.raises(ValueError, match="attention_mask must be of shape"):
            model(ids, attention_mask=hole[:, 1:])


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("token_type_ids", torch.zeros(3, LENGTH), r"take token_type_ids: let tokenizer\.model_input_names"),
        ("output_attentions", True, "take output_attentions"),
        ("past_key_values", 1, "take past_key_values"),
        ("position_ids", torch.arange(LENGTH).remainder(20)[None], "packed"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(argument, value, message):
    model, ids = PolysketchEncoderModel.from_transformer(TransformerEncoder(sizes())), tokens()[:1]
    with pytest.raises(ValueError, match=message):
        model(ids, **{argument: value})
    assert torch.equal(model(ids, position_ids=torch.arange(LENGTH)[None])[0], model(ids)[0])


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="causal only, and an encoder sees both sides"):
        PolysketchEncoderConfig(attention="polysketch")
    with pytest.raises(ValueError, match="classifier_pooling must be 'mean' or 'first', got 'last'"):
        PolysketchEncoderConfig(classifier_pooling="last")
    with pytest.raises(ValueError, match="input_ids are needed"):
        PolysketchEncoderModel.from_transformer(TransformerEncoder(sizes()))()
    assert not isinstance(PolysketchConfig(), PolysketchEncoderConfig)


def test_gradient_checkpointing_changes_no_gradient():
    ids, gradients = tokens(), []
    model = PolysketchEncoderForMaskedLM.from_transformer(own("masked")).train()
    calls = []
    model.inner.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert len(calls) == 1 + 2
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())


@pytest.mark.parametrize("head", HEADS)
def test_trainer_makes_steps(head, tmp_path):
    """And the loss falls."""
    torch.manual_seed(0)
    model, rows = HEADS[head][1].from_transformer(own(head)), tokens()
    data = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 3 if head == "mean" else row % 3}
        for row in rows
    ]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, learning_rate=3e-3, use_cpu=True, report_to="none", disable_tqdm=True, save_steps=9
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.05
