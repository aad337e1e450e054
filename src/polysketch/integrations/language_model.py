"""A causal language model of transformers, in the interface of our own: for evaluation, training and conversion."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polysketch.integrations.packed_rows import positions_of_documents
from polysketch.models import mean_token_loss, token_losses
from polysketch.models.divergence import token_divergences
from polysketch.models.modes import evaluation_mode

_PROBE_TOKENS = 4
_PROBE_DOCUMENT = 8


@dataclass(frozen=True)
class _Config:
    vocab_size: int


class HuggingFaceLM(nn.Module):
    """What `evaluation.evaluate`, `evaluation.recall_accuracy` and a training step ask of a model, asked of another.

    The model is the module `model` of this one and is used as it is: with the attention it has, replaced or not, with
    its own cache as state. Its training mode, device and dtype are its own.

    Args:
        model: a model of transformers with an output layer over a vocabulary, for instance a LlamaForCausalLM.
        end_of_text: the token that ends documents, where those of a row are to be read apart; None reads a row as one
            text.

    Raises:
        TypeError: a model without an output layer.
        ValueError: logits that are not the output layer's product alone, for instance capped or scaled ones: tried on a
            few tokens. A model that does not read documents apart, where `end_of_text` asks for it: see
            `require_documents_apart`.

    Attributes:
        model: as given.
        config: has `vocab_size`, that of the output layer.
        most_tokens: of a row, where the model has learned a vector for each position; else None.
    """

    def __init__(self, model: Any, *, end_of_text: int | None = None) -> None:
        super().__init__()
        self.model, self.end_of_text = model, end_of_text
        output = model.get_output_embeddings()
        if output is None:
            raise TypeError(f"expected a causal language model, found {type(model).__name__}, without an output layer")
        self.config = _Config(vocab_size=output.weight.shape[0])
        self.most_tokens = _learned_positions(model)
        self.training = model.training
        self._require_plain_logits()
        require_documents_apart(model, end_of_text)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) int64 -> logits (batch, length, vocab_size)."""
        return self.logits(self.hidden_states(ids))

    def hidden_states(self, ids: Tensor) -> Tensor:
        """(batch, length) int64 -> (batch, length, hidden_size), what the output layer takes; without a cache."""
        self._require_positions(ids.shape[1])
        return torch.cat(list(read_rows(self.model, ids, self.end_of_text)))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., vocab_size)."""
        return self.model.get_output_embeddings()(hidden)

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """As `TransformerLM.token_losses`: (batch, length) float32, nats; the logits of all are never held."""
        return token_losses(hidden, *self._output_weights(), targets)

    def token_divergences(self, hidden: Tensor, teacher: "HuggingFaceLM", teacher_hidden: Tensor) -> Tensor:
        """KL(teacher || self) of every token: (batch, length) float32, nats; the logits of all are never held.

        Args:
            hidden: (batch, length, hidden_size), of this model.
            teacher: a model over the same vocabulary; it gets no gradient.
            teacher_hidden: (batch, length, hidden_size of the teacher).
        """
        weights, teacher_weights = self._output_weights(), teacher._output_weights()
        return token_divergences(hidden, *weights, teacher_hidden, *teacher_weights)

    def _output_weights(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the output layer; zeros where it has no bias."""
        output = self.model.get_output_embeddings()
        bias = output.weight.new_zeros(self.config.vocab_size) if output.bias is None else output.bias
        return output.weight, bias

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy (nats) of ids[:, 1:] predicted from ids[:, :-1]; a scalar."""
        return mean_token_loss(self.hidden_states(ids[:, :-1]), *self._output_weights(), ids[:, 1:])

    def init_state(self, batch_size: int, *, device: torch.device | str | None = None) -> Any:
        """The cache before the first token; it takes its batch and device from the first tokens.

        Raises:
            TypeError: a model without a cache of keys and values, such as Mamba or RWKV.
        """
        if "past_key_values" not in inspect.signature(self.model.base_model.forward).parameters:
            raise TypeError(
                f"expected a model that reads on from past_key_values, found {type(self.model).__name__}, whose state "
                "is of another kind: use it without a state"
            )
        return _empty_cache(self.model)

    def _require_positions(self, tokens: int) -> None:
        """Say before a lookup fails, on a GPU for good, that there is no such position."""
        if self.most_tokens is not None and tokens > self.most_tokens:
            raise ValueError(
                f"expected at most {self.most_tokens} tokens in a row, for the model has learned so many positions, "
                f"found {tokens}: give a shorter context, or fewer new tokens"
            )

    @torch.no_grad()
    def _require_plain_logits(self) -> None:
        """Names of settings that scale, cap or transform logits are many; what counts is whether they are ours."""
        ids = torch.arange(_PROBE_TOKENS, device=self.model.device)[None] % self.config.vocab_size
        with evaluation_mode(self):
            expected = self.model(input_ids=ids, use_cache=False).logits.float()
            found = self.logits(next(read_rows(self.model, ids, None))).float()
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
            raise ValueError(
                f"expected logits that are the output layer's product with the last hidden state, found others in "
                f"{type(self.model).__name__}: it scales, caps or transforms one of them, which is not served"
            )

    @torch.no_grad()
    def extend_hidden(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """As `hidden_states`, of tokens that follow those in `state`, which is updated in place and returned."""
        if self.most_tokens is not None:
            self._require_positions(ids.shape[1] + state.get_seq_length())
        output = self.model.base_model(input_ids=ids, past_key_values=state, use_cache=True)
        return output.last_hidden_state, output.past_key_values


def _learned_positions(model: Any) -> int | None:
    """How many positions a model has vectors for; None where positions are rotary, or otherwise without an end."""
    most = getattr(model.config, "max_position_embeddings", None)
    tables = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    return most if any("position" in name or name == "wpe" for name in tables) else None


def read_rows(model: Any, ids: Tensor, end_of_text: int | None) -> Iterator[Tensor]:
    """What the output layer takes of rows of tokens, without a cache: of all at once, or of one after the other.

    Args:
        model: of transformers.
        ids: (rows, length) int64.
        end_of_text: as for `HuggingFaceLM`. Documents are kept apart in single rows alone.
    """
    if end_of_text is None:
        yield model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return
    for row, places in zip(ids.split(1), positions_of_documents(ids, end_of_text).split(1), strict=True):
        yield model.base_model(input_ids=row, position_ids=places, use_cache=False).last_hidden_state


@torch.no_grad()
def require_documents_apart(model: Any, end_of_text: int | None) -> None:
    """Refuse a model whose documents of one row see one another, whatever `position_ids` say; tried on two short ones.

    Some models make their causal mask themselves and never look at `position_ids`: OPT and BioGPT are such.

    Args:
        model: of transformers.
        end_of_text: the token that ends documents; None asks for nothing.

    Raises:
        ValueError: the second document is another where the first one is.
    """
    if end_of_text is None:
        return
    size = model.get_input_embeddings().weight.shape[0]
    tokens = [token for token in range(min(size, 2 * _PROBE_DOCUMENT)) if token != end_of_text]
    first, second = tokens[: _PROBE_DOCUMENT - 1], tokens[-_PROBE_DOCUMENT:]
    rows = torch.tensor([[*row, end_of_text, *second] for row in (first, first[::-1])], device=model.device)
    with evaluation_mode(model):
        one, other = (each[0, -len(second) :].float() for each in read_rows(model, rows, end_of_text))
    if not torch.allclose(one, other, rtol=0, atol=1e-2 * float(one.abs().max())):
        raise ValueError(
            f"expected documents of one row to be read apart, found a second one that depends on the first in "
            f"{type(model).__name__}, which does not look at position_ids: have rows of text without an end by --pack "
            "windows"
        )


def _empty_cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)
