"""Attention replaced in encoders with decoders: in each by itself, and where the decoder looks at the encoder."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import polysketch
from attention.covering import first_always
from polysketch import load_replaced, replace_attention, restore_attention, save_replaced
from polysketch.integrations.replacement import AttentionCall, observing_attention, replaced_mechanisms

VOCABULARY, SOURCE, LENGTH, NEW = 97, 22, 9, 7
IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": 1}
BART: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, **IDS}
BART |= {"encoder_attention_heads": 6, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def _whisper() -> WhisperForConditionalGeneration:
    sizes = {"max_source_positions": SOURCE, "max_target_positions": 64, "num_mel_bins": 8, "init_std": 0.2}
    return WhisperForConditionalGeneration(WhisperConfig(**BART, **sizes))


MODELS: dict[str, Any] = {
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(**BART, max_position_embeddings=64, init_std=0.2, forced_eos_token_id=None)
    ),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5, num_decoder_layers=2, **IDS, initializer_factor=1.0)),
    "whisper": _whisper,
}
PARTS = {"encoder": 2, "decoder": 2, "cross": 2}
BIASED = {"t5": {"position_bias": "ignore"}}


def model_of(name: str, *, biased: bool = True) -> Any:
    """With weights of its own seed. T5's bias of positions may be 0: then a mechanism can do what the model does."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    if not biased and name == "t5":
        for stack in (model.encoder, model.decoder):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.zero_()
    model.generation_config.update(max_new_tokens=NEW, do_sample=False, **IDS)
    return model


def inputs(name: str, masked: bool = True) -> dict[str, Tensor]:
    """A source of three rows, two of them padded on the right and on the left; sounds have no padding."""
    generator = torch.Generator().manual_seed(7)
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 2 * SOURCE, generator=generator)}
    ids = torch.randint(2, VOCABULARY, (3, SOURCE), generator=generator)
    mask = torch.ones_like(ids)
    if masked:
        mask[1, 14:], mask[2, :5] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def target() -> Tensor:
    ids = torch.randint(2, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(8))
    ids[:, 0] = 1
    return ids


