"""An output layer in chunks of tokens: logits in float32, and gradients, without the logits of all tokens at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast

_CHUNK_LOGITS = 2**24  # logits held at a time: 64 MB in float32, whatever the vocabulary
_MORE_ON_CUDA = 4  # times as many: after each chunk the gradient of all weights is read and written once more
_BLOCK_WEIGHTS = 2**19  # weights held as float32 at a time where the product needs them so: 2 MB, in a core's cache


def chunk_tokens(weight: Tensor) -> int:
    """Number of tokens whose logits are made at a time, for a weight (vocab_size, hidden_size)."""
    held = _CHUNK_LOGITS * (_MORE_ON_CUDA if weight.is_cuda else 1)
    return max(1, held // weight.shape[0])


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or better where the dtype is."""
    return torch.promote_types(dtype, torch.float32)


def rows_to_multiply(hidden: Tensor) -> Tensor:
    """(..., hidden_size) -> (tokens, hidden_size), under autocast rounded to its dtype.

    Raises:
        ValueError: no dimension of tokens.
    """
    if hidden.dim() < 2:
        raise ValueError(f"hidden must be (batch, length, hidden_size), got the shape {tuple(hidden.shape)}")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return hidden.flatten(0, -2).to(dtype)


def logits_of(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(tokens, vocab_size), float32 or better: rows @ weight.T + bias, with the dtype of rows that of weight."""
    return products_of(rows, weight, bias).add_(bias)


def products_of(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`logits_of` to which the bias is still to be added."""
    product = rows @ weight.T if rows.dtype == wide(rows.dtype) else _wide_product(rows, weight)
    return product.to(wide(bias.dtype))


def gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor, grad_logits: Callable[[slice, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; logits are made again, chunk by chunk.

    Args:
        hidden: (tokens, hidden_size).
        weight: (vocab_size, hidden_size).
        bias: (vocab_size,).
        grad_logits: which tokens, and their logits -> the gradient of these logits.
    """

    def of_products(part: slice, products: Tensor) -> tuple[Tensor, Tensor]:
        found = grad_logits(part, products.add_(bias))
        return found.to(hidden.dtype), found.sum(0)

    return gradients_by_products(hidden, weight, bias, of_products)


def gradients_by_products(
    hidden: Tensor, weight: Tensor, bias: Tensor, grad_products: Callable[[slice, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """`gradients`, with more left to what is called: adding the bias, its gradient, and rounding.

    Args:
        hidden, weight, bias: as of `gradients`.
        grad_products: which tokens, and their `products_of`, to be used up -> the gradient of their logits in the dtype
            of hidden, and its sum over tokens.
    """
    chunk = chunk_tokens(weight)
    compute_weight = weight.to(hidden.dtype)
    grad_hidden = torch.empty_like(hidden)
    # Sums over the chunks, in float32: in bfloat16 the later chunks of a long text would be rounded away.
    grad_weight, grad_bias = (torch.zeros_like(each, dtype=wide(each.dtype)) for each in (weight, bias))
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        grad, of_bias = grad_products(part, products_of(hidden[part], compute_weight, bias))
        grad_bias += of_bias
        grad_hidden[part] = grad @ compute_weight
        grad_weight += grad.T @ hidden[part]
    return grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype)


def _wide_product(rows: Tensor, weight: Tensor) -> Tensor:
    """The product of 16-bit (tokens, hidden_size) and (vocab, hidden_size), its sums not rounded: float32."""
    with without_autocast(rows.device.type):  # which would round the sums after all
        if _multiplies_into_float32(rows.device):
            return torch.mm(rows, weight.T, out_dtype=torch.float32)
        product = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
        rows, entries = rows.float(), max(1, _BLOCK_WEIGHTS // weight.shape[1])
        for block, columns in zip(weight.split(entries), product.split(entries, dim=1), strict=True):
            torch.mm(rows, block.float().T, out=columns)
        return product


def _multiplies_into_float32(device: torch.device) -> bool:
    """Whether the device takes 16-bit matrices and gives their product in float32 (CUDA, from torch 2.8 on)."""
    return device.type == "cuda" and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype")
