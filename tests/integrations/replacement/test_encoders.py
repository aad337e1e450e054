"""Attention replaced in encoders of transformers: every token sees the whole sequence, and padding changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OwlViTTextConfig,
    OwlViTTextModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

from polysketch import load_replaced, replace_attention, restore_attention, save_replaced
from polysketch.integrations.replacement import replaced_mechanisms
from polysketch.integrations.replacement.masks import defer_mask

VOCABULARY, LENGTH = 97, 29
SIZES: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, **SIZES}
PICTURES: dict[str, Any] = {"image_size": 20, "patch_size": 4, "initializer_range": 0.2, **SIZES}
ENDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
CUT: dict[str, Any] = {"initializer_range": 0.2, "initializer_cutoff_factor": 2.0}
DISTILLED: dict[str, Any] = {"vocab_size": VOCABULARY, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}
MODELS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**WORDS, initializer_range=0.2)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**WORDS, initializer_range=0.2)),
    "distilbert": lambda: DistilBertModel(DistilBertConfig(**DISTILLED, initializer_range=0.2)),
    "modernbert": lambda: ModernBertForMaskedLM(ModernBertConfig(**WORDS, **ENDS, **CUT, local_attention=128)),
    "vit": lambda: ViTForImageClassification(ViTConfig(**PICTURES, num_labels=3)),
    "siglip": lambda: SiglipVisionModel(SiglipVisionConfig(**PICTURES)),
}
TEXT = ("bert", "roberta", "distilbert", "modernbert")
OPTIONS: dict[str, dict[str, Any]] = {
    "polysketch-paper": {"sketch_size": 6, "local_chunk": 8},
    "linear": {},
    "nystrom": {"num_landmarks": 6},
    "sliding-window": {"window": 6},
}
CAUSAL: dict[str, Any] = {
    "clip": lambda: CLIPTextModel(CLIPTextConfig(**WORDS, bos_token_id=None, eos_token_id=1)),
    "clip-projected": lambda: CLIPTextModelWithProjection(CLIPTextConfig(**WORDS, bos_token_id=None, eos_token_id=1)),
    "owlvit": lambda: OwlViTTextModel(OwlViTTextConfig(**WORDS, bos_token_id=None, eos_token_id=None)),
}
"""Text encoders whose masks are causal, and whose layers say that they are not."""


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    return MODELS[name]().eval()


def inputs(name: str, masked: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    if name not in TEXT:
        return {"pixel_values": torch.randn(2, 3, 20, 20, generator=generator)}
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if masked:
        mask[1, 20:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def output(model: Any, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**given)[0]


def real_tokens(given: dict[str, Tensor], found: Tensor) -> Any:
    """Where to compare: at real tokens, where there is an output for each."""
    return given["attention_mask"].bool() if "attention_mask" in given and found.dim() == 3 else ...


@pytest.mark.parametrize("layers", ["all", -1, [0, 2]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_softmax_in_the_place_of_softmax_changes_nothing(name: str, layers):
    model = model_of(name)
    for masked in (False, True):
        given = inputs(name, masked)
        expected = output(model, given)
        found = output(replace_attention(model, "softmax", layers=layers), given)
        restore_attention(model)
        real = real_tokens(given, expected)
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mechanism", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_mechanism_takes_the_place_of_softmax_and_sees_both_sides(name: str, mechanism: str):
    """A change at the end reaches the first output, through windows of six tokens too: three layers see 16 ahead."""
    model, given = model_of(name), inputs(name)
    expected = output(model, given)
    replace_attention(model, mechanism, **OPTIONS[mechanism])
    found = output(model, given)
    assert len(replaced_mechanisms(model)) == 3
    assert (found - expected).abs().max() > 1e-3
    changed = {key: x.clone() for key, x in given.items()}
    if name in TEXT:
        changed["input_ids"][:, 12] = (changed["input_ids"][:, 12] % (VOCABULARY - 1)) + 1
    else:
        changed["pixel_values"][:, :, 8:12, 4:8] += 1.0
    difference = (output(model, changed) - found).abs()
    first = difference[:, 0] if difference.dim() == 3 else difference
    assert first.amax(-1).min() > 1e-6


@pytest.mark.parametrize("mechanism", ["polysketch-paper", "linear", "sliding-window"])
@pytest.mark.parametrize("name", TEXT)
def test_what_stands_at_padding_changes_nothing(name: str, mechanism: str):
    model = replace_attention(model_of(name), mechanism, **OPTIONS[mechanism])
    given = inputs(name, masked=True)
    found = output(model, given)
    garbage = {**given, "input_ids": torch.where(given["attention_mask"].bool(), given["input_ids"], 5)}
    real = real_tokens(given, found)
    torch.testing.assert_close(output(model, garbage)[real], found[real])
    alone = output(model, {key: x[1:, :20] for key, x in given.items()})
    expected = found[1:, :20] if found.dim() == 3 else found[1:]
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_saved_loaded_and_undone(name: str, tmp_path):
    model, given = model_of(name), inputs(name)
    before = output(model, given)
    replace_attention(model, "polysketch-paper", layers=[1], **OPTIONS["polysketch-paper"])
    found = output(model, given)
    save_replaced(model, tmp_path)
    loaded = load_replaced(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(output(loaded, given), found)
    assert torch.equal(output(restore_attention(model), given), before)


def test_every_weight_learns():
    model = replace_attention(model_of("bert"), "polysketch-paper", dropout="ignore", **OPTIONS["polysketch-paper"])
    given = inputs("bert", masked=True)
    model.train()(**given, labels=given["input_ids"]).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


@pytest.mark.parametrize(
    ("mechanism", "options", "message"),
    [
        ("polysketch", {}, "causal only, and every token .* whole sequence; mechanisms that see both sides: softmax, "),
        ("polysketch-window", {"hidden_size": None}, "reads more than queries, keys and values"),
    ],
)
def test_mechanisms_that_do_not_fit_are_refused(mechanism: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace_attention(model_of("bert"), mechanism, **options)


def test_windows_of_modernbert_are_honoured_or_given_up():
    torch.manual_seed(0)
    model = ModernBertForMaskedLM(ModernBertConfig(**WORDS, **ENDS, local_attention=16)).eval()
    with pytest.raises(ValueError, match="ignore"):
        output(replace_attention(model, "linear"), inputs("modernbert"))
    restore_attention(model)
    assert output(replace_attention(model, "linear", sliding_window="ignore"), inputs("modernbert")).isfinite().all()


def test_dropout_of_attention_is_refused_in_training():
    model = replace_attention(model_of("bert"), "linear").train()
    with pytest.raises(ValueError, match=r"attention dropout of 0\.1"):
        model(**inputs("bert"))


@pytest.mark.parametrize("layers", ["all", [1]], ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_softmax_in_a_causal_text_encoder_changes_nothing(name: str, layers):
    torch.manual_seed(3)
    model = CAUSAL[name]().eval()
    for masked in (False, True):
        given = inputs("bert", masked)
        expected = output(model, given)
        found = output(replace_attention(model, "softmax", layers=layers), given)
        restore_attention(model)
        real = real_tokens(given, expected)
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mechanism", ["polysketch", "polysketch-paper", "linear", "sliding-window"])
def test_a_causal_text_encoder_stays_causal(mechanism: str):
    torch.manual_seed(3)
    model, given = CAUSAL["clip"]().eval(), inputs("bert")
    replace_attention(model, mechanism, **OPTIONS.get(mechanism, {"window": 8, "sketch_size": 4}))
    found = output(model, given)
    given["input_ids"][:, 12] = (given["input_ids"][:, 12] % (VOCABULARY - 1)) + 1
    difference = (output(model, given) - found).abs().amax(-1)
    assert difference[:, :12].max() == 0
    assert difference[:, 12:16].min() > 0


def test_a_mechanism_that_cannot_be_causal_is_refused_in_a_causal_text_encoder():
    with pytest.raises(ValueError, match="'nystrom' cannot be causal"):
        replace_attention(CAUSAL["clip"](), "nystrom")


def test_an_encoder_that_is_asked_to_be_causal_is_refused():
    model = replace_attention(model_of("bert"), "linear")
    with pytest.raises(ValueError, match="layer 0's attention was asked for is_causal=True, and its mechanism was put"):
        model(**inputs("bert"), is_causal=True)
    causal = defer_mask(attention_mask=None, allow_is_causal_skip=True)
    assert not causal.is_plain_on_both_sides
