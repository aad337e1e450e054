"""Our models in transformers compute what TransformerLM computes: every mechanism, saved and loaded, with labels."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
)

from integrations.huggingface.counting import SHOWN, VOCABULARY, counting, train_counting
from polysketch.attention import MECHANISMS
from polysketch.integrations.huggingface import (
    PolysketchCache,
    PolysketchConfig,
    PolysketchForCausalLM,
    PolysketchForSequenceClassification,
    PolysketchModel,
)
from polysketch.models import PRESETS, ModelConfig, TransformerLM

NOT_CAUSAL = {name for name, mechanism in MECHANISMS.items() if not mechanism.is_causal}
OPTIONS = {
    "polysketch": {"window": 7, "sketch_size": 4},
    "polysketch-paper": {"local_chunk": 8, "sketch_size": 8},
    "polysketch-heavy": {"local_chunk": 8, "sketch_size": 4},
    "sliding-window": {"window": 7},
    "local": {"local_chunk": 8},
    "hyper": {"min_length": 16, "chunk_size": 4, "sample_size": 4},
}
LENGTH = 37

MOST = [*SHOWN, "softmax", pytest.param("performer", marks=pytest.mark.full)]


def tiny(attention: str = "polysketch-paper", **changes) -> TransformerLM:
    """An untrained model in evaluation mode."""
    torch.manual_seed(0)
    options = {"attention_options": OPTIONS.get(attention, {})} | changes
    return TransformerLM(ModelConfig(VOCABULARY, 2, hidden_size=32, num_heads=2, attention=attention, **options)).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    """Three rows."""
    return counting(3, LENGTH, torch.Generator().manual_seed(0))


KEEPING_NUMBERS = ("hyper", "llops", "performer", "polysketch", "polysketch-heavy")
"""Whose random numbers or derived ones have to come back; the others in the full product."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name not in KEEPING_NUMBERS))
        for name in sorted(MECHANISMS.keys() - NOT_CAUSAL)
    ],
)
def test_every_mechanism_is_saved_and_loaded_bit_for_bit(name, ids, tmp_path):
    """By the Auto class, with its fixed and random features; the same numbers as without transformers around it."""
    transformer = tiny(name)
    expected = transformer(ids)
    wrapped = PolysketchForCausalLM.from_transformer(transformer)
    assert torch.equal(wrapped(ids).logits, expected)
    wrapped.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is PolysketchForCausalLM
    assert torch.equal(loaded(ids).logits, expected)
    assert loaded.inner.config == transformer.config
    if name != "hyper":  # exact when decoding, sampled beyond min_length in one pass
        torch.testing.assert_close(loaded(ids, use_cache=True).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["softmax", "polysketch-paper"])
def test_what_stands_around_attention_is_saved_and_loaded_bit_for_bit(name, ids, tmp_path):
    """Weights that are no longer those of the start; decoding too, with rows that start later."""
    transformer = tiny(name, projection_convolution=4, query_key_norm=True, head_gate=True)
    for parameter in transformer.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    expected = transformer(ids)
    PolysketchForCausalLM.from_transformer(transformer).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, expected)
    assert loaded.inner.config == transformer.config
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    together = loaded.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    alone = loaded.generate(ids[:1, 5:], max_new_tokens=6, do_sample=False)
    assert together[0, LENGTH:].tolist() == alone[0, LENGTH - 5 :].tolist()


def test_a_model_saved_before_anything_stood_around_attention_loads(ids, tmp_path):
    """Its configuration does not say that there was nothing, and calls the paper's mechanism "polysketch"."""
    transformer = tiny()
    PolysketchForCausalLM.from_transformer(transformer).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    assert saved["attention"] == "polysketch-paper"
    for name in ("projection_convolution", "query_key_norm", "head_gate", "model_format"):
        del saved[name]
    path.write_text(json.dumps({**saved, "attention": "polysketch"}))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, transformer(ids))


