"""Our language models in vLLM: `vllm serve EXPORTED`, where this package is installed beside vLLM.

vLLM calls `register` by itself, in each of its processes: it is an entry point of the group vllm.general_plugins.
"""

__all__ = ["register"]

ARCHITECTURE = "PolysketchForCausalLM"
"""What config.json of an exported model names."""

BACKEND = "POLYSKETCH_STATE"
"""What vLLM calls our states among its kinds of caches."""

_HERE = "polysketch.integrations.vllm"


def register() -> None:
    """Make vLLM know our configuration, our model and our states. Calling it again changes nothing."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    import polysketch.integrations.huggingface  # noqa: F401 - transformers then reads the configuration
    from polysketch.integrations.vllm.settings import Settings

    MODELS_CONFIG_MAP[ARCHITECTURE] = Settings
    ModelRegistry.register_model(ARCHITECTURE, f"{_HERE}.model:{ARCHITECTURE}")
    if BACKEND not in MambaAttentionBackendEnum.__members__:
        register_backend(BACKEND, f"{_HERE}.batch.StateBackend", is_mamba=True)
