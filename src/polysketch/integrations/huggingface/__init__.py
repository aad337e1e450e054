"""Our models as models of transformers; importing this makes its Auto classes know them.

    import polysketch.integrations.huggingface
    model = AutoModelForCausalLM.from_pretrained("exported")

Needs the extra `hf`: pip install 'polysketch[hf]'.
"""

from typing import Any

from polysketch.extras import require

require("transformers")

from transformers import (  # noqa: E402 - after the word about the extra
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from polysketch.integrations.huggingface.cache import PolysketchCache  # noqa: E402
from polysketch.integrations.huggingface.causal_lm import PolysketchForCausalLM  # noqa: E402
from polysketch.integrations.huggingface.classification import PolysketchForSequenceClassification  # noqa: E402
from polysketch.integrations.huggingface.configuration import PolysketchConfig  # noqa: E402
from polysketch.integrations.huggingface.encoder_classification import (  # noqa: E402
    PolysketchEncoderForSequenceClassification,
    PolysketchEncoderForTokenClassification,
)
from polysketch.integrations.huggingface.encoder_configuration import PolysketchEncoderConfig  # noqa: E402
from polysketch.integrations.huggingface.encoder_decoder_cache import PolysketchEncoderDecoderCache  # noqa: E402
from polysketch.integrations.huggingface.encoder_decoder_configuration import (  # noqa: E402
    PolysketchEncoderDecoderConfig,
)
from polysketch.integrations.huggingface.encoder_decoder_model import PolysketchEncoderDecoderModel  # noqa: E402
from polysketch.integrations.huggingface.encoder_model import PolysketchEncoderModel  # noqa: E402
from polysketch.integrations.huggingface.export import export_run  # noqa: E402
from polysketch.integrations.huggingface.import_model import import_model  # noqa: E402
from polysketch.integrations.huggingface.masked_lm import PolysketchEncoderForMaskedLM  # noqa: E402
from polysketch.integrations.huggingface.model import PolysketchModel  # noqa: E402
from polysketch.integrations.huggingface.quiet import quiet, reading  # noqa: E402
from polysketch.integrations.huggingface.seq2seq_lm import PolysketchForSeq2SeqLM  # noqa: E402
from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer  # noqa: E402

__all__ = [
    "LORA_TARGETS",
    "PolysketchCache",
    "PolysketchConfig",
    "PolysketchEncoderConfig",
    "PolysketchEncoderDecoderCache",
    "PolysketchEncoderDecoderConfig",
    "PolysketchEncoderDecoderModel",
    "PolysketchEncoderForMaskedLM",
    "PolysketchEncoderForSequenceClassification",
    "PolysketchEncoderForTokenClassification",
    "PolysketchEncoderModel",
    "PolysketchForCausalLM",
    "PolysketchForSeq2SeqLM",
    "PolysketchForSequenceClassification",
    "PolysketchModel",
    "export_run",
    "import_model",
    "quiet",
    "reading",
    "to_fast_tokenizer",
]

LORA_TARGETS = ("query_key_value", "output", "gate_up", "down", "input_gate")
"""The linear layers of a block, for `peft.LoraConfig(target_modules=list(LORA_TARGETS))`."""

_KNOWN: dict[Any, dict[Any, Any]] = {
    PolysketchConfig: {
        AutoModel: PolysketchModel,
        AutoModelForCausalLM: PolysketchForCausalLM,
        AutoModelForSequenceClassification: PolysketchForSequenceClassification,
    },
    PolysketchEncoderConfig: {
        AutoModel: PolysketchEncoderModel,
        AutoModelForMaskedLM: PolysketchEncoderForMaskedLM,
        AutoModelForSequenceClassification: PolysketchEncoderForSequenceClassification,
        AutoModelForTokenClassification: PolysketchEncoderForTokenClassification,
    },
    PolysketchEncoderDecoderConfig: {
        AutoModel: PolysketchEncoderDecoderModel,
        AutoModelForSeq2SeqLM: PolysketchForSeq2SeqLM,
    },
}
for _config, _classes in _KNOWN.items():
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    for _auto, _class in _classes.items():
        _auto.register(_config, _class, exist_ok=True)
# By the names in this table transformers' Trainer knows whose labels it must shift where it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PolysketchConfig.model_type] = PolysketchForCausalLM.__name__