def test_what_no_checkpoint_holds_is_computed_anew(ids, tmp_path):
    """Buffers that are not saved, of a mechanism that has some, where memory that nobody wrote is filled with NaN."""
    transformer = tiny("squared-polynomial", attention_options={"linear": True, "coefficients": 2})
    assert dict(transformer.named_buffers()).keys() - transformer.state_dict().keys()
    PolysketchForCausalLM.from_transformer(transformer).save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)
    try:
        loaded = PolysketchForCausalLM.from_pretrained(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(loaded(ids).logits, transformer(ids))


@pytest.mark.parametrize("name", sorted(NOT_CAUSAL))
def test_what_cannot_be_causal_is_refused_by_name(name):
    """It could neither be trained as a language model nor decode."""
    with pytest.raises(ValueError, match=f"{name}.*cannot be causal"):
        PolysketchConfig(attention=name)


def test_auto_classes_make_our_models():
    """From a configuration alone."""
    config = AutoConfig.for_model("polysketch", num_layers=1, hidden_size=16, num_heads=1)
    assert type(config) is PolysketchConfig
    assert type(AutoModel.from_config(config)) is PolysketchModel
    assert type(AutoModelForCausalLM.from_config(config)) is PolysketchForCausalLM
    assert type(AutoModelForSequenceClassification.from_config(config)) is PolysketchForSequenceClassification


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_goes_through_json(name, tmp_path):
    """And comes back as the configuration of this library that it stands for."""
    from polysketch.models import preset

    PolysketchConfig.from_preset(name).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.to_model_config() == preset(name)
    assert config.num_hidden_layers == preset(name).num_layers
    assert "dtype" not in json.loads((tmp_path / "config.json").read_text()).get("attention_options", {})


def test_a_missing_weight_is_an_error_and_not_a_random_number(tmp_path):
    """A checkpoint of fewer layers than its configuration says."""
    PolysketchForCausalLM.from_transformer(tiny()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 3}))
    with pytest.raises(ValueError, match="found none for blocks"):
        PolysketchForCausalLM.from_pretrained(tmp_path)


def test_the_embedding_is_the_output_layer_also_after_loading(ids, tmp_path):
    """One matrix, saved once: a change to it changes input and output."""
    from safetensors import safe_open

    PolysketchForCausalLM.from_transformer(tiny()).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118 - not a dict
    assert shapes.count((VOCABULARY, 32)) == 1
    loaded = PolysketchForCausalLM.from_pretrained(tmp_path)
    loaded(ids, labels=ids).loss.backward()
    assert loaded.get_input_embeddings().weight.grad.count_nonzero() == VOCABULARY * 32


class TestLoss:
    """With labels."""

    def test_is_the_models_own(self, ids):
        """Token i predicts label i + 1."""
        transformer = tiny()
        found = PolysketchForCausalLM.from_transformer(transformer)(ids, labels=ids)
        torch.testing.assert_close(found.loss, transformer.loss(ids))
        expected = torch.nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(found.loss, expected)

    def test_leaves_out_what_is_marked(self, ids):
        """-100 counts neither above nor below the line; num_items_in_batch takes the place of the count."""
        model = PolysketchForCausalLM.from_transformer(tiny())
        labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5, -100)
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        torch.testing.assert_close(model(ids, labels=labels).loss, total / (labels[:, 1:] != -100).sum())
        torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=7).loss, total / 7)
        assert model(ids, labels=torch.full_like(ids, -100)).loss == 0

    def test_needs_no_logits(self, ids):
        """They can be left out."""
        model = PolysketchForCausalLM.from_transformer(tiny())
        found = model(ids, labels=ids, skip_logits=True)
        assert found.logits is None
        assert torch.equal(found.loss, model(ids, labels=ids).loss)

    def test_logits_of_the_last_tokens_alone(self, ids):
        """By number or by index."""
        model = PolysketchForCausalLM.from_transformer(tiny())
        expected = model(ids).logits
        torch.testing.assert_close(model(ids, logits_to_keep=2).logits, expected[:, -2:])
        torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([5, 0])).logits, expected[:, [5, 0]])

    def test_labels_of_another_shape_are_refused(self, ids):
        """They would be matched with the wrong tokens."""
        with pytest.raises(ValueError, match=r"labels of shape \(3, 37\), got \(3, 36\)"):
            PolysketchForCausalLM.from_transformer(tiny())(ids, labels=ids[:, 1:])


