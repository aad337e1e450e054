"""Heads of their own: two documents that become one class, and a row out of one vector."""

import pytest
import torch

from polysketch.models import EncoderConfig, ModelConfig, PairClassifier, SequenceAutoencoder

VOCAB = 11
SIZES = {"vocab_size": VOCAB, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "attention": "linear"}


def tokens(seed: int, length: int, rows: int = 3) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pairs() -> PairClassifier:
    torch.manual_seed(0)
    return PairClassifier(EncoderConfig(**SIZES, input_positions=True), 3).double()


def test_a_pair_is_what_the_formula_makes_of_each_document_alone(pairs):
    first, second = tokens(0, 9), tokens(1, 6)
    a, b = (pairs.encoder(ids).mean(1) for ids in (first, second))
    expected = pairs.output(torch.cat([a, b, a * b, a - b], -1))
    torch.testing.assert_close(pairs(first, second), expected)
    assert (pairs(second, first) - expected).abs().max() > 1e-3
    asked = torch.tensor([True, False, True])
    torch.testing.assert_close(pairs.logits_at(asked, ids=first, second=second), expected[asked])
    targets = torch.tensor([2, 0, 1])
    torch.testing.assert_close(pairs.loss(first, second, targets), torch.nn.functional.cross_entropy(expected, targets))


def test_padding_of_either_document_changes_nothing(pairs):
    first, second = tokens(0, 9), tokens(1, 6)
    masks = [torch.ones(3, 9, dtype=torch.bool), torch.ones(3, 6, dtype=torch.bool)]
    masks[0][1, 5:], masks[1][2, :2] = False, False
    found = pairs(first, second, key_mask=masks[0], second_mask=masks[1])
    torch.testing.assert_close(found[1:2], pairs(first[1:2, :5], second[1:2]))
    torch.testing.assert_close(found[2:], pairs(first[2:], second[2:, 2:]))
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 3\)"):
        pairs.loss(first, second, torch.tensor([0, 3, 1]))
    with pytest.raises(ValueError, match="num_classes must be at least 2"):
        PairClassifier(EncoderConfig(**SIZES), 1)


@pytest.fixture
def autoencoder() -> SequenceAutoencoder:
    torch.manual_seed(0)
    return SequenceAutoencoder(ModelConfig(**SIZES)).double()


def test_a_row_is_read_out_of_its_last_vector_alone(autoencoder):
    """Other tokens with the same last vector would be read alike; each place is read by itself."""
    ids = tokens(0, 8)
    model, logits = autoencoder.language_model, autoencoder(ids)
    last = model.hidden_states(ids)[:, -1].detach()
    other = tokens(5, 8)
    hook = model.final_norm.register_forward_hook(lambda *_: last[:, None].expand(-1, 8, -1))
    torch.testing.assert_close(autoencoder(other), logits)
    hook.remove()
    assert (autoencoder(other) - logits).abs().max() > 1e-3
    assert (logits[:, 0] - logits[:, 3]).abs().max() > 1e-3  # the place is told
    asked = torch.zeros(3, 8, dtype=torch.bool)
    asked[0, 2] = asked[2, 5] = True
    torch.testing.assert_close(autoencoder.logits_at(asked, ids=ids), logits[asked])
    targets = ids.masked_fill(~asked, -100)
    expected = torch.nn.functional.cross_entropy(logits[asked].float(), ids[asked])
    torch.testing.assert_close(autoencoder.loss(ids, targets).float(), expected, rtol=1e-5, atol=1e-6)


def test_padding_behind_a_row_changes_nothing_and_every_weight_learns(autoencoder):
    ids, real = tokens(0, 8), torch.ones(3, 8, dtype=torch.bool)
    real[1, 5:] = False
    torch.testing.assert_close(autoencoder(ids, key_mask=real)[1:2, :5], autoencoder(ids[1:2, :5]))
    autoencoder.loss(ids, ids, key_mask=real).backward()
    assert all(each.grad is not None and each.grad.abs().max() > 0 for each in autoencoder.parameters())
