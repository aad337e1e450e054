"""Encoders: they see both sides, padding changes nothing, and they learn what needs both sides."""

import json
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from polysketch import attention
from polysketch.data import mask_tokens
from polysketch.models import (
    EncoderConfig,
    MaskedLanguageModel,
    SequenceClassifier,
    TokenClassifier,
    TransformerEncoder,
)
from polysketch.models.encoder import mean_of_real

VOCAB, LENGTH = 23, 30
SIZES = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
OPTIONS = {
    "polysketch-paper": {"sketch_size": 6, "local_chunk": 8},
    "polysketch-heavy": {"sketch_size": 6, "local_chunk": 8, "heavy_size": 2, "hash_bits": 2},
    "polysketch-window": {"window": 6, "sketch_size": 6},
    "sliding-window": {"window": 6},
    "local": {"local_chunk": 8},
    "nystrom": {"num_landmarks": 5},
    "skyformer": {"num_landmarks": 5},
}
BOTH_SIDES = [name for name, mechanism in attention.MECHANISMS.items() if mechanism.is_bidirectional]


def config(name: str = "linear", **changes) -> EncoderConfig:
    return EncoderConfig(**{**SIZES, "attention": name, "attention_options": OPTIONS.get(name, {}), **changes})


def encoder(name: str = "linear", **changes) -> TransformerEncoder:
    torch.manual_seed(0)
    return TransformerEncoder(config(name, **changes)).double()


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", BOTH_SIDES)
def test_the_first_token_sees_the_second(name: str):
    model, ids = encoder(name), tokens()
    changed = ids.clone()
    changed[:, 1] = (changed[:, 1] + 1) % VOCAB
    assert (model(ids) - model(changed))[:, 0].abs().max() > 1e-6


@pytest.mark.parametrize("positions", [{}, {"input_positions": True}, {"learned_positions": LENGTH}, {"rotary": False}])
@pytest.mark.parametrize("name", ["linear", "softmax", "polysketch-paper", "performer"])
def test_padding_on_either_side_changes_nothing(name: str, positions: dict):
    """Positions count from a row's first real token."""
    model, ids = encoder(name, **positions), tokens(length=LENGTH - 7)
    alone = model(ids)
    padded = torch.cat([tokens(length=3, seed=1), ids, tokens(length=4, seed=2)], 1)
    real = torch.zeros(2, LENGTH, dtype=torch.bool)
    real[:, 3:-4] = True
    torch.testing.assert_close(model(padded, key_mask=real)[:, 3:-4], alone, rtol=1e-9, atol=1e-10)


def test_positions_are_told_apart_by_each_kind_of_them():
    """Two tokens that stand in each other's place; without positions a mechanism without chunks cannot tell."""
    ids = tokens()
    swapped = ids.clone()
    swapped[:, [2, 9]] = ids[:, [9, 2]]
    assert (ids != swapped).any(1).all()
    kinds = [{"rotary": True}, {"rotary": False, "input_positions": True}, {"rotary": False, "learned_positions": 40}]
    for kind in kinds:
        model = encoder(**kind)
        assert (model(ids) - model(swapped))[:, 0].abs().max() > 1e-6
    model = encoder(rotary=False)
    torch.testing.assert_close(model(ids)[:, 0], model(swapped)[:, 0])


def test_checkpointed_blocks_give_the_same_gradients():
    model, ids = encoder("polysketch-paper"), tokens()
    found = []
    for model.activation_checkpointing in (False, True):
        found.append(torch.autograd.grad(model(ids).square().sum(), list(model.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "polysketch"}, "causal only, and an encoder sees both sides; mechanisms for it: softmax, "),
        ({"attention": "short-convolution"}, "causal only"),
        ({"attention": "nope"}, "nope"),
        ({"attention_options": {"nope": 1}}, "nope"),
        ({"projection_convolution": 4}, "projection_convolution is causal only"),
        ({"learned_positions": -1}, "learned_positions must be"),
    ],
)
def test_what_cannot_encode_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**{**SIZES, "attention": "linear", **changes})


