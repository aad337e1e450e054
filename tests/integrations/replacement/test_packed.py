"""Documents packed into one row of a model of transformers: a replaced layer keeps them apart."""

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from attention.covering import pairs_always
from integrations.replacement.models import CHUNK, LENGTH, load, logits, sketch, text
from polysketch import replace_attention

LENGTHS = [17, 1, CHUNK, 30, 16]


def batch_of(lengths: list[int], **options) -> tuple[list[Tensor], dict]:
    """Documents one by one, and the row that transformers' collator makes of them."""
    documents = list(text(1, sum(lengths)).split(lengths, 1))
    features = [{"input_ids": document[0].tolist()} for document in documents]
    return documents, dict(DataCollatorWithFlattening(**options)(features))


def replaced(folder, name: str, kind: str, layers="all"):
    model = load(folder, name)
    if kind == "polysketch-paper":
        return sketch(model, layers)
    options = {"window": CHUNK, "sketch_size": 6} if kind == "polysketch-window" else {}
    return replace_attention(model, kind, layers=layers, sliding_window="ignore", **options)


@pytest.mark.parametrize(
    ("given", "name", "kind"),
    pairs_always(
        {
            "given": ("positions", "offsets"),
            "name": ("llama", "qwen3", "gpt2", "mistral"),
            "kind": ("polysketch-paper", "softmax", "polysketch-window"),
        }
    ),
)
def test_a_packed_row_equals_its_documents_apart(folder, name, kind, given):
    options = {"positions": {}, "offsets": {"return_flash_attn_kwargs": True}}[given]
    if name == "gpt2" and kind == "polysketch-window":
        pytest.skip("GPT-2 has no rotary positions")
    model = replaced(folder, name, kind)
    documents, batch = batch_of(LENGTHS, **options)
    expected = torch.cat([logits(model, document, use_cache=False) for document in documents], 1)
    ids = batch.pop("input_ids")
    del batch["labels"]
    torch.testing.assert_close(logits(model, ids, use_cache=False, **batch), expected, rtol=0, atol=2e-4)
    merged = logits(model, ids, use_cache=False)
    assert (merged - expected)[:, LENGTHS[0] :].abs().amax(-1).mean() > 1e-2


def test_replaced_layers_keep_documents_apart_beside_layers_of_the_models_own(folder):
    model = replaced(folder, "llama", "polysketch-paper", layers=[1])
    documents, batch = batch_of(LENGTHS)
    expected = torch.cat([logits(model, document, use_cache=False) for document in documents], 1)
    found = logits(model, batch["input_ids"], use_cache=False, position_ids=batch["position_ids"])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_the_loss_and_its_gradients_are_those_of_the_documents(folder):
    model = replaced(folder, "llama", "polysketch-paper").train()
    documents, batch = batch_of(LENGTHS)
    losses = [
        torch.nn.functional.cross_entropy(
            model(document, use_cache=False).logits[0, :-1], document[0, 1:], reduction="sum"
        )
        for document in documents
    ]
    expected = torch.stack(losses).sum() / (sum(LENGTHS) - len(LENGTHS))
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    loss = model(**batch, use_cache=False).loss
    torch.testing.assert_close(loss, expected)
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-6)


def test_positions_of_one_text_change_nothing(folder):
    model, ids = replaced(folder, "llama", "polysketch-paper"), text(2)
    positions = torch.arange(LENGTH)[None]
    for options in ({"use_cache": False}, {"use_cache": True}):
        assert torch.equal(logits(model, ids, position_ids=positions, **options), logits(model, ids, **options))


def test_a_window_is_compared_with_documents_not_with_the_row(folder):
    """Mistral's layers see 64 tokens; the documents together have more."""
    model = replace_attention(load(folder, "mistral"), "softmax")
    lengths = [60, 40]
    documents, batch = batch_of(lengths)
    expected = torch.cat([logits(model, document, use_cache=False) for document in documents], 1)
    found = logits(model, batch["input_ids"], use_cache=False, position_ids=batch["position_ids"])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
