"""Attention transfer: a mechanism, or a whole attention layer, learns to give what softmax attention gave."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polysketch.integrations.language_model import read_rows
from polysketch.integrations.replacement import (
    AttentionCall,
    attention_layers,
    observing_attention,
    replaced_layers,
    replaced_mechanisms,
)


class AttentionTransfer(nn.Module):
    """The error of every replaced layer against the softmax attention it replaced, as a loss to train on.

    The first stage of LoLCATs (Zhang et al., 2024, section 3.1) for any mechanism. The model runs with its original
    attention, so that every layer sees what it saw in training, and beside it each mechanism is given the same query,
    key and value. Only the mechanisms' parameters get gradients, and each only that of its own layer.

    Args:
        model: a transformers model with replaced attention, see `replace_attention`.
        end_of_text: as for `HuggingFaceLM`.

    Attributes:
        mechanisms: the mechanisms, layer by layer; the only parameters of this module.
    """

    def __init__(self, model: Any, *, end_of_text: int | None = None) -> None:
        super().__init__()
        self.end_of_text = end_of_text
        self.mechanisms = nn.ModuleDict({str(layer): each for layer, each in replaced_mechanisms(model).items()})
        self._model = (model,)  # in a tuple, so that its weights are not this module's

    def loss(self, ids: Tensor) -> Tensor:
        """The sum of the layers' errors on ids[:, :-1], the tokens that fine-tuning would read; a scalar."""
        return torch.stack(list(self.errors(ids[:, :-1]).values())).sum()

    def errors(self, ids: Tensor) -> dict[int, Tensor]:
        """Layer -> |mechanism's output - softmax attention's|² / |softmax attention's|² of a row, the mean of the rows.

        A row's sums go over all its tokens and heads. Memory holds what backward needs of all layers' mechanisms.

        Args:
            ids: (batch, length) int64.

        Returns:
            Scalars, float32; 0 is a perfect copy, and 1 is no better than an output of zeros.
        """
        errors = defaultdict[int, list[Tensor]](list)

        def compare(call: AttentionCall) -> Tensor:
            with torch.no_grad():
                wanted = call.original()
            errors[call.layer].append(_relative_errors(call.replacement(), wanted))
            return wanted

        with observing_attention(self._model[0], compare):
            _read(self._model[0], ids, self.end_of_text)
        return _means(errors)


class LayerTransfer(nn.Module):
    """The error of every replaced layer, projections included, against the layer it was, as a loss to train on.

    Step 1 of RADLADS (Goldstein et al., 2025): what is compared is the layer's output, behind its last projection, so
    that the projections of queries, keys, values and outputs learn too. Every layer is given what the teacher's was.

    Args:
        model: a transformers model with replaced attention, see `replace_attention`.
        teacher: a frozen copy of it with its own attention, see `frozen_copy`.
        end_of_text: as for `HuggingFaceLM`.

    Attributes:
        layers: the replaced attention layers by their numbers; the only parameters of this module.
    """

    def __init__(self, model: Any, teacher: Any, *, end_of_text: int | None = None) -> None:
        super().__init__()
        self.end_of_text = end_of_text
        self.layers = nn.ModuleDict({str(layer): each for layer, each in replaced_layers(model).items()})
        self._models = (model, teacher)  # in a tuple, so that their weights are not this module's

    def loss(self, ids: Tensor) -> Tensor:
        """The sum of the layers' errors on ids[:, :-1], the tokens that fine-tuning would read; a scalar."""
        return torch.stack(list(self.errors(ids[:, :-1]).values())).sum()

    def errors(self, ids: Tensor) -> dict[int, Tensor]:
        """Layer -> |its output - the teacher's|² / |the teacher's|² of a row, the mean of the rows.

        Args:
            ids: (batch, length) int64.

        Returns:
            Scalars, float32; 0 is a perfect copy, and 1 is no better than an output of zeros.
        """
        model, teacher = self._models
        wanted, errors = defaultdict[int, deque[Tensor]](deque), defaultdict[int, list[Tensor]](list)

        def keep(layer: int, output: Tensor) -> None:
            wanted[layer].append(output)

        def compare(layer: int, found: Tensor) -> Tensor:
            of_teacher = wanted[layer].popleft()
            errors[layer].append(_relative_errors(found, of_teacher))
            return of_teacher  # the next layer is given what the teacher's is

        with torch.no_grad(), _outputs_go_through(attention_layers(teacher), keep):
            _read(teacher, ids, self.end_of_text)
        with _outputs_go_through(replaced_layers(model), compare):
            _read(model, ids, self.end_of_text)
        return _means(errors)


@contextmanager
def _outputs_go_through(
    layers: Mapping[int, nn.Module], function: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """Within it, `function` is given each layer's number and output; what it returns, if anything, takes its place."""

    def hook(layer: int) -> Callable[[nn.Module, Any, Any], Any]:
        def give(_: nn.Module, __: Any, output: Any) -> Any:
            other = function(layer, output[0])
            return None if other is None else (other, *output[1:])

        return give

    with ExitStack() as hooks:
        for number, layer in layers.items():
            hooks.callback(layer.register_forward_hook(hook(number)).remove)
        yield


def _read(model: Any, ids: Tensor, end_of_text: int | None) -> None:
    for _ in read_rows(model, ids, end_of_text):
        pass


def _means(errors: Mapping[int, Sequence[Tensor]]) -> dict[int, Tensor]:
    """Over all rows, by layer."""
    return {layer: torch.cat(list(rows)).mean() for layer, rows in errors.items()}


def _relative_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """(rows,)."""
    wanted, all_but_rows = wanted.float(), tuple(range(1, wanted.dim()))
    squares = wanted.square().sum(all_but_rows).clamp_min(torch.finfo(torch.float32).tiny)  # silence: no NaN
    return (found.float() - wanted).square().sum(all_but_rows) / squares
