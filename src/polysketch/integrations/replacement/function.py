"""The attention function that is registered: a mechanism in replaced layers, the model's own attention in others."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from polysketch.attention import Mechanism, PackedDocuments
from polysketch.integrations.packed_rows import LENGTHS, OFFSETS
from polysketch.integrations.replacement.bookkeeping import IMPLEMENTATION, LayerRecord, Replacement, record_of
from polysketch.integrations.replacement.cache import NewTokens, StateLayer, state_layer_of
from polysketch.integrations.replacement.call import AttentionCall, own_attention
from polysketch.integrations.replacement.layer_inputs import OPTION, LayerInputs
from polysketch.integrations.replacement.masks import DeferredMask, defer_mask
from polysketch.integrations.replacement.rotation import turned_back
from polysketch.integrations.replacement.source import SourceLayer, mechanism_of

_UNDERSTOOD = {"scaling", "dropout", "sliding_window", "is_causal", "position_ids", "position_bias", *OFFSETS, *LENGTHS}
_IMMATERIAL = {"use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache_position"}
_IMMATERIAL |= {"deterministic", "num_items_in_batch", "logits_to_keep", "token_type_ids", "output_router_logits"}
_IMMATERIAL |= {"tokenizer", "assistant_tokenizer"}  # which `generate` hands on where strings are to stop it


def replaced_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in every layer of a model in which attention was replaced.

    Args:
        module: the attention layer.
        query: (batch, num_heads, new tokens, head_dim).
        key, value: (batch, num_kv_heads, tokens, head_dim), of all tokens that the layer's cache gave.
        attention_mask: the `DeferredMask` of the model.
        **options: scaling, dropout and whatever else the architecture passes on.

    Returns:
        (batch, new tokens, num_heads, head_dim); and the weights, where a layer that was not replaced gives them.

    Raises:
        ValueError: anything that the mechanism cannot honour.
    """
    record = record_of(module)
    if record is None:
        raise ValueError(
            f"attn_implementation={IMPLEMENTATION!r} means attention replaced by polysketch.replace_attention; load the"
            " model with its usual attention and call replace_attention, or load_replaced for a saved one"
        )
    inputs: LayerInputs | None = options.pop(OPTION, None)
    if inputs is not None and inputs.look is not None:
        inputs.look(record.index, module, query, key, inputs.positions)
        return torch.zeros_like(query).transpose(1, 2), None
    if record.model.around is None:
        return _compute(record, module, query, key, value, attention_mask, inputs, options)
    with record.model.around(record.index):
        return _compute(record, module, query, key, value, attention_mask, inputs, options)


