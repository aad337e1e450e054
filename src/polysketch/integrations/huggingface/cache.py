"""The cache of transformers as our models have it: a state instead of keys and values."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from polysketch.integrations.huggingface.rewinding import RewindableState, TokenRows
from polysketch.models import ModelState, TransformerLM


class PolysketchCache(Cache):
    """What `generate` carries from token to token: the `ModelState` of a `TransformerLM`, and how many tokens it saw.

    Its bytes do not depend on the number of tokens, but for layers that keep every key and value (softmax, polynomial,
    hyper, squared-polynomial unless `linear`), whose part grows. Rows can be reordered (beam search), repeated and
    selected; a copy by `copy.deepcopy` goes on by itself, for instance after the common beginning of several prompts.

    A state cannot forget tokens. So that assisted decoding can take back rejected ones, a cache that was told to
    (`activate_past_recording`) keeps a clone of the state before the last tokens, and their ids; `crop` goes back to
    the clone, and the tokens that stay are read again with the next call.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._rewindable = RewindableState()
        self._length = 0

    def __len__(self) -> int:
        """Layers of the state, 0 before the first token."""
        return 0 if self.state is None else len(self.state.layers)

    def __bool__(self) -> bool:
        """True, also before the first token."""
        return True

    def __repr__(self) -> str:
        """Tokens and bytes."""
        return f"{type(self).__name__}({self._length} tokens, {self.nbytes} bytes)"

    @property
    def state(self) -> ModelState | None:
        """The model's state; None before the first token was read."""
        return self._rewindable.state

    @property
    def nbytes(self) -> int:
        """Bytes of the state, and of what is kept besides to go back to."""
        return self._rewindable.nbytes

    def extend_hidden(self, model: TransformerLM, ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Read new tokens; no gradient.

        Args:
            model: whose state this is.
            ids: (batch, new) int64.
            key_mask: (batch, new) bool, true for a real token; padding stands before a row's first token.

        Returns:
            (batch, new, hidden_size) after the final norm.

        Raises:
            ValueError: another batch than before, or padding after a row's first token.
        """
        hidden = self._rewindable.read(model, TokenRows(ids, key_mask))
        self._length += ids.shape[1]
        return hidden

    def put_off(self, ids: Tensor, key_mask: Tensor | None = None) -> None:
        """Count tokens whose outputs are known already; they are read when others follow, if any do.

        Args:
            ids: (batch, new) int64.
            key_mask: (batch, new) bool, true for a real token.
        """
        self._rewindable.put_off(TokenRows(ids, key_mask))
        self._length += ids.shape[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no longest sequence."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of a mask over all tokens when `query_length` more follow."""
        return self._length + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether any token was seen."""
        return self._length > 0

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first token."""
        known = self._rewindable.batch_size
        return -1 if known is None else known

    @property
    def is_compileable(self) -> bool:
        """False: `generate` is not to compile the forward pass of its own accord."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether there is a state."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """True: `crop` leaves no trace."""
        return True

    def reset(self) -> None:
        """Back to before the first token."""
        recording = self._rewindable.recording
        self._rewindable, self._length = RewindableState(), 0
        self._rewindable.recording = recording

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows `beam_idx`, repeats allowed."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row so many times."""
        self._select(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, numbers or a mask."""
        self._select(torch.arange(max(self.batch_size, 0))[indices.cpu()])

    def activate_past_recording(self) -> None:
        """From the next tokens on keep what `crop` needs: a second state, and ids."""
        self._rewindable.recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; those before them can no longer be taken back afterwards.

        Args:
            tokens_to_remove: minus their number, as transformers counts; 0 forgets none.

        Raises:
            ValueError: a positive number, or more tokens than were recorded.
            RuntimeError: nothing was recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"expected minus the number of tokens to forget, got {tokens_to_remove}")
        if tokens_to_remove:
            self._rewindable.take_back(-tokens_to_remove)
        self._rewindable.forget_snapshot()
        self._length += tokens_to_remove

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """There are no keys and values here.

        Raises:
            TypeError: always.
        """
        raise TypeError("PolysketchCache serves Polysketch models only; other models take transformers' DynamicCache")

    def _select(self, indices: Tensor) -> None:
        self._rewindable.select(indices)


def give_cache(kind: type[PolysketchCache], generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Put a new cache among what `generate` gives the model, where it is to have one and was given none.

    Raises:
        ValueError: a cache of keys and values is asked for by name.
    """
    if generation_config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation={generation_config.cache_implementation!r} is for keys and values: these models "
            "carry a state of constant size; leave it out"
        )
    if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
        return False
    model_kwargs["past_key_values"] = cache = kind()
    if generation_config.is_assistant:
        cache.activate_past_recording()
    return True
