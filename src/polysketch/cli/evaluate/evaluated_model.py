"""What `polysketch evaluate` measures: a model of ours or of transformers, its tokenizer and its text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polysketch import training
from polysketch.data import PreparedData, load_tokenizer, require_same_tokenizer
from polysketch.data.prepared import is_foreign
from polysketch.data.tokenization.base import LOSSLESS_PROBE
from polysketch.integrations.transformers_folder import is_transformers_folder, load_transformers
from polysketch.training import RunDescription
from polysketch.training.environment import resolve_device

__all__ = ["EvaluatedModel", "open_model"]

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

    @property
    def title(self) -> str:
        """Its name and age, for a heading."""
        return str(self.path) if self.step is None else f"{self.path} at step {self.step}"

    def remove_prefix(self) -> None:
        """Switch the sketched prefix off.

        Raises:
            ValueError: a model of transformers, which has none to switch off here, or one without a prefix.
        """
        if self.original is not None:
            raise ValueError(
                f"--without-prefix: expected a model of polysketch, found one of transformers in {self.path}"
            )
        self.model.remove_prefix()

    def require_finite(self, loss: float) -> None:
        """Refuse a loss that is none.

        Raises:
            ValueError: NaN or infinity.
        """
        if not math.isfinite(loss):
            raise ValueError(f"expected a finite loss, found {loss}: the weights of {self.path} are probably bad")

    def open_data(self, folder: Path | None) -> PreparedData:
        """The text in `folder`, or what the run was trained on, which may have moved since.

        Raises:
            ValueError: no folder for a model that does not say what it was trained on, or another tokenizer.
            FileNotFoundError: the run's data are gone.
        """
        if self.description is None:
            return self._open_text_for_transformers(folder)
        if folder is None and not (self.description.data.exists() or is_foreign(self.description.data)):
            raise FileNotFoundError(
                f"expected the data of the run {self.path} in {self.description.data}, found nothing there: "
                "if it was moved, or the run was imported, say with --data where prepared text is"
            )
        data = PreparedData.open(self.description.data if folder is None else folder, self.tokenizer)
        require_same_tokenizer(
            self.tokenizer, data.tokenizer, owner=f"the run {self.path}", other=f"the data folder {data.folder}"
        )
        return _verified(data)

    def _open_text_for_transformers(self, folder: Path | None) -> PreparedData:
        if folder is None:
            raise ValueError(
                f"expected --data with a folder of prepared text for {self.path}, which does not say what it was "
                f"trained on: polysketch prepare TEXT --tokenizer {self.path / 'tokenizer.json'} --out FOLDER"
            )
        data = PreparedData.open(folder, load_tokenizer(self.path) if is_foreign(folder) else None)
        if list(self.encode(_PROBE)) != data.tokenizer.encode(_PROBE):
            raise ValueError(
                f"expected text prepared with the tokenizer of {self.path}, found {data.tokenizer.name} in {folder}: "
                f"prepare it again with --tokenizer {self.path / 'tokenizer.json'}"
            )
        return _verified(data)


def _verified(data: PreparedData) -> PreparedData:
    """Data of which every byte was compared with its sha256."""
    data.verify()
    return data


def open_model(path: Path, *, device: str, checkpoint: str) -> EvaluatedModel:
    """Open the model of a training run, or of a folder of transformers.

    Args:
        path: the run's folder, or that of transformers.
        device: where to compute: cpu, cuda, ...; auto takes a GPU where there is one.
        checkpoint: of a run: latest, best, or a name.

    Raises:
        FileNotFoundError: no run and no model there, or no such checkpoint.
        ValueError: damaged weights, or an unknown device.
        ImportError: the extra `hf` is missing for a folder of transformers.
    """
    if is_transformers_folder(path):
        return _open_transformers(path, resolve_device(device))
    model, description = training.load_model(path, device=resolve_device(device), checkpoint=checkpoint)
    tokenizer, context = description.tokenizer, description.context_length
    return EvaluatedModel(path, model, tokenizer, tokenizer.encode, context, description.step, description)


def _open_transformers(path: Path, device: torch.device) -> EvaluatedModel:
    """The model of a folder of transformers; one of ours is taken out of its shell."""
    from polysketch.integrations.huggingface import PolysketchForCausalLM
    from polysketch.integrations.language_model import HuggingFaceLM

    original, tokenizer = load_transformers(path, device=device)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    if isinstance(original, PolysketchForCausalLM):
        return EvaluatedModel(path, original.inner, tokenizer, encode, original.config.context_length, None, None)
    longest = getattr(original.config, "max_position_embeddings", None)
    return EvaluatedModel(path, HuggingFaceLM(original).eval(), tokenizer, encode, longest, None, None, original)
