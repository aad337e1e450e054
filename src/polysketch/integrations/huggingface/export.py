"""From a run folder to a folder that the Auto classes of transformers load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from polysketch.data import TokenizerLike
from polysketch.integrations.huggingface.causal_lm import PolysketchForCausalLM
from polysketch.integrations.huggingface.export_answering import export_answering
from polysketch.integrations.huggingface.facts import run_facts
from polysketch.integrations.huggingface.model_card import model_card
from polysketch.integrations.huggingface.tokenizer import require_same_ids, to_fast_tokenizer
from polysketch.integrations.transformers_folder import check_export
from polysketch.storage import whole_folder
from polysketch.training import load_model
from polysketch.training.run_folder import find_run, task_of_run

ORIGINAL_TOKENIZER = "polysketch_tokenizer"
"""Stem of the file that holds the run's tokenizer byte for byte, for the way back."""


def export_run(run: str | Path, folder: str | Path, *, checkpoint: str = "latest") -> Path:
    """Write the model of a run for transformers: weights, configuration, tokenizer and a model card.

    A run of text gives a language model. That of a task gives what the task asks for: a language model, a masked
    language model, a classifier with the names of its classes, or a model that reads one sequence and writes another.

    The folder appears whole or not at all. Weights are float32, as trained; nothing is pickled.

    Args:
        run: the run folder.
        folder: to write; new or empty.
        checkpoint: a checkpoint's name, `latest`, or `best` (of the least validation loss).

    Returns:
        The folder.

    Raises:
        FileNotFoundError: no run, or no such checkpoint.
        FileExistsError: the folder has contents.
        ValueError: a damaged checkpoint, or a tokenizer that transformers cannot have, see `to_fast_tokenizer`.
    """
    check_export(run, folder, checkpoint=checkpoint)
    folder = Path(folder)
    if task_of_run(find_run(run, checkpoint)[0]) is not None:
        return export_answering(run, folder, checkpoint)
    transformer, description = load_model(run, checkpoint=checkpoint)
    tokenizer = description.tokenizer
    fast = to_fast_tokenizer(tokenizer)
    facts = run_facts(transformer, description)
    ends = {f"{name}_token_id": tokenizer.end_of_text for name in ("bos", "eos", "pad")}
    model = PolysketchForCausalLM.from_transformer(
        transformer, context_length=description.context_length, training_run=facts, **ends
    )
    model.generation_config = GenerationConfig(**ends)
    with whole_folder(folder, sums=True) as staging:
        model.save_pretrained(staging)
        fast.save_pretrained(staging)
        require_same_ids(tokenizer, type(fast).from_pretrained(staging))
        _keep_original(tokenizer, staging)
        card = model_card(folder.resolve().name, transformer.config, facts)
        (staging / "README.md").write_text(card, encoding="utf-8")
    return folder


def original_tokenizer(folder: Path, description: dict[str, Any]) -> Path:
    """Where an exported folder keeps the run's own tokenizer file."""
    return folder / f"{ORIGINAL_TOKENIZER}{Path(description['file']).suffix}"


def _keep_original(tokenizer: TokenizerLike, folder: Path) -> None:
    if tokenizer.file_name is not None:
        original_tokenizer(folder, {"file": tokenizer.file_name}).write_bytes(tokenizer.serialized())
