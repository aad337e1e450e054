"""Documents packed into one row of our models in transformers, as its collator packs them."""

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from polysketch.integrations.huggingface import (
    PolysketchConfig,
    PolysketchForCausalLM,
    PolysketchForSequenceClassification,
)
from polysketch.models import ModelConfig, TransformerLM

LENGTHS = [9, 1, 8, 37, 7, 2, 20]
VOCABULARY = 31


def tiny() -> PolysketchForCausalLM:
    torch.manual_seed(0)
    options = {"sketch_size": 6, "local_chunk": 8}
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "projection_convolution": 3}
    config = ModelConfig(VOCABULARY, **sizes, attention="polysketch-paper", attention_options=options)
    return PolysketchForCausalLM.from_transformer(TransformerLM(config)).eval()


def batch_of(lengths: list[int], **options) -> tuple[list[Tensor], dict]:
    """Documents one by one, and the row that transformers' collator makes of them."""
    generator = torch.Generator().manual_seed(1)
    documents = list(torch.randint(VOCABULARY, (1, sum(lengths)), generator=generator).split(lengths, 1))
    features = [{"input_ids": document[0].tolist()} for document in documents]
    return documents, dict(DataCollatorWithFlattening(**options)(features))


COLLATORS = [{}, {"return_flash_attn_kwargs": True}, {"return_flash_attn_kwargs": True, "return_position_ids": False}]


@pytest.mark.parametrize("lengths", [LENGTHS, [12, 12, 12]], ids=["unequal", "equal"])
@pytest.mark.parametrize("options", COLLATORS, ids=["positions", "both", "offsets"])
def test_a_packed_row_equals_its_documents_apart(options, lengths):
    model = tiny()
    documents, batch = batch_of(lengths, **options)
    parts = [model(document) for document in documents]
    found = model(**batch)
    torch.testing.assert_close(found.logits, torch.cat([part.logits for part in parts], 1), rtol=0, atol=1e-5)
    assert found.past_key_values is None
    summed = [
        torch.nn.functional.cross_entropy(part.logits[0, :-1], document[0, 1:], reduction="sum")
        for part, document in zip(parts, documents, strict=True)
    ]
    expected = torch.stack(summed).sum() / (sum(lengths) - len(lengths))
    torch.testing.assert_close(found.loss, expected)
    batch["labels"] = batch["input_ids"]  # a document's last token does not predict the next document
    torch.testing.assert_close(model(**batch, skip_logits=True).loss, expected)
    merged = model(batch["input_ids"]).logits
    assert (merged - found.logits)[:, lengths[0] :].abs().amax(-1).mean() > 1e-2


def test_positions_that_the_model_counts_itself_change_nothing():
    model, ids = tiny(), torch.randint(VOCABULARY, (2, 12))
    positions = torch.arange(12)[None]
    assert torch.equal(model(ids, position_ids=positions).logits, model(ids).logits)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask, position_ids=padded).logits, expected)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    found = model(ids[:, 8:], past_key_values=cache, position_ids=positions[:, 8:]).logits
    torch.testing.assert_close(found, model(ids).logits[:, 8:], rtol=0, atol=1e-5)


def test_trainer_trains_on_packed_rows(tmp_path):
    model = tiny().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = [{"input_ids": document[0].tolist()} for document in batch_of(LENGTHS)[0]]
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2, per_device_train_batch_size=4
    )
    collator = DataCollatorWithFlattening()
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collator)
    trainer.train()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert trainer.evaluate()["eval_loss"] > 0


RESTARTING = torch.arange(6).repeat(2)[None]
OFFSETS = torch.tensor([0, 6, 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"position_ids": RESTARTING, "use_cache": True}, ValueError, "leave no cache to go on from"),
        ({"position_ids": RESTARTING, "attention_mask": torch.ones(1, 12)}, ValueError, "neither an attention_mask"),
        ({"position_ids": RESTARTING + 1}, ValueError, "restart at 0 with the next"),
        ({"position_ids": torch.arange(4, 16)[None]}, ValueError, "must count from 0 in each row.* got 4 first"),
        ({"position_ids": RESTARTING, "cu_seq_lens_q": OFFSETS[[0, 2]]}, ValueError, "must restart where they say"),
        ({"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS[[0, 2]]}, ValueError, "must be the same"),
        ({"cu_seq_lens_q": OFFSETS.long()}, TypeError, "must be an int32 tensor"),
        ({"cu_seq_lens_q": OFFSETS[:2]}, ValueError, "must end at the length of the row, 12, got 6"),
        ({"position_ids": RESTARTING, "seq_idx": RESTARTING}, ValueError, "do not take seq_idx"),
    ],
)
def test_what_is_not_understood_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        tiny()(torch.randint(VOCABULARY, (1, 12)), **options)


def test_restarts_in_several_rows_and_packed_rows_to_classify_are_refused():
    model, ids = tiny(), torch.randint(VOCABULARY, (2, 12))
    with pytest.raises(ValueError, match="in 2 rows: documents are packed into a single row"):
        model(ids, position_ids=RESTARTING.repeat(2, 1))
    with pytest.raises(ValueError, match="a batch of 1 is expected, got 2 rows"):
        model(ids, cu_seq_lens_q=OFFSETS)
    config = PolysketchConfig.from_model_config(model.inner.config, num_labels=4)
    with pytest.raises(ValueError, match="a row has one class"):
        PolysketchForSequenceClassification(config)(ids[:1], position_ids=RESTARTING)