def test_more_tokens_than_learned_positions_are_refused():
    with pytest.raises(ValueError, match="at most 10 tokens, which have learned positions, got 30"):
        encoder(learned_positions=10)(tokens())


class TestLearnedPositions:
    """Real tokens alone need one."""

    MODEL: ClassVar = {"learned_positions": 13, "rotary": False}

    def test_rows_may_be_padded_beyond_them(self):
        model, ids = encoder(**self.MODEL), tokens(length=9)
        real = torch.arange(17) < 9
        padded, mask = torch.cat([ids, tokens(length=8, seed=1)], 1), real.expand(2, 17)
        torch.testing.assert_close(model(padded, key_mask=mask)[:, :9], model(ids), rtol=1e-9, atol=1e-10)
        with pytest.raises(ValueError, match="at most 13 tokens, which have learned positions, got 14"):
            model(padded, key_mask=(torch.arange(17) < 14).expand(2, 17))

    def test_no_row_gives_none(self):
        model, ids = encoder("softmax", **self.MODEL), tokens()[:0, :9]
        assert model(ids, key_mask=ids > 0).shape == (0, 9, 16)

    def test_with_padding_they_compile_as_one_graph(self):
        torch.compiler.reset()
        model, ids = encoder(**self.MODEL), tokens(length=9)
        mask = (torch.arange(9) < 7).expand(2, 9)
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, key_mask=mask)
        torch.testing.assert_close(found, model(ids, key_mask=mask))


def test_a_configuration_can_be_stored():
    for each in (config(), config(learned_positions=7, attention=("linear", "softmax"), attention_options={})):
        assert EncoderConfig.from_dict(each.to_dict()) == each


