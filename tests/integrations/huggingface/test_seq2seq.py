"""Sequence to sequence in transformers: what our own model computes, and generation by a state of constant size."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from attention.covering import first_always
from polysketch.integrations.huggingface import (
    PolysketchEncoderDecoderCache,
    PolysketchEncoderDecoderConfig,
    PolysketchEncoderDecoderModel,
    PolysketchForSeq2SeqLM,
)
from polysketch.models import EncoderConfig, EncoderDecoderConfig, ModelConfig, TransformerEncoderDecoder

VOCABULARY, SOURCE, LENGTH, NEW = 41, 19, 13, 14
KINDS: dict[str, dict[str, Any]] = {
    "features": {"own": "linear", "cross": "linear"},
    "kept": {"own": "softmax", "cross": "softmax"},
    "window and sums": {"own": ("based", "sliding-window"), "cross": "based", "window": {"window": 5}},
}


def own(kind: str, **changes) -> TransformerEncoderDecoder:
    """With large weights, so that what it writes is varied."""
    torch.manual_seed(0)
    chosen = KINDS[kind]
    names = chosen["own"]
    options = {} if isinstance(names, str) else {"sliding-window": chosen["window"]}
    encoder = EncoderConfig(VOCABULARY, 2, hidden_size=24, num_heads=2, attention="linear", input_positions=True)
    decoder = ModelConfig(
        VOCABULARY,
        2,
        hidden_size=32,
        num_heads=2,
        **{"attention": names, "attention_options": options, "projection_convolution": 3, **changes},
    )
    model = TransformerEncoderDecoder(EncoderDecoderConfig(encoder, decoder, chosen["cross"])).eval()
    for name, parameter in model.named_parameters():
        parameter.data.add_((0.02 if name == "embedding.weight" else 0.4) * torch.randn_like(parameter))
    return model.double()


@pytest.fixture(scope="module", params=first_always(["window and sums", "kept", "features"], 2))
def model(request) -> PolysketchForSeq2SeqLM:
    return PolysketchForSeq2SeqLM.from_transformer(own(request.param))


def tokens(rows: int = 3, length: int = SOURCE, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded() -> tuple[Tensor, Tensor]:
    """A source padded on the right, on the left, and not at all."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, -7:], mask[1, :6] = 0, 0
    return ids, mask


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    found = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)
    return found


