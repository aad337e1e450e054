"""Checks of the tensors and sizes that are given: one clear line with what was expected, what came, and why."""

import math

import torch
from torch import Tensor


def check_attention_tensors(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> None:
    """Refuse query, key, value and key_mask that do not belong together.

    Args:
        query: (batch, heads, query_length, head_dim), floating point.
        key: (batch, key_heads, key_length, head_dim); ``heads`` is a multiple of ``key_heads``.
        value: (batch, key_heads, key_length, value_dim).
        key_mask: (batch, key_length) bool, True for a real token, or None.

    Raises:
        ValueError: shapes or devices disagree, or a length is zero.
        TypeError: a dtype is not floating point, dtypes differ outside autocast, or the mask is not bool.
    """
    _check_shapes(query, key, value)
    _check_dtypes(query, key, value)
    check_devices(query=query, key=key, value=value)
    if key_mask is not None:
        check_key_mask(key_mask, key)


def check_causal_lengths(query: Tensor, key: Tensor) -> None:
    """Refuse causal attention between a query and a key of different lengths.

    Raises:
        ValueError: the lengths differ.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"causal attention expects as many queries as keys, got {query.shape[2]} queries and {key.shape[2]} keys;"
            " to continue a sequence from cached keys, call the op whose name ends in _with_cache"
        )


def check_cache_lengths(query: Tensor, key: Tensor) -> None:
    """Refuse more queries than cached keys: the queries are the last of the key positions.

    Raises:
        ValueError: there are more queries than keys.
    """
    if query.shape[2] > key.shape[2]:
        raise ValueError(
            f"attention with a cache expects at most as many queries as keys, got {query.shape[2]} queries and"
            f" {key.shape[2]} keys; the new keys and values must be appended to the cache before the call"
        )


def check_at_least_one(**sizes: int) -> None:
    """Refuse a size, given under its name, that is not an integer of at least one, or none that 64 bits hold.

    Raises:
        TypeError: not an integer.
        ValueError: below one, or 2**63 and above.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
        if size >= 2**63:
            raise ValueError(f"{name} must be below 2**63, got {size}")


def check_offset(offset: float) -> None:
    """Refuse what no denominator can have added to it.

    Raises:
        ValueError: NaN, infinity, or below 0.
    """
    if not 0 <= offset < math.inf:
        raise ValueError(f"offset must be finite and not negative, got {offset!r}")


def check_key_mask(key_mask: Tensor, key: Tensor) -> None:
    """Refuse a mask that is not (batch, key_length) bool on the device of key (batch, key_heads, key_length, width).

    Raises:
        ValueError: another shape or device.
        TypeError: not bool.
    """
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be bool with True for real tokens, got {key_mask.dtype}; use mask.bool()")
    expected = (key.shape[0], key.shape[2])
    if tuple(key_mask.shape) != expected:
        raise ValueError(f"key_mask must be (batch, key_length) = {expected}, got {tuple(key_mask.shape)}")
    check_devices(key=key, key_mask=key_mask)


def check_rows(rows: Tensor, batch: int, kept: Tensor) -> None:
    """Refuse rows (batch,) int64 of a tensor (rows, ...) that it does not have; a device is not waited for.

    Raises:
        ValueError: another shape, dtype or device, or, in host memory, a row that does not exist.
    """
    if rows.dtype != torch.int64 or tuple(rows.shape) != (batch,) or rows.device != kept.device:
        raise ValueError(
            f"expected {batch} rows as int64 on {kept.device}, found {rows.dtype} {tuple(rows.shape)} on {rows.device}"
        )
    if rows.device.type == "cpu" and batch and not 0 <= int(rows.min()) <= int(rows.max()) < len(kept):
        raise ValueError(f"expected rows from 0 to {len(kept) - 1}, found {rows.tolist()[:16]}")


def check_devices(**tensors: Tensor) -> None:
    """Refuse tensors, given under their names, that are not on one device.

    Raises:
        ValueError: two are on different devices.
    """
    devices = [tensor.device for tensor in tensors.values()]
    # A device compares faster than it hashes, and a token's call is short.
    if devices.count(devices[0]) < len(devices):
        raise ValueError(f"{', '.join(tensors)} must be on one device, got {_listed(devices)}; move one of them")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, length, width), got the shape {tuple(tensor.shape)}")
        if tensor.shape[3] == 0 and name != "value":
            raise ValueError(f"{name} must be at least 1 wide, got the shape {tuple(tensor.shape)}")
        if tensor.shape[2] == 0:
            raise ValueError(f"{name} must hold at least one position, got the shape {tuple(tensor.shape)}")
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "query, key and value must share the batch, key and value also heads and length, got query"
            f" {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must share head_dim, got {query.shape[3]} and {key.shape[3]}")
    if 0 in (query.shape[1], key.shape[1]) or query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"the query heads must be a multiple of the key heads, got {query.shape[1]} and {key.shape[1]};"
            " is the layout (batch, heads, length, width)?"
        )


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    dtypes = [tensor.dtype for tensor in (query, key, value)]
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise TypeError(f"query, key and value must be floating point, got {_listed(dtypes)}")
    # Under autocast a float32 norm beside a bfloat16 projection is normal, and every op has a defined working dtype.
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(query.device.type):
        raise TypeError(f"query, key and value must share one dtype outside autocast, got {_listed(dtypes)}")


def _listed(items: list) -> str:
    return ", ".join(str(item) for item in items)
