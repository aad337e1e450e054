"""What `polysketch evaluate` measures: a model of ours or of transformers, its tokenizer and its text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polysketch.data import PreparedData, require_same_tokenizer
from polysketch.data.tokenization.base import LOSSLESS_PROBE
from polysketch.models import TransformerLM
from polysketch.training import RunDescription

__all__ = ["EvaluatedModel", "open_transformers"]

_PROBE = f"The quick brown fox jumps over 13 lazy dogs.\n\n{LOSSLESS_PROBE}"


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to be evaluated, wherever it is from.

    Attributes:
        path: as it was given.
        model: has the interface of `TransformerLM`.
        tokenizer: of `polysketch.data`, or of transformers.
        encode: text to ids, without special tokens.
        context_length: tokens of a training window; None where it is not known.
        step: optimizer steps behind it; None where it is not known.
        description: of the run; None for a folder of transformers.
        original: the model of transformers that `model` wraps; None for one of ours.
    """

    path: Path
    model: Any
    tokenizer: Any
    encode: Callable[[str], Sequence[int]]
    context_length: int | None
    step: int | None
    description: RunDescription | None
    original: Any = None

    @classmethod
    def of_run(cls, path: Path, model: TransformerLM, description: RunDescription) -> "EvaluatedModel":
        """The model of a training run."""
        return cls(
            path,
            model,
            description.tokenizer,
            description.tokenizer.encode,
            description.context_length,
            description.step,
            description,
        )

    @property
    def title(self) -> str:
        """Its name and age, for a heading."""
        return str(self.path) if self.step is None else f"{self.path} at step {self.step}"

    def open_data(self, folder: Path | None) -> PreparedData:
        """The text in `folder`, or what the run was trained on, which may have moved since.

        Raises:
            ValueError: no folder for a model that does not say what it was trained on, or another tokenizer.
            FileNotFoundError: the run's data are gone.
        """
        if self.description is None:
            return self._open_text_for_transformers(folder)
        if folder is None and not self.description.data.exists():
            raise FileNotFoundError(
                f"expected the data of the run {self.path} in {self.description.data}, found nothing there: "
                "if the folder was moved, say where it is with --data"
            )
        data = PreparedData.open(self.description.data if folder is None else folder)
        require_same_tokenizer(
            self.tokenizer, data.tokenizer, owner=f"the run {self.path}", other=f"the data folder {data.folder}"
        )
        return data

    def _open_text_for_transformers(self, folder: Path | None) -> PreparedData:
        if folder is None:
            raise ValueError(
                f"expected --data with a folder of prepared text for {self.path}, which does not say what it was "
                f"trained on: polysketch prepare TEXT --tokenizer {self.path / 'tokenizer.json'} --out FOLDER"
            )
        data = PreparedData.open(folder)
        if list(self.encode(_PROBE)) != data.tokenizer.encode(_PROBE):
            raise ValueError(
                f"expected text prepared with the tokenizer of {self.path}, found {data.tokenizer.name} in {folder}: "
                f"prepare it again with --tokenizer {self.path / 'tokenizer.json'}"
            )
        return data


def open_transformers(path: Path, device: torch.device) -> EvaluatedModel:
    """The model of a folder of transformers; one of ours is taken out of its shell."""
    from polysketch.integrations.huggingface import PolysketchForCausalLM
    from polysketch.integrations.language_model import HuggingFaceLM
    from polysketch.integrations.transformers_folder import load_transformers

    original, tokenizer = load_transformers(path, device=device)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    if isinstance(original, PolysketchForCausalLM):
        return EvaluatedModel(path, original.inner, tokenizer, encode, original.config.context_length, None, None)
    longest = getattr(original.config, "max_position_embeddings", None)
    return EvaluatedModel(path, HuggingFaceLM(original).eval(), tokenizer, encode, longest, None, None, original)
