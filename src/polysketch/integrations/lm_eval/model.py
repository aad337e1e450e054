"""Models in lm_eval: its own class for models of transformers, and ours in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import DEFAULT_MAX_LENGTH, normalize_gen_kwargs
from torch import Tensor

from polysketch.integrations.huggingface import PolysketchForCausalLM
from polysketch.integrations.lm_eval.scoring import Continuation, Score, score_batches
from polysketch.integrations.lm_eval.tasks import LoadedTask, quiet
from polysketch.integrations.lm_eval.tokenizer import in_transformers
from polysketch.models import TransformerLM
from polysketch.progress import Progress
from polysketch.training import load_model
from polysketch.training.environment import resolve_device

__all__ = ["PolysketchLM", "room_for", "transformers_model"]


def room_for(tasks: Sequence[LoadedTask]) -> int | None:
    """Tokens that a model has to read for tasks that say so; None where the default is enough."""
    room = max((loaded.room for loaded in tasks), default=0)
    return room if room > DEFAULT_MAX_LENGTH else None


def transformers_model(model: Any, tokenizer: Any, *, batch_size: int, max_length: int | None = None) -> HFLM:
    """lm_eval's HFLM around a model that is loaded already.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        batch_size: inputs read at a time.
        max_length: tokens that it reads at most. Default: as its configuration states, or 2048.
    """
    with quiet():
        return HFLM(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_length=max_length
        )


_ROWS = 16


def _rows(batch_size: int | str) -> int:
    """The number of rows; lm_eval's "auto" and "auto:N" look for the largest that fits, which is not done here."""
    return _ROWS if str(batch_size).startswith("auto") else int(batch_size)


@register_model("polysketch")
class PolysketchLM(HFLM):
    """lm_eval's HFLM with a model of ours: the same figures, in less memory and time.

    HFLM holds the logits of all positions over the whole vocabulary, twice; here only those of tokens that are scored
    are computed, 1,024 positions at a time. Generation carries a state of constant size. The rest is HFLM's: where text
    is split into context and continuation, what stands before a text without context, where long inputs are cut.

    Args:
        pretrained: folder of a training run, or a model; then `tokenizer` too.
        tokenizer: of `polysketch.data` or of transformers; None is the run's.
        checkpoint: which checkpoint of the run.
        device: where a run's model goes; a model that is given stays where it is.
        batch_size: inputs read at a time; "auto" is 16.
        max_length: tokens that the model reads at most; longer contexts are cut on the left. None is 2048, as in
            lm_eval for models that state no limit: those of ours have none, whatever they were trained with.
        max_batch_size: lm_eval passes it; not used.

    Raises:
        ValueError: a model without a tokenizer, or a size below 1.
        FileNotFoundError: no such run.
    """

    def __init__(
        self,
        pretrained: str | Path | TransformerLM,
        *,
        tokenizer: Any = None,
        checkpoint: str = "latest",
        device: str | None = None,
        batch_size: int | str = _ROWS,
        max_length: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        if isinstance(pretrained, str | Path):
            pretrained, run = load_model(pretrained, device=resolve_device(device or "auto"), checkpoint=checkpoint)
            tokenizer = run.tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ValueError("expected a tokenizer with a model that is given as a module, found none")
        longest, rows = DEFAULT_MAX_LENGTH if max_length is None else int(max_length), _rows(batch_size)
        if min(longest, rows) < 1:
            raise ValueError(f"expected --max-length and --batch-size of at least 1, found {longest} and {rows}")
        tokenizer = in_transformers(tokenizer)
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        wrapped = PolysketchForCausalLM.from_transformer(pretrained.eval(), **special)
        with quiet():
            super().__init__(
                pretrained=wrapped, tokenizer=tokenizer, backend="causal", batch_size=rows, max_length=longest
            )

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its task's stop strings, or the end of the text.

        Raises:
            ValueError: more tokens to generate than `max_length` leaves room for beside a context.
        """
        asked = [normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"] for request in requests]
        if max(asked, default=0) >= self.max_length:
            raise ValueError(
                f"expected room for a context beside {max(asked)} generated tokens, found a model that reads "
                f"{self.max_length}: allow it a longer context"
            )
        return super().generate_until(requests, disable_tqdm)

    def tok_batch_encode(self, strings: list[str], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As HFLM's; a context without tokens is the one that stands before a text, as for `loglikelihood`."""
        ids, mask = super().tok_batch_encode(strings, *args, **kwargs)
        if not ids.shape[1]:
            ids, mask = (each.new_zeros(len(strings), 1, dtype=torch.long) for each in (ids, mask))
        empty = ~mask.bool().any(1)
        ids[empty, -1], mask[empty, -1] = self.prefix_token_id, 1
        return ids, mask

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Score]:
        """Score (anything, context ids, continuation ids); a context of spaces alone may have left no ids."""
        continuations = [
            Continuation.cut(context or [self.prefix_token_id], targets, self.max_length)
            for _, context, targets in requests
        ]
        scores: dict[int, Score] = {}
        with Progress("scoring", len(continuations), "answers", enabled=not disable_tqdm) as progress:
            for batch in score_batches(self.model.inner, continuations, self.batch_size, self.device):
                scores |= batch
                progress.advance(len(batch))
        return [scores[index] for index in range(len(continuations))]
