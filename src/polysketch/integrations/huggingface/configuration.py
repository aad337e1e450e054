"""The configuration of our models in transformers: the fields of `ModelConfig`, and what generation needs."""

from dataclasses import fields
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from polysketch import models
from polysketch.integrations.transformers_folder import MODEL_TYPE
from polysketch.models.former import FORMAT, check_format, model_of_format


class PolysketchConfig(PreTrainedConfig):
    """One configuration for every mechanism: its fields are those of `polysketch.models.ModelConfig`.

    Sizes left as None are filled in, and everything is checked, as there. Sizes are by default those of the preset
    "tiny"; its gates of heads and its windows in every second layer come by `from_preset`.

    Args:
        vocab_size, num_layers, hidden_size, num_heads, head_dim, num_kv_heads, attention, attention_options,
            feedforward_size, rotary, input_positions, rope_base, norm_epsilon, projection_convolution, query_key_norm,
            head_gate, attention_every: as for `ModelConfig`. The names that transformers uses (num_hidden_layers,
            num_attention_heads, num_key_value_heads, intermediate_size) mean the same fields.
        context_length: tokens of a training window, where it is known. It limits nothing.
        use_cache: give a `PolysketchCache` with every output of a model in evaluation mode.
        bos_token_id, eos_token_id, pad_token_id: of the tokenizer.
        model_format: of what is saved; configurations without it are those of an earlier version, and are read as they
            were meant.
        training_run: what `polysketch export` knows of the run the weights come from; plain data, for the way back.

    Raises:
        ValueError, TypeError: as `ModelConfig`, a mechanism that cannot be causal (nystrom, skyformer) among them.

    Example:
        `PolysketchConfig.from_preset("gpt2-small", attention="performer")`
    """

    model_type: ClassVar[str] = MODEL_TYPE
    sizes: ClassVar[type[models.ModelConfig]] = models.ModelConfig
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "feedforward_size",
    }

    vocab_size: int = 257
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 2
    head_dim: int | None = None
    num_kv_heads: int | None = None
    attention: Any = "polysketch"
    attention_options: Any = None
    feedforward_size: int | None = None
    rotary: Any = True
    input_positions: bool = False
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    projection_convolution: int = 4
    query_key_norm: bool = True
    head_gate: bool = False
    attention_every: int = 1
    context_length: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    model_format: int = FORMAT
    training_run: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the fields and fill in the sizes."""
        if not self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be true: the embedding is the output layer of these models")
        self.attention_options = {} if self.attention_options is None else self.attention_options
        for name, value in self.to_model_config().to_dict().items():
            setattr(self, name, value)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As transformers has it; what an earlier version saved gets the names and the explicit defaults of today."""
        written = config_dict.get("model_format", 1)
        check_format(written, "model_format of the configuration")
        known = model_of_format(written, config_dict)
        config_dict = {**known, "model_format": FORMAT}
        return super().from_dict(config_dict, **kwargs)

    def to_model_config(self) -> models.ModelConfig:
        """The configuration of the model of this library inside."""
        return self.sizes.from_dict({name: getattr(self, name) for name in self._fields_of_sizes()})

    @classmethod
    def from_model_config(cls, config: models.ModelConfig, **changes: Any) -> Self:
        """The configuration of a model like `config`; `changes` are fields that `config` does not have."""
        return cls(**config.to_dict(), **changes)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """A named size, see `polysketch.models.PRESETS`; `changes` are fields of this class or of the sizes.

        Raises:
            ValueError: an unknown preset.
        """
        of_model = {key: changes.pop(key) for key in cls._fields_of_sizes() if key in changes}
        return cls.from_model_config(cls._preset(name, of_model), **changes)

    @classmethod
    def _fields_of_sizes(cls) -> list[str]:
        return [field.name for field in fields(cls.sizes)]

    @classmethod
    def _preset(cls, name: str, changes: dict[str, Any]) -> models.ModelConfig:
        return models.preset(name, **changes)