def logits(model: Any, given: dict[str, Tensor], ids: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(**given, decoder_input_ids=target() if ids is None else ids, use_cache=False).logits


def generated(model: Any, given: dict[str, Tensor], **options) -> Tensor:
    """Tokens that are not repeated."""
    ids = target()[:, :1] if "input_features" in given else None
    return model.generate(**given, decoder_input_ids=ids, no_repeat_ngram_size=1, **options)


def decoded(model: Any, given: dict[str, Tensor], cache: Any = None) -> Tensor:
    """The logits of the target, token by token, from a cache that has read the source once."""
    cache, found = polysketch.replacement_cache(model) if cache is None else cache, []
    with torch.no_grad():
        encoded = model.get_encoder()(**given)
        mask = {key: x for key, x in given.items() if key == "attention_mask"}
        for token in target().split(1, 1):
            step = {"encoder_outputs": encoded, "decoder_input_ids": token, "past_key_values": cache, "use_cache": True}
            found.append(model(**step, **mask).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("part", first_always([None, *PARTS]))
@pytest.mark.parametrize("name", MODELS)
def test_softmax_in_the_place_of_softmax_changes_nothing(name, part):
    """With padding of the source, and in generation with beams, whose rows change places."""
    model, given = model_of(name, biased=False), inputs(name)
    expected, written = logits(model, given), generated(model, given, num_beams=3)
    assert replace_attention(model, "softmax", part=part, **BIASED.get(name, {})) is model
    assert len(replaced_mechanisms(model)) == (sum(PARTS.values()) if part is None else PARTS[part])
    torch.testing.assert_close(logits(model, given), expected, rtol=0, atol=3e-4)
    torch.testing.assert_close(decoded(model, given), expected, rtol=0, atol=3e-4)
    assert torch.equal(generated(model, given, num_beams=3), written)


@pytest.mark.parametrize("name", MODELS)
def test_masks_reach_every_part(name):
    """What stands at padding of the source changes nothing; what does not, changes it."""
    model = replace_attention(model_of(name), "linear", **BIASED.get(name, {}))
    if name == "whisper":
        assert not torch.equal(logits(model, inputs(name)), logits(model, {"input_features": torch.zeros(3, 8, 44)}))
        return
    given = inputs(name)
    found = logits(model, given)
    garbage = {**given, "input_ids": torch.where(given["attention_mask"].bool(), given["input_ids"], 5)}
    torch.testing.assert_close(logits(model, garbage), found)
    for row, real in ((1, slice(0, 14)), (2, slice(5, None))):
        if name == "bart" and row == 2:
            continue  # BART's own positions count padding on the left
        alone = {key: x[row : row + 1, real] for key, x in given.items()}
        torch.testing.assert_close(logits(model, alone, target()[row : row + 1])[0], found[row], rtol=1e-4, atol=1e-4)
    assert (logits(model, inputs(name, masked=False)) - found)[1:].abs().amax((1, 2)).min() > 1e-3


MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("polysketch-paper", {"sketch_size": 6, "local_chunk": 8}),
    "decoder": ("polysketch", {"sketch_size": 6, "window": 5}),
    "cross": ("based", {"feature_dim": 6}),
}


def mixed(name: str) -> Any:
    """A mechanism of its own in each part."""
    model = model_of(name)
    for part, (mechanism, options) in MIXED.items():
        torch.manual_seed(5)
        replace_attention(model, mechanism, part=part, **options, **(BIASED.get(name, {}) if part != "cross" else {}))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_teacher_forcing_step_by_step(name):
    """With states of the decoder, and of what it has read of the encoder; beams as without a cache."""
    model, given = mixed(name), inputs(name)
    torch.testing.assert_close(decoded(model, given), logits(model, given), rtol=0, atol=3e-4)
    found = generated(model, given)
    assert len(set(found[0].tolist())) >= NEW
    assert torch.equal(found, generated(model, given, use_cache=False))
    assert torch.equal(generated(model, given, num_beams=3), generated(model, given, num_beams=3, use_cache=False))


def test_the_cache_depends_on_no_length():
    """Neither on that of the source nor on that of the target; keys and values of the model's own attention do."""
    sizes = {}
    for length, new in ((8, 6), (8, 12), (16, 6)):
        model = mixed("t5")
        given = {key: x[:, :length] for key, x in inputs("t5", masked=False).items()}
        cache = polysketch.replacement_cache(model)
        assert isinstance(cache, EncoderDecoderCache)
        generated(model, given, max_new_tokens=new, past_key_values=cache)
        halves = (cache.self_attention_cache, cache.cross_attention_cache)
        sizes[length, new] = sum(layer.nbytes for half in halves for layer in half.layers)
        assert all(layer.keys is None or layer.keys.numel() == 0 for half in halves for layer in half.layers)
    assert len(set(sizes.values())) == 1


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_cache_that_a_model_with_two_sides_makes_is_its_own(name):
    """Where its decoder alone was replaced, no cache of states takes the place of one for both sides."""
    model, given = model_of(name), inputs(name)
    replace_attention(model, "linear", part="decoder", **BIASED.get(name, {}))
    with torch.no_grad():
        asked = model(**given, decoder_input_ids=target(), use_cache=True)
    assert isinstance(asked.past_key_values, EncoderDecoderCache)
    torch.testing.assert_close(asked.logits, logits(model, given), rtol=0, atol=3e-4)


def test_a_cache_is_copied_and_its_rows_are_taken():
    """Each goes on as the row it came from, with its own source."""
    model, given, ids = mixed("bart"), inputs("bart"), target()
    expected, rows = logits(model, given), torch.tensor([2, 0, 0, 1])
    cache = polysketch.replacement_cache(model)
    with torch.no_grad():
        encoded = model.get_encoder()(**given)
        begun = model(
            encoder_outputs=encoded,
            attention_mask=given["attention_mask"],
            decoder_input_ids=ids[:, :5],
            past_key_values=cache,
            use_cache=True,
        )
        torch.testing.assert_close(begun.logits, expected[:, :5], rtol=0, atol=3e-4)
        for take in ("reorder_cache", "batch_select_indices"):
            other = copy.deepcopy(cache)
            getattr(other, take)(rows)
            found = model(
                encoder_outputs=(encoded[0][rows],),
                attention_mask=given["attention_mask"][rows],
                decoder_input_ids=ids[rows, 5:],
                past_key_values=other,
                use_cache=True,
            )
            torch.testing.assert_close(found.logits, expected[rows, 5:], rtol=0, atol=3e-4)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_saved_loaded_and_undone(name, tmp_path):
    """Bit for bit, with a mechanism of its own in each part."""
    before, given = logits(model_of(name), inputs(name)), inputs(name)
    model = mixed(name)
    found = logits(model, given)
    assert (found - before).abs().max() > 1e-2
    save_replaced(model, tmp_path)
    loaded = load_replaced(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, given), found)
    restore_attention(model)
    assert torch.equal(logits(model, given), before)
    assert torch.equal(generated(model, given), generated(model_of(name), given))