def assert_same(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_our_own_model_does_saved_and_loaded(kind, tmp_path):
    ours, (ids, mask), target = own(kind).float(), padded(), tokens(length=LENGTH, seed=1)
    expected = ours(ids, target, source_mask=mask.bool())
    wrapped = PolysketchForSeq2SeqLM.from_transformer(ours)
    assert torch.equal(wrapped(ids, mask, decoder_input_ids=target).logits, expected)
    wrapped.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is PolysketchForSeq2SeqLM
    assert torch.equal(loaded(ids, mask, decoder_input_ids=target).logits, expected)
    assert loaded.config.to_model_config() == ours.config
    base = AutoModel.from_pretrained(tmp_path)
    hidden = base(ids, mask, decoder_input_ids=target).last_hidden_state
    assert torch.equal(ours.logits(hidden), expected)


def test_what_no_checkpoint_holds_is_computed_anew_on_both_sides(tmp_path):
    torch.manual_seed(0)
    options = {"linear": True, "coefficients": 2}
    side = {"hidden_size": 16, "num_heads": 2, "attention": "squared-polynomial", "attention_options": options}
    config = EncoderDecoderConfig(
        EncoderConfig(VOCABULARY, 1, **side), ModelConfig(VOCABULARY, 1, **side), "squared-polynomial", options
    )
    ours, ids = TransformerEncoderDecoder(config).eval(), tokens()
    assert len(dict(ours.named_buffers()).keys() - ours.state_dict().keys()) == 3
    PolysketchForSeq2SeqLM.from_transformer(ours).save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN
    try:
        loaded = PolysketchForSeq2SeqLM.from_pretrained(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(loaded(ids, decoder_input_ids=ids).logits, ours(ids, ids))


def test_auto_classes_make_our_models_of_a_configuration_alone():
    sides = {name: {"num_layers": 1, "hidden_size": 16, "num_heads": 1} for name in ("encoder", "decoder")}
    config = AutoConfig.for_model("polysketch-encoder-decoder", **sides)
    assert type(AutoModel.from_config(config)) is PolysketchEncoderDecoderModel
    assert type(AutoModelForSeq2SeqLM.from_config(config)) is PolysketchForSeq2SeqLM
    assert PolysketchEncoderDecoderConfig().encoder.attention == "polysketch-paper"


MODES = {
    "greedy": {"no_repeat_ngram_size": 1},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"no_repeat_ngram_size": 1, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_state_gives_what_no_cache_gives(model, mode):
    """From a source padded on either side; beams too, whose rows change places."""
    found, expected = (
        (torch.manual_seed(5), generate(model, *padded(), use_cache=use_cache, **MODES[mode]))[1]
        for use_cache in (True, False)
    )
    assert_same(found, expected)
    assert isinstance(found.past_key_values, PolysketchEncoderDecoderCache)
    assert len(set(found.sequences[:, 1:].flatten().tolist())) > 12


def test_generation_is_teacher_forcing_step_by_step(model):
    """Each token is the best one after all before it, in one pass without a cache."""
    ids, mask = padded()
    found = generate(model, ids, mask)
    forced = model(ids, mask, decoder_input_ids=found.sequences[:, :-1]).logits
    assert torch.equal(forced.argmax(-1), found.sequences[:, 1:])
    torch.testing.assert_close(torch.stack(found.logits, 1), forced.float(), rtol=0, atol=2e-5)


def test_padding_of_the_source_changes_nothing(model):
    ids, mask = padded()
    together = generate(model, ids, mask)
    for row, real in enumerate((slice(0, -7), slice(6, None), slice(None))):
        alone = generate(model, ids[row : row + 1, real])
        assert torch.equal(alone.sequences[0], together.sequences[row])
    assert not torch.equal(generate(model, ids).sequences[:2], together.sequences[:2])


def test_targets_may_be_padded_on_the_left(model):
    """Prompts of several lengths, in one pass and in generation; right padding in one pass alone."""
    ids, prompts = tokens(), tokens(length=6, seed=2)
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0
    prompts[0, 3] = prompts[1:, 0] = 0  # the start token
    whole = model(ids, decoder_input_ids=prompts, decoder_attention_mask=mask).logits
    alone = model(ids[:1], decoder_input_ids=prompts[:1, 3:]).logits
    torch.testing.assert_close(whole[:1, 3:], alone)
    right = model(ids, decoder_input_ids=prompts.flip(1), decoder_attention_mask=mask.flip(1)).logits
    torch.testing.assert_close(right[:1, :3], model(ids[:1], decoder_input_ids=prompts.flip(1)[:1, :3]).logits)
    options = {"decoder_input_ids": prompts[:, 3:], "max_new_tokens": 5}
    prompts[:, 3] = 0
    assert_same(generate(model, ids, **options), generate(model, ids, use_cache=False, **options))
    with pytest.raises(ValueError, match="padding on the left alone"):
        generate(model, ids, decoder_input_ids=prompts, decoder_attention_mask=mask.flip(1))


@pytest.mark.parametrize("with_start", [False, True])
def test_generate_goes_on_from_targets_that_are_padded_on_the_left(model, with_start):
    """Whether the start token stands in them or is put before them, and in rows without padding beside them."""
    ids, start = tokens(), model.config.decoder_start_token_id
    prompts = tokens(length=6, seed=2)
    mask = torch.ones_like(prompts)
    mask[0, :3], mask[1, :1] = 0, 0
    if with_start:
        prompts[0, 3] = prompts[1, 1] = start
        mask[2, :2], prompts[2, 2] = 0, start
    together = generate(model, ids, decoder_input_ids=prompts, decoder_attention_mask=mask, max_new_tokens=5).sequences
    for row in range(3):
        alone = prompts[row : row + 1, mask[row].bool()]
        expected = generate(model, ids[row : row + 1], decoder_input_ids=alone, max_new_tokens=5).sequences
        assert torch.equal(together[row, -5:], expected[0, -5:])
    prompts[:, 0], mask[:, 0], mask[:, 1] = start, 1, 0
    for wrong in (mask, mask[:, 1:]):  # padding behind a start token that was given; another length
        with pytest.raises(ValueError, match=r"padding|of shape"):
            generate(model, ids, decoder_input_ids=prompts, decoder_attention_mask=wrong)


def test_what_is_not_served_is_named(model):
    for part in (model, model.model):
        with pytest.raises(ValueError, match="do not take output_hidden_states: leave it out"):
            part(tokens(), decoder_input_ids=tokens(length=4), output_hidden_states=True)
    with pytest.raises(ValueError, match="assistant_model"):
        model.generate(tokens(), assistant_model=copy.deepcopy(model), max_new_tokens=4)


@pytest.mark.parametrize("kind", first_always(["kept", "window and sums", "features"], 2))
def test_the_cache_depends_on_no_length(kind):
    """On features; keys and values of the source and of the target are kept by softmax."""
    model = PolysketchForSeq2SeqLM.from_transformer(own(kind))
    sizes = {
        (source, new): generate(model, tokens(length=source), max_new_tokens=new).past_key_values.nbytes
        for source, new in ((8, 10), (8, 90), (32, 10))
    }
    if kind == "kept":
        assert sizes[8, 10] < min(sizes[8, 90], sizes[32, 10])
    else:
        assert len(set(sizes.values())) == 1


def test_the_source_is_read_once_and_encoder_outputs_take_its_place(model):
    ids, mask = padded()
    calls = []
    hook = model.inner.encoder.register_forward_pre_hook(lambda *_: calls.append(1))
    expected = generate(model, ids, mask)
    assert len(calls) == 1
    encoded = model.get_encoder()(ids, mask)
    assert_same(generate(model, None, mask, encoder_outputs=encoded), expected)
    target = expected.sequences[:, :5]
    given = model(encoder_outputs=(encoded[0],), attention_mask=mask, decoder_input_ids=target)
    assert torch.equal(given.logits, model(ids, mask, decoder_input_ids=target).logits)
    hook.remove()


def test_a_cache_goes_on_is_copied_reordered_and_forgets(model):
    """Its rows are those of the source too: each goes on as the row it came from, with its own source."""
    (ids, mask), target = padded(), tokens(length=LENGTH, seed=3)
    with torch.no_grad():
        expected = model(ids, mask, decoder_input_ids=target).logits
        begun = model(ids, mask, decoder_input_ids=target[:, :5], use_cache=True)
        torch.testing.assert_close(begun.logits, expected[:, :5])
        rows = torch.tensor([2, 0, 0, 1])
        cache = copy.deepcopy(begun.past_key_values)
        cache.reorder_cache(rows)
        found = model(decoder_input_ids=target[rows, 5:], past_key_values=cache)
        torch.testing.assert_close(found.logits, expected[rows, 5:])
        cache = begun.past_key_values
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0]))
        cache.activate_past_recording()
        model(decoder_input_ids=tokens(2, 4, seed=9), past_key_values=cache)
        cache.crop(-4)
        found = model(decoder_input_ids=target[[2, 0], 5:], past_key_values=cache)
        torch.testing.assert_close(found.logits, expected[[2, 0], 5:])
        cache.reset()
        with pytest.raises(ValueError, match="a source is needed"):
            model(decoder_input_ids=target, past_key_values=cache)


