"""What all our models in transformers share: loading, embeddings and gradient checkpointing."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from polysketch.integrations.huggingface.configuration import PolysketchConfig
from polysketch.integrations.huggingface.vocabulary import draw_ids, fit_vocabulary
from polysketch.models.blocks import build_block


class PolysketchPreTrainedModel(PreTrainedModel):
    """A model of this library behind the names and habits of transformers; the base of the classes that users make."""

    config_class: type[PreTrainedConfig] = PolysketchConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # Trainer then passes num_items_in_batch
    _no_split_modules = ["TransformerBlock"]  # noqa: RUF012 - transformers wants a list

    @property
    def inner(self) -> Any:
        """The model inside: a `TransformerLM`, a `TransformerEncoder` or a `TransformerEncoderDecoder`."""
        base: Any = self.base_model
        return base.transformer

    @classmethod
    def _around(cls, config: PreTrainedConfig, transformer: nn.Module, **heads: Any) -> Self:
        """The class with these modules and parameters inside, which stay where they are."""
        with torch.device("meta"):  # weights that are not wanted take no memory
            wrapped: Any = cls(config)
        wrapped.base_model.transformer = transformer
        for name, head in heads.items():
            setattr(wrapped, name, head)
        return wrapped.train(transformer.training)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, which is the output layer too."""
        return self.inner.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding, and with it the output layer."""
        self.inner.embedding = value

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Add ids at the end of the vocabulary, or take ids away there.

        Args:
            new_num_tokens: ids afterwards; None leaves them.
            pad_to_multiple_of: round the number up to a multiple of this.
            mean_resizing: new embeddings, and new biases of the output layer, are the mean of the others but for a
                little noise; so the probabilities of old tokens hardly change. False: as in a model that was not
                trained.

        Returns:
            The embedding, the same module with other weights: make the optimizer after this.

        Raises:
            ValueError: no ids, or a model of an encoder and a decoder, which have a vocabulary each.
        """
        _check_sizes(new_num_tokens, pad_to_multiple_of)
        before = self.config.vocab_size
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if embedding.num_embeddings != before:
            fit_vocabulary(self, embedding.num_embeddings, mean=mean_resizing)
        if not mean_resizing:
            draw_ids(embedding, before)
        return embedding

    def _init_weights(self, module: nn.Module) -> None:
        """A head is drawn; a `TransformerLM` has drawn its weights when it was made."""
        if module is getattr(self, "score", None):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)

    def _initialize_missing_keys(self, is_quantized: bool) -> None:
        """Called once a checkpoint is read and all that it held is marked: nothing of the model may be missing."""
        tensors = self.inner.state_dict(keep_vars=True)
        missing = [name for name, tensor in tensors.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if missing:
            raise ValueError(
                f"expected all {len(tensors)} weights of the model, found none for {', '.join(missing[:3])}"
                f"{' and others' if missing[3:] else ''}: the checkpoint is incomplete or of another configuration"
            )
        for block, build in self._blocks_anew():
            _compute_unsaved_buffers(block, build)
        super()._initialize_missing_keys(is_quantized)
        self._freeze_unused()  # parameters that were loaded are new ones

    def _blocks_anew(self) -> list[tuple[nn.Module, Callable[[], nn.Module]]]:
        """The blocks, and what builds one like each."""
        return blocks_anew(self.inner)

    def _freeze_unused(self) -> None:
        """Take what has no effect out of training, so that every trained parameter has a gradient."""

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, every_n_layers: int = 1
    ) -> None:
        """As in transformers; refuses what our recomputation of each block does not do."""
        given = isinstance(gradient_checkpointing_func, partial)
        keywords = gradient_checkpointing_func.keywords if given else {}
        function = gradient_checkpointing_func.func if given else gradient_checkpointing_func
        if every_n_layers != 1 or keywords.get("use_reentrant") or function is not checkpoint:
            raise ValueError(
                "gradient checkpointing here recomputes every block, without re-entering autograd or offloading: "
                "leave out every_n_layers, use_reentrant=True and offload"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, every_n_layers)


def blocks_anew(model: Any) -> list[tuple[nn.Module, Callable[[], nn.Module]]]:
    """The blocks of a model or an encoder, and what builds one like each."""
    layers = zip(model.blocks, model.config.layers(), strict=True)
    return [(block, partial(build_block, model.config, *layer)) for block, layer in layers]


def _compute_unsaved_buffers(block: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Compute anew the buffers that no checkpoint holds: transformers makes models without numbers in them."""
    unsaved = dict(block.named_buffers()).keys() - block.state_dict().keys()
    fresh = build() if unsaved else None
    for name in unsaved:
        buffer = block.get_buffer(name)
        buffer.data = fresh.get_buffer(name).to(buffer.device)


def _check_sizes(*sizes: int | None) -> None:
    for size in sizes:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(
                f"a number of ids, and what it is a multiple of, must be whole and at least 1, got {size!r}"
            )