class TestMaskedLanguageModel:
    def test_the_loss_is_that_of_the_chosen_tokens(self):
        torch.manual_seed(0)
        model, ids = MaskedLanguageModel(config()).double(), tokens()
        targets = torch.full_like(ids, -100)
        targets[0, 3], targets[1, 5] = 7, 11
        log_shares = model(ids).log_softmax(-1)
        expected = -(log_shares[0, 3, 7] + log_shares[1, 5, 11]) / 2
        torch.testing.assert_close(model.loss(ids, targets).double(), expected)
        for wrong, message in (
            (targets[:, 1:], "shape"),
            (targets + VOCAB + 100, "lie in"),
            (ids * 0 - 100, "nothing"),
        ):
            with pytest.raises(ValueError, match=message):
                model.loss(ids, wrong)

    def test_it_learns_what_only_the_right_side_tells(self):
        """Every second token repeats the one behind it: what is masked can be read off there."""
        torch.manual_seed(0)
        model = MaskedLanguageModel(config("softmax"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            ids = torch.randint(1, VOCAB, (32, 8), generator=generator).repeat_interleave(2, 1)
            masked, targets = ids.clone(), torch.full_like(ids, -100)
            masked[:, 0::4], targets[:, 0::4] = 0, ids[:, 0::4]
            optimizer.zero_grad()
            loss = model.loss(masked, targets)
            loss.backward()
            optimizer.step()
        assert loss < 0.1  # without the right side: log(22) = 3.1


def test_masked_tokens_are_chosen_and_hidden_in_their_shares():
    generator = torch.Generator().manual_seed(0)
    ids, real = torch.full((100, 1000), 5), torch.ones(100, 1000, dtype=torch.bool)
    real[:, 900:] = False
    masked, targets = mask_tokens(ids, vocab_size=1000, mask_id=9, share=0.3, generator=generator, key_mask=real)
    chosen = targets != -100
    assert (targets[chosen] == 5).all()
    assert not chosen[:, 900:].any()
    assert torch.equal(masked[~chosen], ids[~chosen])
    assert chosen[:, :900].float().mean().item() == pytest.approx(0.3, abs=0.01)
    hidden = [(masked[chosen] == 9).float().mean().item(), (masked[chosen] == 5).float().mean().item()]
    assert hidden == pytest.approx([0.8, 0.1], abs=0.01)
    for wrong in ({"share": 0.0}, {"mask_id": 1000}):
        with pytest.raises(ValueError, match=r"share must be|mask_id must"):
            mask_tokens(ids, **{"vocab_size": 1000, "mask_id": 9, **wrong})


class TestSequenceClassifier:
    @pytest.mark.parametrize("pooling", ["mean", "first"])
    def test_padding_changes_nothing(self, pooling):
        torch.manual_seed(0)
        model = SequenceClassifier(config(), 3, pooling=pooling).double()
        ids = tokens(length=LENGTH - 7)
        padded = torch.cat([tokens(length=3, seed=1), ids, tokens(length=4, seed=2)], 1)
        real = torch.zeros(2, LENGTH, dtype=torch.bool)
        real[:, 3:-4] = True
        torch.testing.assert_close(model(padded, key_mask=real), model(ids))
        first, second = SequenceClassifier(config(), 3), SequenceClassifier(config(), 3, pooling="first")
        second.load_state_dict(first.state_dict())
        assert (first(ids) - second(ids)).abs().max() > 1e-3

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_the_mean_of_many_tokens_is_theirs_in_each_dtype(self, dtype):
        """70,000 are more than the largest number of float16, and so is the sum of a few of them."""
        real = torch.arange(70_000)[None] < 69_999
        found = mean_of_real(torch.full((1, 70_000, 2), 5.0, dtype=dtype), real)
        assert found.dtype == dtype
        assert found.tolist() == [[5.0, 5.0]]

    def test_it_learns_whether_a_token_occurs(self):
        torch.manual_seed(0)
        model = SequenceClassifier(config("softmax"), 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(50):
            ids = torch.randint(1, VOCAB, (32, LENGTH), generator=generator)
            labels = torch.randint(2, (32,), generator=generator)
            ids[torch.arange(32), torch.randint(LENGTH, (32,), generator=generator)] *= 1 - labels
            optimizer.zero_grad()
            loss = model.loss(ids, labels)
            loss.backward()
            optimizer.step()
        assert loss < 0.1

    def test_labels_that_do_not_fit_are_refused(self):
        model = SequenceClassifier(config(), 3)
        for labels, message in (
            (torch.tensor([0, 3]), "lie in"),
            (torch.tensor([0]), "shape"),
            (torch.ones(2), "int64"),
        ):
            with pytest.raises(ValueError, match=message):
                model.loss(tokens(), labels)
        for wrong in ({"num_classes": 1}, {"num_classes": 2, "pooling": "last"}):
            with pytest.raises(ValueError, match="must be"):
                SequenceClassifier(config(), **wrong)


class TestTokenClassifier:
    """One class for each token."""

    def test_the_loss_is_that_of_the_tokens_with_a_class(self):
        torch.manual_seed(0)
        model, ids = TokenClassifier(config(), 3), tokens()
        real = torch.ones(2, LENGTH, dtype=torch.bool)
        real[1, :9] = False
        targets = (ids % 3).masked_fill(~real, -100)
        logits = model(ids, key_mask=real)
        loss = model.loss(ids, targets, key_mask=real)
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits[real], targets[real]))
        torch.testing.assert_close(model.logits_at(real, ids=ids, key_mask=real), logits[real])
        loss.backward()
        assert [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()] == []

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
            TokenClassifier(config(), 1)
        with pytest.raises(ValueError, match=r"lie in \[0, 3\), got 0 to 3"):
            TokenClassifier(config(), 3).loss(tokens(), tokens() % 4)


BLOCKWISE = [name for name, mechanism in attention.MECHANISMS.items() if mechanism.is_blockwise]


@pytest.mark.parametrize("name", [*BLOCKWISE, ("linear", "softmax")], ids=str)
def test_in_blocks_a_token_sees_its_own_block_and_nothing_of_later_ones(name: str):
    options = OPTIONS | {"polysketch": {"window": 6, "sketch_size": 4}}
    given = options.get(name, {}) if isinstance(name, str) else {}
    model, ids = encoder(name, block_size=4, attention_options=given), tokens()
    before = model(ids)
    for token, first in ((11, 8), (12, 12)):  # the last of its block, and the first
        changed = ids.clone()
        changed[:, token] = (changed[:, token] + 1) % VOCAB
        difference = (model(changed) - before).abs().amax((0, 2))
        assert not difference[:first].any()
        assert (difference[first : first + 4] > 1e-9).all()


@pytest.mark.parametrize("positions", [{}, {"input_positions": True}, {"learned_positions": LENGTH + 5}])
@pytest.mark.parametrize("name", ["linear", "softmax", "polysketch"])
def test_a_sequence_that_comes_by_blocks_gives_what_the_whole_gives(name: str, positions: dict):
    options = {"polysketch": {"window": 6, "sketch_size": 4}}.get(name, {})
    model = encoder(name, block_size=4, attention_options=options, **positions)
    ids = torch.cat([tokens(length=4, seed=1), tokens()], 1)
    real = torch.ones(ids.shape, dtype=torch.bool)
    real[0, :4] = False
    whole, state, found = model(ids, key_mask=real), model.init_state(2), []
    for block, mask in zip(ids.split([12, 4, 18], 1), real.split([12, 4, 18], 1), strict=True):
        tried, _ = model.extend(block, state.clone(), key_mask=mask)
        output, state = model.extend(block, state, key_mask=mask)
        assert torch.equal(tried, output)
        found.append(output)
    torch.testing.assert_close(torch.cat(found, 1)[0, 4:], whole[0, 4:], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(torch.cat(found, 1)[1], whole[1], rtol=1e-8, atol=1e-9)
    assert state.position.tolist() == [30, 34]


def test_a_configuration_of_blocks_comes_back_from_plain_data():
    one = config("polysketch-paper", block_size=4)
    again = EncoderConfig.from_dict(json.loads(json.dumps(one.to_dict())))
    assert again == one
    model, other = encoder("polysketch-paper", block_size=4), TransformerEncoder(again).double()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens()), model(tokens()))
    assert not torch.allclose(encoder("polysketch-paper")(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("focused", {}, "layer 'focused' cannot see by blocks; mechanisms for it: .*softmax"),
        ("short-convolution", {}, "layer 'short-convolution' cannot see by blocks"),
        ("sliding-window", {"block_size": -1}, "block_size must be a number of tokens, or 0, got -1"),
        ("linear", {"projection_convolution": 3}, "projection_convolution is causal only"),
        ("polysketch-paper", {"block_size": 12}, "layer 0: block_size must divide local_chunk .* got 12 and 8"),
    ],
)
def test_blocks_that_cannot_be_are_refused(name: str, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        encoder(name, **{"block_size": 4, **changes})


def test_without_blocks_a_sequence_does_not_come_in_parts():
    with pytest.raises(ValueError, match="where the configuration has a block_size, got 0"):
        encoder().init_state(2)


def test_blocks_of_masked_tokens_are_predicted_from_the_blocks_before_them():
    torch.manual_seed(0)
    model = MaskedLanguageModel(config("linear", block_size=4)).double()
    ids, state = tokens(length=8), model.encoder.init_state(2)
    _, state = model.extend(ids[:, :4], state)
    logits, _ = model.extend(ids[:, 4:], state)
    torch.testing.assert_close(logits, model(ids)[:, 4:], rtol=1e-8, atol=1e-9)
