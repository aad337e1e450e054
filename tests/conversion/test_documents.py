"""Documents of a window that are read apart: every one as if it stood alone."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from polysketch import replace_attention
from polysketch.conversion.distillation import Distillation, frozen_copy
from polysketch.conversion.transfer import AttentionTransfer, LayerTransfer
from polysketch.integrations.language_model import HuggingFaceLM, require_documents_apart
from polysketch.integrations.packed_rows import positions_of_documents

END = 0


@pytest.fixture
def model(softmax_model):
    return AutoModelForCausalLM.from_pretrained(softmax_model).eval()


def documents(*lengths: int) -> list[Tensor]:
    """Each (1, length), its last token the end of text."""
    generator = torch.Generator().manual_seed(2)
    return [
        torch.cat([torch.randint(1, 97, (1, length - 1), generator=generator), torch.tensor([[END]])], 1)
        for length in lengths
    ]


def test_places_begin_anew_behind_every_end_and_in_every_row():
    ids = torch.tensor([[5, END, END, 7, 8], [END, 4, 4, 4, END]])
    assert positions_of_documents(ids, END).tolist() == [[0, 1, 0, 0, 1], [0, 0, 1, 2, 3]]


@pytest.mark.parametrize("name", ["softmax", "polysketch"])
def test_rows_are_their_documents_one_by_one(model, name):
    if name == "polysketch":
        replace_attention(model, name, window=4, sketch_size=4)
    parts = documents(9, 14, 3, 12, 10, 4)
    rows = torch.cat([torch.cat(parts[:3], 1), torch.cat(parts[3:], 1)])
    with torch.no_grad():
        found = HuggingFaceLM(model, end_of_text=END).hidden_states(rows).flatten(0, 1)
        expected = torch.cat([HuggingFaceLM(model).hidden_states(part)[0] for part in parts])
        together = HuggingFaceLM(model).hidden_states(rows).flatten(0, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (together - expected).abs().max() > 1e-2


LOSSES = {
    "mechanisms": lambda model, teacher, **options: AttentionTransfer(model, **options),
    "layers": lambda model, teacher, **options: LayerTransfer(model, teacher, **options),
    "distillation": lambda model, teacher, **options: Distillation(model, teacher, **options),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_does_not_ask_in_which_order_documents_stand(model, loss):
    """The last token of a row is only predicted, and what ends a document predicts the next one: so these stay."""
    teacher = frozen_copy(model)
    replace_attention(model, "polysketch", window=4, sketch_size=4)
    first, second, last = documents(9, 14, 12)
    rows = [torch.cat([*pair, last], 1) for pair in ((first, second), (second, first))]
    with torch.no_grad():
        apart, together = (
            [float(LOSSES[loss](model, teacher, end_of_text=end).loss(row)) for row in rows] for end in (END, None)
        )
    assert apart[0] == pytest.approx(apart[1], rel=1e-5)
    assert together[0] != pytest.approx(together[1], rel=1e-3)


@pytest.mark.parametrize("name", ["softmax", "polysketch"])
def test_a_model_that_lets_documents_see_one_another_is_refused(model, name):
    """OPT makes its causal mask itself, and its own positions: it never hears of documents."""
    require_documents_apart(model, END)
    config = OPTConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        ffn_dim=32,
        num_attention_heads=2,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    )
    torch.manual_seed(0)
    other = OPTForCausalLM(config)
    if name == "polysketch":
        replace_attention(other, name, window=4, sketch_size=4)
    require_documents_apart(other, None)
    for refused in (lambda: require_documents_apart(other, END), lambda: HuggingFaceLM(other, end_of_text=END)):
        with pytest.raises(ValueError, match=r"depends on the first in OPTForCausalLM, .* --pack windows"):
            refused()
    assert other.training