class TestPadding:
    """An attention mask."""

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("kind", MOST)
    def test_changes_nothing_on_either_side(self, kind, side):
        """In one pass: logits of real tokens are those of the row alone, by whatever number it is padded."""
        model, lengths = PolysketchForCausalLM.from_transformer(train_counting(kind, steps=1)), (40, 33, 17, 3)
        rows = counting(4, 40, torch.Generator().manual_seed(1))
        ids, mask = rows.clone(), torch.zeros(4, 40, dtype=torch.int64)
        for row, length in enumerate(lengths):
            real = slice(40 - length, None) if side == "left" else slice(None, length)
            ids[row] = 7
            ids[row, real], mask[row, real] = rows[row, :length], 1
        with torch.no_grad():
            found = model(ids, attention_mask=mask).logits
            for row, length in enumerate(lengths):
                expected = model(rows[row : row + 1, :length]).logits[0]
                torch.testing.assert_close(found[row, mask[row].bool()], expected)

    def test_with_holes_is_refused(self, ids):
        """With the row."""
        mask = torch.ones_like(ids)
        mask[1, 5] = 0
        for use_cache in (False, True):
            with pytest.raises(ValueError, match="row 1"):
                PolysketchForCausalLM.from_transformer(tiny())(ids, attention_mask=mask, use_cache=use_cache)

    @pytest.mark.parametrize("use_cache", [False, True])
    def test_on_the_right_is_refused_by_generate(self, ids, use_cache):
        """Generation would go on from padding."""
        mask = torch.ones_like(ids)
        mask[2, -3:] = 0
        model = PolysketchForCausalLM.from_transformer(tiny())
        with pytest.raises(ValueError, match=r"row 2.*padding_side = 'left'"):
            model.generate(ids, attention_mask=mask, max_new_tokens=2, use_cache=use_cache, pad_token_id=0)

    def test_alone_is_refused_by_generate(self, ids):
        """There is no token to go on from."""
        mask = torch.ones_like(ids)
        mask[1] = 0
        model = PolysketchForCausalLM.from_transformer(tiny())
        with pytest.raises(ValueError, match="padding alone in row 1"):
            model.generate(ids, attention_mask=mask, max_new_tokens=2, pad_token_id=0)

    def test_on_the_right_is_refused_by_tokens_that_follow(self, ids):
        """When they are read, not when the cache is made: the one pass before was exact."""
        model = PolysketchForCausalLM.from_transformer(tiny())
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        cache = model(ids, attention_mask=mask).past_key_values
        with pytest.raises(ValueError, match="row 0"):
            model(ids[:, :1], past_key_values=cache)

    @pytest.mark.parametrize("shape", [(3, 36), (3, 1, 37, 37), (2, 37)])
    def test_of_another_shape_is_refused(self, ids, shape):
        """A mask of new tokens alone, of pairs of tokens, of another batch."""
        with pytest.raises(ValueError, match="attention_mask must be of shape"):
            PolysketchForCausalLM.from_transformer(tiny())(ids, attention_mask=torch.ones(shape))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("inputs_embeds", torch.zeros(1, LENGTH, 32)),
        ("output_attentions", True),
        ("nonsense", 3),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(ids, argument, value):
    """By name."""
    with pytest.raises(ValueError, match=f"do not take {argument}"):
        PolysketchForCausalLM.from_transformer(tiny())(ids, **{argument: value})


def test_keys_and_values_are_refused(ids):
    """With what to do."""
    model = PolysketchForCausalLM.from_transformer(tiny())
    with pytest.raises(TypeError, match="PolysketchCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2, pad_token_id=0)


class TestClassification:
    """A head on the last real token."""

    def test_sees_each_text_whole_whatever_its_padding(self, ids):
        """Left or right; the same scores as alone."""
        torch.manual_seed(0)
        config = PolysketchConfig.from_model_config(tiny().config, num_labels=4)
        model = PolysketchForSequenceClassification(config).eval()
        mask = torch.ones_like(ids)
        mask[0, -20:], mask[1, :20] = 0, 0
        found = model(ids, attention_mask=mask).logits
        assert found.shape == (3, 4)
        torch.testing.assert_close(found[0], model(ids[:1, :-20]).logits[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], model(ids[1:2, 20:]).logits[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[2], model(ids[2:]).logits[0], rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="padding alone in row 1"):
            model(ids, attention_mask=mask * torch.tensor([[1], [0], [1]]))

    @pytest.mark.parametrize(
        ("labels", "number"),
        [(torch.tensor([0, 2, 1]), 3), (torch.tensor([0.5, 1.0, -1.0]), 1), (torch.eye(3), 3)],
        ids=["one of three", "regression", "several of three"],
    )
    def test_every_kind_of_label_trains_every_parameter(self, ids, labels, number, tmp_path):
        """Starting from a language model; the head alone is new."""
        language_model = PolysketchForCausalLM.from_transformer(tiny())
        language_model.save_pretrained(tmp_path)
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=number)
        for name, tensor in model.inner.state_dict().items():
            assert torch.equal(tensor, language_model.inner.state_dict()[name])
        model.train()(ids, labels=labels).loss.backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad is not None for p in trained.values())
        assert model.score.weight.grad.abs().sum() > 0


