"""Hidden states of what is written, by a model that reads one sequence and writes another."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import Seq2SeqModelOutput

from polysketch.integrations.huggingface.arguments import refuse_arguments, wants_dict
from polysketch.integrations.huggingface.encoder_decoder_cache import PolysketchEncoderDecoderCache
from polysketch.integrations.huggingface.encoder_decoder_configuration import PolysketchEncoderDecoderConfig
from polysketch.integrations.huggingface.encoder_model import SourceReader
from polysketch.integrations.huggingface.padding import both_sides_mask, new_tokens_mask, without_right_padding
from polysketch.integrations.huggingface.pretrained import PolysketchPreTrainedModel, blocks_anew
from polysketch.models import TransformerEncoderDecoder
from polysketch.models.encoder_decoder import DecoderBlock


class PolysketchEncoderDecoderPreTrainedModel(PolysketchPreTrainedModel):
    """What models of an encoder and a decoder share."""

    config_class = PolysketchEncoderDecoderConfig
    _no_split_modules = ["TransformerBlock", "DecoderBlock"]  # noqa: RUF012 - transformers wants a list

    def get_encoder(self, modality: str | None = None) -> SourceReader:
        """What reads the source, for `generate`."""
        return SourceReader(self.inner.encoder, self.config)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Refuse: which of the two vocabularies is meant cannot be said.

        Raises:
            ValueError: always, with the remedy.
        """
        raise ValueError(
            "a model of an encoder and a decoder has a vocabulary each, and neither can be resized: make a model with "
            "encoder=dict(vocab_size=...) and decoder=dict(vocab_size=...) and load the weights that fit"
        )

    def _blocks_anew(self) -> list[tuple[nn.Module, Callable[[], nn.Module]]]:
        model = self.inner
        layers = zip(model.blocks, model.config.decoder.layers(), strict=True)
        return [
            *blocks_anew(model.encoder),
            *((block, partial(DecoderBlock, model.config, *layer)) for block, layer in layers),
        ]


class PolysketchEncoderDecoderModel(PolysketchEncoderDecoderPreTrainedModel):
    """A source and a target of token ids -> hidden states of the target after the final norm.

    Args:
        config: sizes and mechanisms.

    Attributes:
        transformer: the `TransformerEncoderDecoder`.
    """

    def __init__(self, config: PolysketchEncoderDecoderConfig) -> None:
        super().__init__(config)
        self.transformer = TransformerEncoderDecoder(config.to_model_config())
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in backward; `gradient_checkpointing_enable` sets it."""
        return self.transformer.activation_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        self.transformer.activation_checkpointing = self.transformer.encoder.activation_checkpointing = enabled

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: PolysketchEncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Seq2SeqModelOutput | tuple:
        """Hidden states of the target's new tokens.

        Without a cache, and unless `use_cache=True`, the whole target is computed at once, as in training, with
        gradients where they are on. Otherwise its tokens are read into a state, without gradients.

        Args:
            input_ids: (batch, source length) int64.
            attention_mask: (batch, source length), nonzero for a real token; padding on either side changes nothing.
            decoder_input_ids: (batch, new) int64: of the new tokens alone where the cache has seen others.
            decoder_attention_mask: (batch, past + new), as for `PolysketchModel.forward`.
            encoder_outputs: in place of `input_ids`, what the encoder gave for them: an output or a tuple, with
                (batch, source length, width) first.
            past_key_values: what an earlier call gave; it has read the source, which need not be given again.
            use_cache: whether to give a cache; None: where one was given.
            return_dict: a named output rather than a tuple.
            others: further arguments of transformers, accepted as None or False alone.

        Returns:
            `last_hidden_state` (batch, new, hidden_size), `encoder_last_hidden_state` where the source was given, and
            `past_key_values` where asked for.

        Raises:
            ValueError: no target, no source, a target of other rows than the source, masks of another shape, with
                padding between tokens or for rows without tokens, or an argument that these models do not know.
            TypeError: a cache of another class.
        """
        if decoder_input_ids is None:
            raise ValueError("decoder_input_ids are needed, or labels to make them of")
        refuse_arguments(others, self.config)
        cache = _checked(past_key_values)
        encoded = None
        if cache is None or not cache.has_source:
            encoded = self._encoded(input_ids, attention_mask, encoder_outputs)
            check_rows("decoder_input_ids", decoder_input_ids, encoded)
        if cache is None and not use_cache:
            hidden = self._whole(encoded, attention_mask, decoder_input_ids, decoder_attention_mask)
        else:
            cache = PolysketchEncoderDecoderCache() if cache is None else cache
            if encoded is not None:
                mask = both_sides_mask(attention_mask, encoded.shape[:2])
                cache.keep_source(self.transformer.given_encoded(encoded, source_mask=mask))
            past = cache.get_seq_length()
            mask = new_tokens_mask(decoder_attention_mask, decoder_input_ids.shape, past)
            hidden = cache.extend_hidden(cache.given(self.transformer), decoder_input_ids, mask)
        output = Seq2SeqModelOutput(last_hidden_state=hidden, past_key_values=cache, encoder_last_hidden_state=encoded)
        return output if wants_dict(return_dict, self.config) else output.to_tuple()

    def _encoded(self, input_ids: Tensor | None, attention_mask: Tensor | None, given: Any) -> Tensor:
        if given is not None:
            return given[0]
        if input_ids is None:
            raise ValueError("a source is needed: give input_ids, encoder_outputs, or a cache that has read one")
        return self.get_encoder()(input_ids, attention_mask).last_hidden_state

    def _whole(self, encoded: Tensor, source_mask: Tensor | None, ids: Tensor, mask: Tensor | None) -> Tensor:
        own = new_tokens_mask(mask, ids.shape, 0)
        return self.transformer.hidden_states(
            encoded,
            ids,
            source_mask=both_sides_mask(source_mask, encoded.shape[:2]),
            key_mask=None if own is None else without_right_padding(own),
        )


def check_rows(name: str, target: Tensor, source: Tensor) -> None:
    """Refuse a target that has not a row for each row of the source.

    Args:
        name: of the target.
        target: (batch, length).
        source: (batch, source length, ...).

    Raises:
        ValueError: another shape of the target.
    """
    if target.dim() != 2 or len(target) != len(source):
        raise ValueError(
            f"expected {name} of shape ({len(source)}, length), a row for each row of the source, "
            f"found {tuple(target.shape)}"
        )


def _checked(cache: Any) -> PolysketchEncoderDecoderCache | None:
    if cache is not None and not isinstance(cache, PolysketchEncoderDecoderCache):
        raise TypeError(
            f"expected a PolysketchEncoderDecoderCache for past_key_values, got {type(cache).__name__}: these models "
            "carry a state instead of keys and values; leave past_key_values out"
        )
    return cache
