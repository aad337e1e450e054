"""The model of a task's run for transformers: an encoder with a head, one with a decoder, or a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from polysketch.integrations.huggingface.causal_lm import PolysketchForCausalLM
from polysketch.integrations.huggingface.encoder_classification import (
    PolysketchEncoderForSequenceClassification,
    PolysketchEncoderForTokenClassification,
)
from polysketch.integrations.huggingface.facts import task_facts
from polysketch.integrations.huggingface.masked_lm import PolysketchEncoderForMaskedLM
from polysketch.integrations.huggingface.model_card import task_card
from polysketch.integrations.huggingface.seq2seq_lm import PolysketchForSeq2SeqLM
from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer
from polysketch.storage import whole_folder
from polysketch.tasks.batch import BEGINNING
from polysketch.training.learned import task_options
from polysketch.training.loading import RunDescription, load_answering_model
from polysketch.training.run_folder import RunFolder

_CLASSES: dict[str, Any] = {
    "next": PolysketchForCausalLM,
    "each": PolysketchEncoderForMaskedLM,
    "labels": PolysketchEncoderForTokenClassification,
    "class": PolysketchEncoderForSequenceClassification,
    "written": PolysketchForSeq2SeqLM,
}
_AUTO = {
    "next": "AutoModelForCausalLM",
    "each": "AutoModelForMaskedLM",
    "labels": "AutoModelForTokenClassification",
    "class": "AutoModelForSequenceClassification",
    "written": "AutoModelForSeq2SeqLM",
}


def export_answering(run: str | Path, folder: Path, checkpoint: str) -> Path:
    """Write the model of a run that learned a task; arguments, result and errors as for `export_run`.

    The folder has the tokenizer where the task's rows are texts, and the names of the classes where they are known.
    """
    model, sizes, description = load_answering_model(run, checkpoint=checkpoint)
    facts = task_facts(model, description)
    options = task_options(description)
    names = options.get("class_names")
    wrapped: PreTrainedModel = _CLASSES[sizes.asks].from_transformer(model, training_run=facts, **_fields(sizes, names))
    if sizes.asks == "written":
        ids = {**_fields(sizes, None), "eos_token_id": options.get("end")}
        wrapped.generation_config = GenerationConfig(max_new_tokens=description.context_length, **ids)
    has_tokenizer = RunFolder(description.folder).tokenizer.is_dir()
    with whole_folder(folder, sums=True) as staging:
        wrapped.save_pretrained(staging)
        if has_tokenizer:
            _tokenizer(description, sizes.vocab_size).save_pretrained(staging)
        card = task_card(folder.resolve().name, _AUTO[sizes.asks], sizes, facts, has_tokenizer=has_tokenizer)
        (staging / "README.md").write_text(card, encoding="utf-8")
    return folder


def _tokenizer(description: RunDescription, vocab_size: int) -> Any:
    """That of the rows, and of a model that learned hidden tokens the mask, which is the last id."""
    fast = to_fast_tokenizer(description.tokenizer)
    fast.model_max_length = description.context_length
    if len(fast) == vocab_size - 1:
        fast.add_special_tokens({"mask_token": "[MASK]"})
    return fast


def _fields(sizes: Any, names: list[str] | None) -> dict[str, Any]:
    """Fields of the configuration that are not those of the model."""
    if sizes.asks == "written":
        return {"decoder_start_token_id": BEGINNING, "pad_token_id": BEGINNING}
    if names is None or sizes.asks not in ("class", "labels"):
        return {}
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
