"""Models of transformers for `generation.generate`: ours taken out of their shell, others each row by itself."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.data import TokenizerLike, load_tokenizer
from polysketch.integrations.language_model import HuggingFaceLM
from polysketch.integrations.transformers_folder import read_model
from polysketch.models import TransformerLM


def load_to_continue(
    folder: str | Path, *, device: torch.device | str = "cpu"
) -> tuple["TransformerLM | ContinuedHuggingFaceLM", TokenizerLike]:
    """Load a causal language model of transformers, and its tokenizer, for `generation.generate`.

    Args:
        folder: exported, converted, or any other causal model of transformers with its tokenizer.
        device: where to put the model.

    Returns:
        A `TransformerLM` where the model is one of ours, else a `ContinuedHuggingFaceLM`.

    Raises:
        FileNotFoundError: no tokenizer in the folder.
        TypeError, ValueError: not a causal language model, damaged weights, or logits that are changed after the output
            layer.
        ImportError: the extra `hf` is missing.
    """
    from polysketch.integrations.huggingface import PolysketchForCausalLM
    from polysketch.integrations.huggingface.import_model import find_tokenizer, known_of_run

    model = read_model(folder, device=device)
    if isinstance(model, PolysketchForCausalLM):
        return model.inner, find_tokenizer(Path(folder), known_of_run(model.config, Path(folder)).get("tokenizer"))
    return ContinuedHuggingFaceLM(model).eval(), load_tokenizer(str(folder))


@dataclass
class RowCaches:
    """The caches of several rows, which transformers keeps.

    Attributes:
        caches: one for each row.
        position: (rows,) int64, tokens read of each row.
    """

    caches: list[Any]
    position: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the caches."""
        return sum(_nbytes(cache, set()) for cache in self.caches)

    def clone(self) -> "RowCaches":
        """An independent copy, to roll back to."""
        return self.reorder(torch.arange(len(self.caches)))

    def reorder(self, indices: Tensor) -> "RowCaches":
        """Copies of the caches of the rows `indices` (int64), repeats allowed."""
        return RowCaches([copy.deepcopy(self.caches[row]) for row in indices.tolist()], self.position[indices])


class ContinuedHuggingFaceLM(HuggingFaceLM):
    """A causal model of transformers that `generation.generate` can continue prompts with.

    Every row has a cache of its own, so that prompts of different lengths need no padding: rows are read one after the
    other, and a batch is no faster than its rows.
    """

    def init_state(self, batch_size: int, *, device: torch.device | str | None = None) -> RowCaches:
        """Empty caches."""
        caches = [super(ContinuedHuggingFaceLM, self).init_state(1) for _ in range(batch_size)]
        return RowCaches(caches, torch.zeros(batch_size, dtype=torch.int64))

    @torch.no_grad()
    def extend_hidden(
        self, ids: Tensor, state: RowCaches, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, RowCaches]:
        """As `TransformerLM.extend_hidden`; padding stands on the left."""
        rows = []
        for row, row_ids in enumerate(ids):
            real = row_ids if key_mask is None else row_ids[key_mask[row]]
            rows.append(self._extend_row(real, state, row, ids.shape[1]))
        return torch.cat(rows), state

    @torch.no_grad()
    def extend(self, ids: Tensor, state: RowCaches) -> tuple[Tensor, RowCaches]:
        """As `TransformerLM.extend`: logits (batch, length, vocab_size)."""
        hidden, state = self.extend_hidden(ids, state)
        return self.logits(hidden), state

    def why_not_captured(self, state: RowCaches) -> str:
        """Why a step is no CUDA graph."""
        return "the caches of transformers grow"

    def _extend_row(self, real: Tensor, state: RowCaches, row: int, length: int) -> Tensor:
        if not len(real):
            return self._output_weights()[0].new_zeros(1, length, self.model.get_output_embeddings().weight.shape[1])
        hidden, state.caches[row] = super().extend_hidden(real[None], state.caches[row])
        state.position[row] += len(real)
        return F.pad(hidden, (0, 0, length - len(real), 0))


def _nbytes(part: Any, seen: set[int]) -> int:
    """Bytes of the tensors in an object, and in what it holds."""
    if id(part) in seen:
        return 0
    seen.add(id(part))
    if isinstance(part, Tensor):
        return part.nbytes
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else None
    if inner is None:
        inner = vars(part).values() if hasattr(part, "__dict__") and not isinstance(part, type) else ()
    return sum(_nbytes(one, seen) for one in inner)