def _compute(
    record: LayerRecord,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    inputs: LayerInputs | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """As `replaced_attention`, of a layer that has a record."""
    if record.replacement is None:
        implementation = record.model.implementation
        return own_attention(module, query, key, value, attention_mask, implementation, options)
    causal, crosses = record.sees == "past", record.sees == "source"
    mask = _checked_mask(record, attention_mask) if causal or attention_mask is not None else None
    state = state_layer_of(key)
    _check_options(record, options)
    documents = _documents(mask, options, query) if causal and mask is not None else None
    tokens = key.shape[2] if state is None else state.get_seq_length()
    if documents is not None:
        tokens = documents.longest
    window = None if crosses else _window(module, options)
    _check_window(record, record.replacement, mechanism_of(module), window, tokens)
    if not causal and window is None and mask is not None and not mask.is_plain_on_both_sides:
        raise ValueError(f"layer {record.index} has a mask of more than padding, which a replaced layer cannot honour")
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    scaled = _with_scaling(query, scaling)
    call = AttentionCall(
        layer=record.index,
        mechanism=mechanism_of(module),
        query=scaled,
        key=key,
        value=value,
        key_mask=None if mask is None else mask.source_mask() if crosses else mask.key_mask(),
        documents=documents,
        given=_given(record, module, scaled, key, inputs),
        scaling=scaling,
        causal=causal,
        attention=module,
        _raw_query=query,
        _mask=mask,
        _implementation=record.model.implementation,
        _options=options,
    )
    output = _attend(record, call, crosses) if state is None else _decode(record, call, state)
    return output.transpose(1, 2).contiguous(), None


def _given(
    record: LayerRecord, module: nn.Module, query: Tensor, key: Tensor, inputs: LayerInputs | None
) -> dict[str, Any]:
    """What the mechanism reads beside query, key and value."""
    if not record.given:
        return {}
    if inputs is None:
        raise ValueError(
            f"layer {record.index} was called without its hooks, so that its input is not known: call the attention"
            " module itself, not its forward"
        )
    given: dict[str, Any] = {"hidden": inputs.hidden} if "hidden" in record.given else {}
    if "unrotated" in record.given:
        given["unrotated"] = turned_back(module, query, key, inputs.positions)
    return given


def _attend(record: LayerRecord, call: AttentionCall, crosses: bool) -> Tensor:
    """Over a whole sequence, by the mechanism or by whoever observes it."""
    if not crosses and call.query.shape[2] != call.key.shape[2]:
        raise ValueError(
            f"layer {call.layer} was given {call.query.shape[2]} queries and {call.key.shape[2]} keys: a cache without"
            " the layer's state. Begin with past_key_values=polysketch.replacement_cache(model), or an empty"
            " DynamicCache"
        )
    return call.replacement() if record.model.observer is None else record.model.observer(call)


def _decode(record: LayerRecord, call: AttentionCall, state: StateLayer | SourceLayer) -> Tensor:
    """From new tokens to all so far, by the state in the cache."""
    if record.model.observer is not None:
        raise ValueError(
            "attention cannot be observed while decoding from a cache: call the model with use_cache=False"
        )
    if call.attention.training and torch.is_grad_enabled():  # `generate` on a model in training mode is another matter
        raise ValueError(
            "no gradient flows through a cache that is passed to a replaced model: in training, call it without"
            " past_key_values; else call model.eval() first"
        )
    if isinstance(state, SourceLayer):
        return state.attend(call.attention, call.query, call.key, call.value, call.key_mask)
    if call._mask is not None:
        call._mask.require_same_past(state.padding)
    return state.attend(call.attention, NewTokens(call.query, call.key, call.value, call.key_mask, **call.given))


def _with_scaling(query: Tensor, scaling: float) -> Tensor:
    """The query for which a mechanism's own 1 / sqrt(head_dim) gives the architecture's scaling."""
    factor = scaling * math.sqrt(query.shape[-1])
    return query if math.isclose(factor, 1.0, rel_tol=1e-6) else query * factor


def _window(module: nn.Module, options: Mapping[str, Any]) -> int | None:
    """The window that the layer has in the unmodified model."""
    return options["sliding_window"] if "sliding_window" in options else getattr(module, "sliding_window", None)


def _checked_mask(record: LayerRecord, mask: Any) -> DeferredMask:
    if isinstance(mask, DeferredMask):
        return mask
    now = next((each._attn_implementation for each, _ in record.model.stacks), IMPLEMENTATION)
    if now != IMPLEMENTATION:
        raise ValueError(
            f"the model's attention was set to {now!r} after replace_attention, so"
            f" that layer {record.index} is not told which tokens are padding: call restore_attention,"
            " set_attn_implementation and replace_attention in this order"
        )
    if isinstance(mask, Tensor) and mask.dim() == 4:
        raise ValueError(
            f"layer {record.index} was given a mask of all pairs of tokens, {tuple(mask.shape)}: a replaced layer"
            " honours padding alone, attention_mask (batch, length)"
        )
    raise ValueError(
        f"layer {record.index} was given {type(mask).__name__} for a mask: was the layer called outside of its model?"
    )


def _check_options(record: LayerRecord, options: Mapping[str, Any]) -> None:
    """Refuse what is not understood: softcapping, sinks, position biases."""
    replacement = record.replacement
    ignored = {"softcap"} if replacement is not None and replacement.softcap == "ignore" else set()
    for name, value in options.items():
        if name not in _UNDERSTOOD | _IMMATERIAL | ignored and value is not None:
            raise ValueError(f"layer {record.index}'s attention was given {name}, which a replaced layer cannot honour")
    biased = options.get("position_bias") is not None and record.sees != "source"  # a source's is 0: it has no places
    if biased and replacement is not None and replacement.position_bias != "ignore":
        raise ValueError(f"layer {record.index} adds a bias of positions, which a replaced layer cannot honour")
    if record.sees == "past" and options.get("is_causal") is False:
        raise ValueError(f"layer {record.index}'s attention was asked for is_causal=False; only causal is replaced")
    if record.sees == "both" and options.get("is_causal"):
        raise ValueError(
            f"layer {record.index}'s attention was asked for is_causal=True, and its mechanism was put where every"
            " token sees the whole sequence: this model or call cannot be replaced"
        )
    if options.get("dropout") and replacement is not None and replacement.dropout != "ignore":
        raise ValueError(
            f"layer {record.index} has an attention dropout of {options['dropout']} in training, and mechanisms drop no"
            ' weights: set it to 0 in the model, or pass dropout="ignore" to replace_attention'
        )


def _documents(mask: DeferredMask, options: Mapping[str, Any], query: Tensor) -> PackedDocuments | None:
    """The documents of a packed row, which transformers recognises by positions that start again.

    A compiled graph cannot divide a row by what is in a tensor: there they are refused.
    """
    if torch.compiler.is_compiling():
        positions = options.get("position_ids")
        if positions is not None and positions.shape[-1] > 1 and not mask.knows_padding:
            steps = positions.diff(dim=-1) == 1
            assert_true(steps.all(), "packed sequences cannot be honoured by replaced attention that is compiled")
        return None
    documents = mask.documents(options, torch.Size((query.shape[0], query.shape[2])))
    if documents is None and not mask.is_plain:
        raise ValueError(
            "the model adds a mask of its own to the causal one, and its position_ids do not start again, as in packed"
            " sequences: a replaced layer cannot honour it"
        )
    if documents is not None and mask.is_plain:
        raise ValueError(
            "documents packed into one row take neither a cache nor an attention_mask: pass use_cache=False, or leave"
            " the mask out"
        )
    return documents


def assert_true(condition: Tensor, message: str) -> None:
    """Raise RuntimeError where the condition is false, in a compiled graph without waiting for the device.

    PyTorch's own assertion is not public. Without it the host waits, and a compiled graph breaks here.
    """
    if hasattr(torch, "_assert_async"):
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise RuntimeError(message)


def _check_window(
    record: LayerRecord, replacement: Replacement, mechanism: Mechanism, window: int | None, tokens: int
) -> None:
    if window is None or tokens <= window or replacement.sliding_window == "ignore" or _stays_in(mechanism, window):
        return
    raise ValueError(
        f"layer {record.index} attends to the last {window} tokens in the unmodified model, and {replacement.name!r}"
        f' would attend to all {tokens}: pass sliding_window="ignore" to replace_attention to have it so, replace by'
        f" 'sliding-window' with window={window}, or leave the layer as it is"
    )


def _stays_in(mechanism: Mechanism, window: int) -> bool:
    """Whether it never looks beyond the window anyway."""
    return mechanism.reach is not None and mechanism.reach <= window


def register() -> None:
    """Make the attention and mask functions known to transformers; again and again if need be."""
    AttentionInterface.register(IMPLEMENTATION, replaced_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, defer_mask)
