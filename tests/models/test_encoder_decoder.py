"""Sequence to sequence: the target is causal, it sees the whole source, and decoding gives what forward gives."""

import pytest
import torch
from torch import Tensor

from polysketch import attention
from polysketch.generation import beam_search, generate
from polysketch.models import EncoderConfig, EncoderDecoderConfig, ModelConfig, TransformerEncoderDecoder

VOCAB, SOURCE, LENGTH = 23, 19, 13
SIZES = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
CROSS = ["softmax", "polynomial", "hyper", "based", "hedgehog", "linear", "performer", "symmetric-power"]
TIGHT = {"rtol": 1e-8, "atol": 1e-9}


def model_of(cross: str = "softmax", own: str = "linear", options: dict | None = None, **changes):
    torch.manual_seed(0)
    encoder = EncoderConfig(**{**SIZES, "hidden_size": 24, "attention": "linear"})
    decoder = ModelConfig(**{**SIZES, "attention": own, **changes})
    return TransformerEncoderDecoder(EncoderDecoderConfig(encoder, decoder, cross, options or {})).double()


def tokens(length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cross", CROSS)
def test_a_target_token_sees_the_whole_source_and_no_later_target(cross: str):
    model, source, ids = model_of(cross), tokens(SOURCE, 0), tokens(LENGTH, 1)
    logits = model(source, ids)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    difference = (model(source, changed) - logits).abs().amax((0, 2))
    assert (difference[:5] < 1e-12).all()
    assert difference[5:].min() > 1e-9
    for place in (0, SOURCE - 1):
        other = source.clone()
        other[:, place] = (other[:, place] + 1) % VOCAB
        assert (model(other, ids) - logits)[:, 0].abs().max() > 1e-9


@pytest.mark.parametrize("cross", ["softmax", "linear"])
def test_beams_read_each_its_own_source(cross: str):
    """Their scores are what forward says of them, and a row alone has the same beams."""
    model, source = model_of(cross), tokens(SOURCE, 0)
    searched = {"max_new_tokens": 4, "num_beams": 3}
    found = beam_search(model.given(source), [[0], [2]], **searched).beams
    for row, start in enumerate([0, 2]):
        alone = beam_search(model.given(source[row : row + 1]), [[start]], **searched).beams[0]
        assert [beam.tokens for beam in found[row]] == [beam.tokens for beam in alone]
        for beam in found[row]:
            with torch.no_grad():
                logits = model(source[row : row + 1], torch.tensor([[start, *beam.tokens[:-1]]]))[0]
            told = logits.log_softmax(-1).gather(1, torch.tensor(beam.tokens)[:, None]).mean()
            assert beam.score == pytest.approx(float(told), rel=1e-5)
    assert found[0][0].tokens != found[1][0].tokens


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cross", CROSS)
def test_decoding_gives_what_forward_gives(cross: str, masked: bool):
    changes = {"projection_convolution": 3, "query_key_norm": True, "input_positions": True}
    model, source, ids = model_of(cross, **changes), tokens(SOURCE, 0), tokens(LENGTH, 1)
    real = torch.ones(2, SOURCE, dtype=torch.bool)
    real[1, :4] = real[1, -2:] = not masked
    expected = model(source, ids, source_mask=real)
    given = model.given(source, source_mask=real)
    state, found = given.init_state(2), []
    for part in ids.split([1, 1, LENGTH - 2], 1):
        logits, state = given.extend(part, state)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, **TIGHT)
    alone = model(source[1:, 4:-2], ids[1:])
    assert torch.allclose(alone, expected[1:], **TIGHT) == masked


@pytest.mark.parametrize("cross", ["linear", "softmax"])
def test_what_is_kept_of_the_source(cross: str):
    """A constant size on features; with softmax, as the source."""
    model = model_of(cross)
    sizes = [model.given(tokens(length, 0)).source_bytes for length in (10, 40)]
    assert (sizes[0] == sizes[1]) == (cross == "linear")


def test_the_loss_is_that_of_the_targets():
    model, source, ids = model_of(), tokens(SOURCE, 0), tokens(LENGTH, 1)
    targets = tokens(LENGTH, 2)
    targets[0, 4:] = -100
    expected = torch.nn.functional.cross_entropy(model(source, ids).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(source, ids, targets).double(), expected)
    with pytest.raises(ValueError, match="targets must be"):
        model.loss(source, ids, targets[:, 1:])


def test_every_weight_learns():
    model = model_of("linear", projection_convolution=3, query_key_norm=True)
    model.loss(tokens(SOURCE, 0), tokens(LENGTH, 1), tokens(LENGTH, 2)).backward()
    silent = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert silent == []


@pytest.mark.full  # tests/training trains one
def test_it_learns_to_reverse_and_generates_the_answer():
    """As many rows at a time as the source has; a row ends at its stop token."""
    torch.manual_seed(0)
    encoder = EncoderConfig(**{**SIZES, "hidden_size": 32, "attention": "softmax", "learned_positions": 8})
    decoder = ModelConfig(**{**SIZES, "hidden_size": 32, "attention": "softmax", "input_positions": True})
    model = TransformerEncoderDecoder(EncoderDecoderConfig(encoder, decoder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int) -> tuple[Tensor, Tensor]:
        source = torch.randint(2, VOCAB, (rows, 4), generator=generator)
        return source, torch.nn.functional.pad(source.flip(1), (0, 1), value=1)

    for _ in range(200):
        source, answer = draw(32)
        optimizer.zero_grad()
        loss = model.loss(source, torch.nn.functional.pad(answer[:, :-1], (1, 0)), answer)
        loss.backward()
        optimizer.step()
    source, answer = draw(20)
    found = generate(model.given(source), [[0]] * 20, max_new_tokens=8, temperature=0.0, stop=1)
    right = [row == wanted[:-1] for row, wanted in zip(found.tokens, answer.tolist(), strict=True)]
    assert sum(right) >= 18
    assert all(found.stopped[row] for row in range(20) if right[row])


@pytest.mark.parametrize("cross", ["polysketch", "sliding-window", "nystrom", "focused"])
def test_mechanisms_that_cannot_cross_are_refused_by_name(cross: str):
    name = attention.mechanism_class(cross).__name__
    with pytest.raises(ValueError, match=f"{name} needs queries and keys of the same tokens: .*that can: softmax, .*"):
        model_of(cross)


def test_another_number_of_rows_than_the_source_has_is_refused():
    with pytest.raises(ValueError, match="the source has 2 rows, got 3"):
        model_of().given(tokens(SOURCE, 0)).init_state(3)


def test_activation_checkpointing_computes_the_decoder_again_and_changes_no_gradient():
    model, source, ids = model_of(), tokens(SOURCE, 0), tokens(LENGTH, 1)
    calls, gradients = [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    for model.activation_checkpointing in (False, True):
        model.zero_grad()
        model.loss(source, ids[:, :-1], ids[:, 1:]).backward()
        gradients.append([each.grad.clone() for each in model.parameters()])
    assert len(calls) == (1 + 2) * len(model.blocks)
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_padding_before_a_target_changes_nothing():
    model, source, ids = model_of("softmax", input_positions=True), tokens(SOURCE, 0), tokens(LENGTH, 1)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, :5] = False
    found = model(source, ids, key_mask=real)
    torch.testing.assert_close(found[:1], model(source[:1], ids[:1]), **TIGHT)
    torch.testing.assert_close(found[1:, 5:], model(source[1:], ids[1:, 5:]), **TIGHT)
