"""Vectors that see both sides: the part of our encoders in transformers that all heads stand on."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from polysketch.integrations.huggingface.arguments import refuse_arguments, wants_dict
from polysketch.integrations.huggingface.encoder_configuration import PolysketchEncoderConfig
from polysketch.integrations.huggingface.hidden_states import BetweenBlocks, takes_hidden_states
from polysketch.integrations.huggingface.packed import take_documents
from polysketch.integrations.huggingface.padding import both_sides_mask
from polysketch.integrations.huggingface.pretrained import PolysketchPreTrainedModel
from polysketch.models import TransformerEncoder


class PolysketchEncoderPreTrainedModel(PolysketchPreTrainedModel):
    """What all encoders share: the configuration, and a head that is drawn."""

    config_class = PolysketchEncoderConfig

    def _init_weights(self, module: nn.Module) -> None:
        """A layer of scores is drawn, a bias of tokens is 0; an encoder has drawn its weights when it was made."""
        if module is getattr(self, "output", None):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)
            nn.init.zeros_(module.bias)
        if module is self and hasattr(self, "output_bias"):
            nn.init.zeros_(self.output_bias)

    def encoded(self, input_ids: Tensor | None, attention_mask: Tensor | None, others: dict[str, Any]) -> Tensor:
        """As `encode`, by the encoder inside."""
        return encode(self.inner, input_ids, attention_mask, others, self.config)


class PolysketchEncoderModel(PolysketchEncoderPreTrainedModel):
    """Token ids -> a vector for each token, which sees the whole sequence.

    Args:
        config: sizes and mechanisms.

    Attributes:
        transformer: the `TransformerEncoder`.
    """

    def __init__(self, config: PolysketchEncoderConfig) -> None:
        super().__init__(config)
        self.transformer = TransformerEncoder(config.to_model_config())
        self.post_init()

    @classmethod
    def from_transformer(cls, transformer: TransformerEncoder, **changes: Any) -> "PolysketchEncoderModel":
        """Wrap an encoder of this library, whose weights stay where they are.

        Args:
            transformer: the encoder.
            **changes: fields of `PolysketchEncoderConfig` that `EncoderConfig` does not have.
        """
        return cls._around(PolysketchEncoderConfig.from_model_config(transformer.config, **changes), transformer)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in backward; `gradient_checkpointing_enable` sets it."""
        return self.transformer.activation_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        self.transformer.activation_checkpointing = enabled

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutput | tuple:
        """Vectors of all tokens.

        Args:
            input_ids: (batch, length) int64.
            attention_mask: (batch, length), nonzero for a real token. Padding on either side changes nothing, and what
                comes out there means nothing; padding between tokens is refused, as are rows of padding alone.
            return_dict: a named output rather than a tuple.
            others: `position_ids` that are those the model counts itself, from each row's first real token.
                `output_hidden_states` is understood. Further arguments of transformers are accepted as None or False
                alone.

        Returns:
            `last_hidden_state` (batch, length, hidden_size), after the final norm; `hidden_states` where asked for, as
            `PolysketchModel.forward` gives them.

        Raises:
            ValueError: a mask of another shape or with padding between tokens, documents packed into one row, more
                tokens than there are learned positions, or an argument that these models do not know.
        """
        wanted, between = takes_hidden_states(others, self.config), BetweenBlocks()
        with between.watch(self.transformer.blocks, wanted=wanted):
            hidden = self.encoded(input_ids, attention_mask, {"output_hidden_states": False, **others})
        output = BaseModelOutput(last_hidden_state=hidden, hidden_states=between.and_last(hidden))
        return output if wants_dict(return_dict, self.config) else output.to_tuple()


def encode(
    encoder: TransformerEncoder,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    others: dict[str, Any],
    config: Any,
) -> Tensor:
    """(batch, length, hidden_size); arguments and errors as for `PolysketchEncoderModel.forward`."""
    if input_ids is None:
        raise ValueError("input_ids are needed: these models do not take inputs_embeds")
    if take_documents(others, input_ids.shape, attention_mask, 0) is not None:
        raise ValueError("an encoder reads one text a row: documents packed into one row would see one another")
    refuse_arguments(others, config)
    return encoder(input_ids, key_mask=both_sides_mask(attention_mask, input_ids.shape))


class SourceReader(nn.Module):
    """The encoder of a model that writes, as `generate` calls it.

    Args:
        encoder: of the model.
        config: of the model.
    """

    main_input_name = "input_ids"

    def __init__(self, encoder: TransformerEncoder, config: Any) -> None:
        super().__init__()
        self.encoder, self._config = encoder, config

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """As `PolysketchEncoderModel.forward`, always named."""
        others = {name: value for name, value in kwargs.items() if name != "return_dict"}
        hidden = encode(self.encoder, input_ids, attention_mask, others, self._config)
        return BaseModelOutput(last_hidden_state=hidden)