class TestCache:
    """A PolysketchCache by itself."""

    def test_reads_what_was_put_off_once_tokens_follow(self, counting_model):
        """A pass without `use_cache=True` is one pass, with gradients; its cache catches up when it is used."""
        model = counting_model("polysketch-paper")
        ids = counting(2, 50, torch.Generator().manual_seed(2))
        first = model(ids[:, :30])
        assert first.logits.requires_grad
        assert first.past_key_values.get_seq_length() == 30
        assert first.past_key_values.state is None
        second = model(ids[:, 30:], past_key_values=first.past_key_values)
        torch.testing.assert_close(second.logits, model(ids).logits[:, 30:].detach())
        assert second.past_key_values.get_seq_length() == 50

    def test_keeps_nothing_in_the_callers_memory(self, counting_model):
        """A buffer of ids and of the mask is used again for the next tokens."""
        model = counting_model("polysketch-paper")
        ids = counting(2, 60, torch.Generator().manual_seed(2))
        expected = model(ids).logits[:, 30:].detach()
        buffer, mask = ids[:, :30].clone(), torch.ones(2, 30, dtype=torch.bool)
        mask[0, 0] = False
        with_hole = model(ids, attention_mask=torch.cat([mask, torch.ones_like(mask)], 1)).logits[:, 30:].detach()
        for given, wanted in ((None, expected), (mask, with_hole)):
            buffer.copy_(ids[:, :30])
            cache = model(buffer, attention_mask=given).past_key_values
            buffer.copy_(ids[:, 30:])
            if given is not None:
                given.fill_(True)
            torch.testing.assert_close(model(buffer, past_key_values=cache).logits, wanted)

    @pytest.mark.parametrize("wrong", [VOCABULARY, -1])
    def test_a_refused_call_leaves_what_was_put_off(self, counting_model, wrong):
        model = counting_model("polysketch-paper")
        ids = counting(2, 50, torch.Generator().manual_seed(2))
        cache = model(ids[:, :30]).past_key_values
        with pytest.raises(ValueError, match="ids must lie in"):
            model(torch.full((2, 3), wrong), past_key_values=cache)
        found = model(ids[:, 30:], past_key_values=cache)
        torch.testing.assert_close(found.logits, model(ids).logits[:, 30:].detach())

    @pytest.mark.parametrize("kind", MOST)
    def test_rows_are_repeated_selected_and_reordered(self, counting_model, kind):
        """Each goes on as the row it came from."""
        model = counting_model(kind)
        ids = counting(4, 60, torch.Generator().manual_seed(2))
        expected = model(ids).logits[:, 35:].detach()
        cache = PolysketchCache()
        model(ids[:, :35], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(2)  # 0 0 1 1 2 2 3 3
        cache.reorder_cache(torch.tensor([7, 0, 5, 2]))  # 3 0 2 1
        cache.batch_select_indices(torch.tensor([True, False, True, True]))  # 3 2 1
        rows = [3, 2, 1]
        assert cache.batch_size == 3
        found = model(ids[rows, 35:], past_key_values=cache)
        torch.testing.assert_close(found.logits, expected[rows])

    @pytest.mark.parametrize("kind", MOST)
    def test_forgets_tokens_that_were_recorded(self, counting_model, kind):
        """Any number of the last ones, several times, after prompts longer than what is kept to go back to."""
        model = counting_model(kind)
        ids = counting(2, 260, torch.Generator().manual_seed(2))
        wrong = torch.zeros(2, 9, dtype=torch.int64)
        cache = PolysketchCache()
        cache.activate_past_recording()
        with torch.no_grad():
            expected = model(ids).logits
            for start, end in ((0, 200), (200, 207), (207, 208), (208, 250), (250, 260)):
                for removed in (9, 4, 0):
                    step = torch.cat([ids[:, start:end], wrong[:, :removed]], 1) if removed else ids[:, start:end]
                    found = model(step, past_key_values=cache, use_cache=True).logits[:, : end - start]
                    torch.testing.assert_close(found, expected[:, start:end])
                    if removed:
                        cache.crop(-step.shape[1] if step.shape[1] < 100 else -removed)
                        start = start if step.shape[1] < 100 else end
                    if start == end:
                        break
                cache.crop(0)
                assert cache.get_seq_length() == end

    def test_refuses_to_forget_what_it_did_not_record(self, counting_model):
        """Rather than go on with a wrong state."""
        model = counting_model("polysketch-paper")
        ids = counting(1, 200, torch.Generator().manual_seed(2))
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-1)
        cache.activate_past_recording()
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="at most 128 tokens"):
            cache.crop(-129)
        with pytest.raises(ValueError, match="minus the number"):
            cache.crop(1)

    def test_refuses_another_batch_and_other_models(self, counting_model):
        """With the shapes."""
        model = counting_model("polysketch-paper")
        cache = model(torch.zeros(2, 4, dtype=torch.int64), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="holds 2 rows"):
            model(torch.zeros(3, 4, dtype=torch.int64), past_key_values=cache)
        with pytest.raises(TypeError, match="Polysketch models only"):
            cache.update(None, None, 0)

    def test_starts_anew(self, counting_model):
        """After `reset`."""
        model = counting_model("polysketch-paper")
        ids = counting(2, 40, torch.Generator().manual_seed(2))
        cache = model(ids, use_cache=True).past_key_values
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.batch_size == -1
        found = model(ids, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, model(ids).logits.detach())
