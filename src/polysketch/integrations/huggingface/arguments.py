"""Arguments that models of transformers share, as ours take them."""

from typing import Any

from transformers import PreTrainedConfig

_REMEDIES = {
    "inputs_embeds": "give input_ids",
    "decoder_inputs_embeds": "give decoder_input_ids",
    "output_attentions": "attention weights are never formed",
    "output_hidden_states": "the model without its head gives them",
    "token_type_ids": "let tokenizer.model_input_names be ['input_ids', 'attention_mask']",
}


def refuse_arguments(others: dict[str, Any], config: PreTrainedConfig) -> None:
    """Refuse arguments that would change the result and are not served.

    Args:
        others: arguments that were not taken out before.
        config: whose settings ask for outputs, too.

    Raises:
        ValueError: naming the first of them.
    """
    given = {name for name, value in others.items() if value is not None and value is not False}
    for name in ("output_hidden_states", "output_attentions"):
        if others.get(name) is None and getattr(config, name, False):
            given.add(name)
    for name in sorted(given):
        with_target = name == "output_hidden_states" and getattr(config, "is_encoder_decoder", False)
        remedy = "leave it out" if with_target else _REMEDIES.get(name, "leave it out")
        raise ValueError(f"these models do not take {name}: {remedy}")


def for_the_model(given: dict[str, Any]) -> dict[str, Any]:
    """What `generate` hands on, without the tokenizers that it was given to stop at strings or to read drafts by."""
    return {name: value for name, value in given.items() if name not in ("tokenizer", "assistant_tokenizer")}


def wants_dict(return_dict: bool | None, config: PreTrainedConfig) -> bool:
    """Whether to give a named output rather than a tuple."""
    return bool(config.return_dict if return_dict is None else return_dict)