class TestLoss:
    """With labels."""

    def test_is_the_models_own(self, model):
        """The target is made of the labels: the start token first, and nothing of what is not to be predicted."""
        (ids, mask), labels = padded(), tokens(length=LENGTH, seed=4)
        labels[0, 6:] = -100
        target = torch.nn.functional.pad(labels[:, :-1].clamp(min=0), (1, 0))
        expected = model.inner.loss(ids, target, labels, source_mask=mask.bool())
        found = model(ids, mask, labels=labels)
        torch.testing.assert_close(found.loss, expected)
        assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), target)
        count = (labels != -100).sum()
        again = model(ids, mask, decoder_input_ids=target, labels=labels, num_items_in_batch=7, skip_logits=True)
        torch.testing.assert_close(again.loss, expected * count / 7)
        assert again.logits is None
        with pytest.raises(ValueError, match="labels of shape"):
            model(ids, decoder_input_ids=target, labels=labels[:, 1:])

    @pytest.mark.parametrize("shape", [(), (5,), (2, 5), (1, 5), (3, 5, 2)])
    def test_labels_that_fit_no_source_are_named(self, model, shape):
        labels = torch.ones(shape, dtype=torch.int64)
        found = rf"expected labels of shape \(3, length\), .* found \({', '.join(map(str, shape))},?\)"
        for source in ({"input_ids": tokens()}, {"encoder_outputs": model.get_encoder()(tokens())}):
            with pytest.raises(ValueError, match=found):
                model(**source, labels=labels)
        with pytest.raises(ValueError, match="expected decoder_input_ids of shape"):
            model(tokens(), decoder_input_ids=labels)
        if len(shape) != 2:
            with pytest.raises(ValueError, match=r"expected labels of shape \(batch, length\), found"):
                model.prepare_decoder_input_ids_from_labels(labels)

    def test_checkpointed_blocks_give_the_same_gradients(self):
        ids, labels, gradients = tokens(), tokens(length=LENGTH, seed=4), []
        model = PolysketchForSeq2SeqLM.from_transformer(own("features")).train()
        calls = []
        for block in (model.inner.encoder.blocks[0], model.inner.blocks[0]):
            block.register_forward_pre_hook(lambda *_: calls.append(1))
        for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
            enable()
            model.zero_grad()
            model(ids, labels=labels).loss.backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert len(calls) == 2 + 4
        assert all(gradient.any() for gradient in gradients[0].values())
        assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())

    def test_a_trainer_makes_steps_and_generates(self, tmp_path):
        """And the loss falls."""
        model = PolysketchForSeq2SeqLM.from_transformer(own("features").float())
        data = [
            {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[:5]} for row in tokens(8, seed=6)
        ]
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path),
            max_steps=4,
            learning_rate=3e-3,
            predict_with_generate=True,
            generation_max_length=7,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_steps=9,
        )
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=data, eval_dataset=data)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < before - 0.05


