"""What `linear_attention` refuses, and how it says so."""

import torch
from torch import Tensor

from polysketch.ops.arguments import check_at_least_one, check_devices, check_key_mask, check_offset
from polysketch.ops.blocks import check_at_boundary, check_block_size, check_fitting_blocks
from polysketch.ops.linear.state import LinearAttentionState, check_sizes
from polysketch.ops.linear.state_rows import StateRows
from polysketch.ops.linear.types import Diagonal, Inputs, LocalPolynomial, Plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FORGOTTEN = -100.0
"""exp of less is zero in float32, and differences of running totals keep their digits."""


def checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    power: int,
    factors: int,
    causal: bool,
    block_size: int | None,
    offset: float,
    normalize: bool,
    local: LocalPolynomial | None,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    state: LinearAttentionState | StateRows | None,
    return_state: bool,
    compute_chunk: int | None,
) -> tuple[Inputs, Plan]:
    """The call of `linear_attention` with these arguments, if they fit together.

    Raises:
        ValueError, TypeError: they do not; with the argument's name, what was expected and what came.
    """
    _check_kinds({"query_features": query, "key_features": key, "value": value})
    _check_shapes(query, key, value, causal)
    if type(power) is not int or power not in (1, 2):
        raise ValueError(f"power must be 1 or 2, got {power!r}")
    _check_factors(factors, power, key.shape[3])
    check_offset(offset)
    if compute_chunk is not None:
        check_at_least_one(compute_chunk=compute_chunk)
    if key_mask is not None:
        check_key_mask(key_mask, key)
    if state is not None or return_state:
        _expect_causal(causal, "a state")
    inputs, degree, chunk = Inputs(query, key, value), 2, compute_chunk or 0
    if local is not None:
        local_query, local_key, degree, chunk = LocalPolynomial(*local)
        _check_local(LocalPolynomial(*local), query, key)
        inputs = inputs._replace(local_query=local_query, local_key=local_key)
    if log_decay is not None:
        _expect_causal(causal, "log_decay")
        _expect_shape("log_decay", log_decay, (*key.shape[:3],))
        _check_kinds({"value": value, "log_decay": log_decay}, same_dtype=False)
        _check_decays(log_decay.detach(), key_mask)
        inputs = inputs._replace(log_decay=log_decay.clamp(min=FORGOTTEN))
    block = Diagonal.CAUSAL if block_size is None else block_size
    plan = Plan(power, factors, causal, float(offset), normalize, degree, chunk, block, return_state)
    if block_size is not None:
        _check_blocks(inputs, plan, state)
    if state is not None:
        _check_state(state, inputs, plan)
    return inputs, plan


def _check_kinds(tensors: dict[str, Tensor], *, same_dtype: bool = True) -> None:
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
        if same_dtype and tensor.dtype != first.dtype:
            raise TypeError(f"{name} is {tensor.dtype} but {first_name} is {first.dtype}: cast them to one dtype")
    check_devices(**tensors)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> None:
    for name, tensor in (("query_features", query), ("key_features", key), ("value", value)):
        if tensor.dim() != 4 or 0 in tensor.shape[1:]:
            raise ValueError(
                f"{name} must be (batch, heads, length, width), only the batch may be 0, got {tuple(tensor.shape)}"
            )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "key_features and value must agree in batch, heads and length, got "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            "query_features and key_features must agree in batch and width, got "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            "query heads must be a multiple of key heads (grouped-query attention), got "
            f"{query.shape[1]} and {key.shape[1]}"
        )
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"causal attention needs equal query and key lengths, got {query.shape[2]} and {key.shape[2]}; "
            "earlier tokens belong into a state"
        )


def _check_blocks(inputs: Inputs, plan: Plan, state: LinearAttentionState | StateRows | None) -> None:
    block = plan.diagonal
    check_block_size(block, plan.causal)
    if inputs.log_decay is not None and block > 1:
        raise ValueError(f"log_decay is over the tokens before and has no other direction: got block_size={block}")
    if inputs.local_key is not None:
        check_fitting_blocks(block, **{"local.chunk": plan.chunk})
    if state is not None:
        check_at_boundary(state.position, block)


def _check_decays(log_decay: Tensor, key_mask: Tensor | None) -> None:
    # A device is not waited for, nor is a single token of decoding looked at.
    if log_decay.device.type != "cpu" or log_decay.shape[2] == 1 or torch.compiler.is_compiling():
        return
    grows = log_decay > 0
    if key_mask is not None:
        grows &= key_mask[:, None]
    if bool(grows.any()):
        raise ValueError(
            f"log_decay must be at most 0, for sums decay and do not grow, got {float(log_decay[grows].max())}; "
            "of a decay between 0 and 1 it is the logarithm"
        )


def _check_factors(factors: int, power: int, feature_dim: int) -> None:
    if type(factors) is not int or factors not in (1, 2):
        raise ValueError(f"factors must be 1 or 2, got {factors!r}")
    if factors == 2 and power != 1:
        raise ValueError(f"factors=2 goes with power=1: products have no further power, got power={power}")
    if factors == 2 and feature_dim % 2:
        raise ValueError(f"factors=2 needs features of an even width, two halves, got {feature_dim}")


def _check_local(local: LocalPolynomial, query: Tensor, key: Tensor) -> None:
    check_at_least_one(**{"local.degree": local.degree, "local.chunk": local.chunk})
    if local.degree % 2:
        raise ValueError(f"local.degree must be even and at least 2, got {local.degree}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"local chunks need equal query and key lengths, got {query.shape[2]} and {key.shape[2]}")
    _check_kinds({"query_features": query, "local.query": local.query, "local.key": local.key})
    _expect_shape("local.query", local.query, (*query.shape[:3], local.query.shape[-1]))
    _expect_shape("local.key", local.key, (*key.shape[:3], local.query.shape[-1]))


def _check_state(state: LinearAttentionState | StateRows, inputs: Inputs, plan: Plan) -> None:
    key, value, local_key = inputs.key, inputs.value, inputs.local_key
    chunk, width = (0, 0) if local_key is None else (plan.chunk, local_key.shape[3])
    expected = (key.shape[0], key.shape[1], key.shape[3], value.shape[3], plan.power, plan.factors, chunk, width)
    pool = state.pool
    found = (
        state.batch_size,
        pool.sums.shape[1],
        pool.feature_dim,
        pool.value_dim,
        pool.power,
        pool.factors,
        pool.local_chunk,
        pool.open_key.shape[3],
    )
    if expected != found:
        names = "batch, key heads, features, value width, power, factors, local chunk, local width"
        raise ValueError(f"the state does not fit: expected ({names}) = {expected}, found {found}")
    check_sizes(pool.tensors(), pool.power, pool.factors)
    check_devices(key_features=key, state=pool.sums)


def _expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def _expect_causal(causal: bool, what: str) -> None:
    if not causal:
        raise ValueError(f"{what} needs causal=True: without an order of tokens it has no meaning")
