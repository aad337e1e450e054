"""Language models, a training step and states at a position: ready to be timed on any device, with their floors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polysketch.attention import KeyValueState
from polysketch.benchmarking.floors import Floor, Shape
from polysketch.benchmarking.mechanisms import floor
from polysketch.benchmarking.way_names import Sizes, arranged, mechanism_of
from polysketch.models import ModelState, TransformerLM, preset
from polysketch.nn.projection_convolution import ProjectionConvolutionState
from polysketch.ops import LinearAttentionState
from polysketch.training.step import build_optimizer

BASELINE = "softmax"
"""What every other model is compared with."""

_CLIP = 1.0
_OPTIMIZER_BYTES = 36  # a float32 parameter: read twice, gradient both ways, two moments both ways, written
_PREFILL_SPAN = 4_096


def build_model(name: str, preset_name: str, sizes: Sizes, **changes: Any) -> TransformerLM:
    """The preset with the mechanism `name` in its layers, the same weights every time, on PyTorch's default device.

    Args:
        name: learned, random, or a mechanism with options as for `ways.way`; in every fourth layer with /4 behind it.
        preset_name: size of the model.
        sizes: of learned and random.
        **changes: other fields of the configuration.

    Raises:
        ValueError: an unknown name or preset; the message lists those that exist.
    """
    way, every = arranged(name)
    mechanism, options = mechanism_of(way, sizes)
    arrangement = {} if every == 1 else {"attention_every": every}
    config = preset(preset_name, attention=mechanism, attention_options=options, **arrangement, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TransformerLM(config)


def training_step(model: TransformerLM, ids: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """One optimizer step as the trainer makes it, its matrix products in `dtype` by autocast unless that is float32;
    gradients are freed at its end, for another model is next.
    """
    optimizer = build_optimizer(model, learning_rate=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    parameters = list(model.parameters())
    autocast = torch.autocast(ids.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def step() -> None:
        """Forward, backward, clipping, AdamW."""
        with autocast:
            loss = model.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def state_at(model: TransformerLM, batch: int, position: int, room: int = 0) -> ModelState:
    """A state after `position` tokens, with room for so many more: of random numbers, for the time of a step does not
    depend on them. Where a layer is neither a cache nor sums, random tokens are read in long spans.
    """
    state = model.init_state(batch)
    if all(isinstance(layer, KeyValueState | LinearAttentionState) for layer in attention_states(state)):
        fill(state, model, position, room)
        return state
    ids = torch.randint(model.config.vocab_size, (batch, position), device=model.output_bias.device)
    for span in ids.split(_PREFILL_SPAN, dim=1) if position else ():
        _, state = model.extend_hidden(span, state)
    return state


def fill(state: ModelState, model: TransformerLM, position: int, room: int) -> None:
    """Make a state of caches and sums one that has seen `position` tokens, at the same addresses where it has its size.

    The values of a cache are its keys: a large one has no room for other random numbers.
    """
    config, like, rows = model.config, model.output_bias, len(state.position)
    for layer in attention_states(state):
        if isinstance(layer, KeyValueState):
            missing = max(0, position + room - layer.length)
            shape = (rows, config.num_kv_heads, missing, config.head_dim)
            random = torch.randn(shape, device=like.device, dtype=like.dtype)
            layer.append(random, random)
            layer.length = position
            layer.position.fill_(position)
        else:
            for sums in (layer.sums, layer.normalizer):
                sums.uniform_()
            layer.move_to_(position)
    state.move_to_(torch.full((rows,), position))


def attention_states(state: ModelState) -> list[Any]:
    """Of every layer the state of its mechanism, without that of the convolution around it."""
    return [layer.attention if isinstance(layer, ProjectionConvolutionState) else layer for layer in state.layers]


def read_bytes(model: TransformerLM, state: ModelState) -> int:
    """What a step must read of the state: of a cache of keys and values the part that is filled."""
    config = model.config
    token = 2 * config.num_kv_heads * config.head_dim * model.output_bias.element_size()
    rows, found = len(state.position), attention_states(state)
    around = sum(layer.nbytes for layer in state.layers) - sum(layer.nbytes for layer in found)
    return around + sum(rows * one.length * token if isinstance(one, KeyValueState) else one.nbytes for one in found)


def decoding_floor(model: TransformerLM, state: ModelState) -> Floor:
    """One token of every row: every weight and the whole state are read once."""
    weights = sum(weight.numel() for weight in model.parameters())
    read = weights * model.output_bias.element_size() + read_bytes(model, state)
    return Floor(2 * len(state.position) * weights, read)


def training_floor(model: TransformerLM, batch: int, length: int) -> Floor:
    """Forward, backward and update; activations are not counted as bytes, nor attention that nobody has counted."""
    config = model.config
    shape = Shape(batch, length, config.num_heads, config.head_dim)
    named = model.blocks.named_parameters()  # sketches are counted by head
    weights = sum(weight.numel() for name, weight in named if weight.dim() == 2 and "feature_map" not in name)
    weights += config.vocab_size * config.hidden_size  # the output layer, which is the embedding
    layers = [floor(name, options, shape, backward=True, itemsize=2) for name, options in config.layers()]
    attention = sum(layer.operations for layer in layers if layer)
    operations = 3 * 2 * shape.tokens * weights + attention
    return Floor(operations, _OPTIMIZER_BYTES * model.num_parameters())