def test_a_source_without_a_token_is_named(model):
    empty, target = tokens(length=0), tokens(length=LENGTH)
    wide = torch.zeros(3, 0, 24, dtype=torch.float64)
    for source in ({"input_ids": empty}, {"encoder_outputs": (wide,)}):
        for written in ({"labels": target}, {"decoder_input_ids": target}):
            with pytest.raises(ValueError, match=r"token in every row that the encoder reads, .* \(3, 0\)"):
                model(**source, **written)
    with pytest.raises(ValueError, match="token in every row that the encoder reads"):
        generate(model, empty)


def test_what_is_not_understood_is_refused(model):
    ids, target = tokens(), tokens(length=LENGTH)
    hole = torch.ones_like(ids)
    hole[1, 4] = 0
    for arguments, message in (
        ({"input_ids": ids}, "decoder_input_ids are needed"),
        ({"decoder_input_ids": target}, "a source is needed"),
        ({"input_ids": ids, "decoder_input_ids": target, "attention_mask": hole}, "in row 1"),
        ({"input_ids": ids, "decoder_input_ids": target, "inputs_embeds": 1}, "do not take inputs_embeds"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**arguments)
    with pytest.raises(TypeError, match="expected a PolysketchEncoderDecoderCache"):
        model(ids, decoder_input_ids=target, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2, pad_token_id=0)