def test_a_source_with_padding_is_traced_in_one_graph():
    """A compiled model cannot branch on what is in a mask."""
    model = replace_attention(model_of("bart"), "linear")
    expected = logits(model, inputs("bart"))
    torch.testing.assert_close(logits(torch.compile(model, backend="eager", fullgraph=True), inputs("bart")), expected)


def test_layers_are_counted_in_their_part_or_in_the_whole_model():
    model = model_of("bart")
    replace_attention(model, "softmax", part="cross", layers=[-1])
    replace_attention(model, "linear", layers=[0, 2])
    assert {index: type(each).__name__ for index, each in replaced_mechanisms(model).items()} == {
        0: "LinearAttention",
        2: "LinearAttention",
        5: "SoftmaxAttention",
    }
    given = inputs("bart")
    torch.testing.assert_close(decoded(model, given), logits(model, given), rtol=0, atol=3e-4)


def test_every_weight_learns_and_calls_are_observed():
    """The original of each call is what the model's own attention gives."""
    model = replace_attention(model_of("bart"), "softmax")
    expected, seen = logits(model, inputs("bart")), []

    def own(call: AttentionCall) -> Tensor:
        seen.append((call.layer, tuple(call.query.shape[2:3]), tuple(call.key.shape[2:3]), call.causal))
        return call.original()

    with observing_attention(model, own):
        torch.testing.assert_close(logits(model, inputs("bart")), expected, rtol=0, atol=3e-4)
    assert seen[0] == (0, (SOURCE,), (SOURCE,), False)
    assert seen[2:4] == [(2, (LENGTH,), (LENGTH,), True), (4, (LENGTH,), (SOURCE,), False)]
    for part, (mechanism, options) in MIXED.items():
        replace_attention(model, mechanism, part=part, dropout="ignore", **options)
    model.train()(**inputs("bart"), labels=target()).loss.backward()
    silent = [name for name, weight in model.named_parameters() if ".polysketch." in name and not weight.grad.any()]
    assert silent == []


@pytest.mark.parametrize(
    ("name", "mechanism", "options", "message"),
    [
        ("bart", "polysketch", {}, "causal only, and every token"),
        ("bart", "nystrom", {"part": "decoder"}, "'nystrom' cannot be causal"),
        (
            "bart",
            "polysketch-paper",
            {"part": "cross"},
            "that can: softmax, .*polysketch-paper with local_c",
        ),
        ("bart", "local", {"part": "cross"}, "'local' with these options needs queries and keys of the same tokens"),
        ("bart", "softmax", {"part": "left"}, "part must be one of 'encoder', 'decoder', 'cross', or None"),
        ("t5", "linear", {}, r'pass position_bias="ignore".*replace part="cross" alone'),
        (
            "t5",
            "linear",
            {"part": "decoder", "layers": [0], "position_bias": "ignore"},
            "replace all layers",
        ),
        ("t5", "linear", {"position_bias": "keep"}, 'position_bias must be "refuse" or "ignore"'),
    ],
)
def test_what_cannot_be_is_refused(name, mechanism, options, message):
    """Before anything is changed."""
    model = model_of(name)
    with pytest.raises(ValueError, match=message):
        replace_attention(model, mechanism, **options)
    assert model.get_encoder().config._attn_implementation == model.config._attn_implementation != "polysketch"


def test_caches_that_do_not_fit_are_refused():
    model, given = mixed("bart"), inputs("bart")
    with pytest.raises(TypeError, match="EncoderDecoderCache, got DynamicCache"):
        model(**given, decoder_input_ids=target(), past_key_values=DynamicCache())
    cache = polysketch.replacement_cache(model)
    model(**given, decoder_input_ids=target(), past_key_values=cache)
    with pytest.raises(ValueError, match="made for another model's layer"):
        mixed("bart")(**given, decoder_input_ids=target(), past_key_values=cache)
