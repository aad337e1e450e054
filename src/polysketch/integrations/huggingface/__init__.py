"""Our models as models of transformers; importing this makes its Auto classes know them.

    import polysketch.integrations.huggingface
    model = AutoModelForCausalLM.from_pretrained("exported")

Needs the extra `hf`: pip install 'polysketch[hf]'.
"""

from polysketch.extras import require

require("transformers")

from transformers import (  # noqa: E402 - after the word about the extra
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from polysketch.integrations.huggingface.cache import PolysketchCache  # noqa: E402
from polysketch.integrations.huggingface.causal_lm import PolysketchForCausalLM  # noqa: E402
from polysketch.integrations.huggingface.classification import PolysketchForSequenceClassification  # noqa: E402
from polysketch.integrations.huggingface.configuration import PolysketchConfig  # noqa: E402
from polysketch.integrations.huggingface.export import export_run  # noqa: E402
from polysketch.integrations.huggingface.import_model import import_model  # noqa: E402
from polysketch.integrations.huggingface.model import PolysketchModel  # noqa: E402
from polysketch.integrations.huggingface.quiet import quiet  # noqa: E402
from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer  # noqa: E402

__all__ = [
    "LORA_TARGETS",
    "PolysketchCache",
    "PolysketchConfig",
    "PolysketchForCausalLM",
    "PolysketchForSequenceClassification",
    "PolysketchModel",
    "export_run",
    "import_model",
    "quiet",
    "to_fast_tokenizer",
]

LORA_TARGETS = ("query_key_value", "output", "gate_up", "down", "input_gate")
"""The linear layers of a block, for `peft.LoraConfig(target_modules=list(LORA_TARGETS))`."""

AutoConfig.register(PolysketchConfig.model_type, PolysketchConfig, exist_ok=True)
AutoModel.register(PolysketchConfig, PolysketchModel, exist_ok=True)
AutoModelForCausalLM.register(PolysketchConfig, PolysketchForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(PolysketchConfig, PolysketchForSequenceClassification, exist_ok=True)
