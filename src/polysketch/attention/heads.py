"""The heads of a mechanism, and the tokens that fit them."""

from itertools import chain

import torch
from torch import Tensor, nn

from polysketch.attention.masked import finite_at_masked, without_masked
from polysketch.ops.arguments import check_at_least_one, check_key_mask


class Heads(nn.Module):
    """How many heads of which width, and what is taken of a token; other tokens are refused before anything is done.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`, with its errors.
    """

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int | None = None) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_at_least_one(num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads};"
                " each key/value head serves the same number of query heads"
            )
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads

    @property
    def own_tensor(self) -> Tensor:
        """A floating tensor of the mechanism: states take its device and dtype. Without any, PyTorch's default."""
        tensors = chain(self.parameters(), self.buffers())
        return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))

    @property
    def reads_hidden(self) -> bool:
        """Whether it needs `hidden`, the layer's input, beside query, key and value."""
        return False

    @property
    def reads_unrotated(self) -> bool:
        """Whether `forward` and `extend` take `unrotated` too: query and key as they were before rotary positions.

        A layer that rotates them hands both over; without it, a mechanism takes query and key themselves.
        """
        return False

    def check_inputs(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None = None) -> None:
        """Refuse tensors of other heads or widths than the mechanism was built for, and mixed devices or dtypes.

        Args:
            query, key, value: as for `Mechanism.forward`.
            hidden: the same, looked at where the mechanism reads it; one that is missing is refused by its reader.

        Raises:
            ValueError: naming the expected and the received shape, or the devices.
            TypeError: naming the dtypes.
        """
        self.check_query(query)
        _check_heads("key", key, self.num_kv_heads, self.head_dim)
        if value.dim() != 4 or value.shape[1] != self.num_kv_heads:
            raise ValueError(f"value must be (batch, {self.num_kv_heads}, length, value_dim), got {tuple(value.shape)}")
        if value.shape[:3] != key.shape[:3] or query.shape[0] != key.shape[0]:
            raise ValueError(
                "query, key and value must share the batch, key and value also the length, got "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        self._check_kinds(query, key, value)
        if hidden is not None and hidden.shape[:-1] != query.shape[::2] and self.reads_hidden:
            raise ValueError(
                f"hidden must be (batch, length, width) of the tokens of query, ({query.shape[0]}, {query.shape[2]}, "
                f"width), got {tuple(hidden.shape)}"
            )

    def check_query(self, query: Tensor) -> None:
        """Refuse a query of other heads or another width, as `check_inputs`."""
        _check_heads("query", query, self.num_heads, self.head_dim)

    def real_inputs(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """`check_inputs`, and what is given without what stands at masked tokens: NaN there reaches nothing.

        Keys and values become zeros there. Queries may be of another sequence, so of them, and of `hidden`, only what
        is not finite becomes zero. Without a mask nothing is copied.

        Args:
            query, key, value, key_mask, hidden: as for `forward` and `extend`, which begin with this.

        Returns:
            The same query, key, value and hidden, cleaned.

        Raises:
            TypeError, ValueError: as `check_inputs`, and for a mask that does not fit the key.
        """
        self.check_inputs(query, key, value, hidden)
        if key_mask is None:
            return query, key, value, hidden
        check_key_mask(key_mask, key)
        if hidden is not None and self.reads_hidden:
            hidden = finite_at_masked(hidden, key_mask)
        query = finite_at_masked(query, key_mask)
        return query, without_masked(key, key_mask), without_masked(value, key_mask), hidden

    def new_inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """`real_inputs` of new tokens, which are as many queries as keys: `extend` begins with this.

        Raises:
            TypeError, ValueError: as `real_inputs`, and for another number of queries.
        """
        cleaned = self.real_inputs(query, key, value, key_mask, hidden)
        require_as_many(query, key)
        return cleaned

    def real_source(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Key and value as of `real_inputs`, of a sequence that no query has asked yet: `read_source` begins with this.

        Raises:
            TypeError, ValueError: as `real_inputs`.
        """
        nobody = key.new_zeros(key.shape[0], self.num_heads, 0, self.head_dim)
        _, key, value, _ = self.real_inputs(nobody, key, value, key_mask)
        return key, value

    def _check_kinds(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        # Older compilers of PyTorch do not trace next with a default.
        parameter = next(chain(self.parameters(), (query,)))
        if not query.device == key.device == value.device == parameter.device:
            raise ValueError(
                "query, key, value and the mechanism must be on one device, got "
                f"{query.device}, {key.device}, {value.device} and {parameter.device}: move them with .to(device)"
            )
        if query.dtype != key.dtype and not torch.is_autocast_enabled(query.device.type):
            raise TypeError(f"query and key must share one dtype, got {query.dtype} and {key.dtype}")
        if not value.is_floating_point():
            raise TypeError(f"value must be floating point, got {value.dtype}")
        if not query.is_floating_point() or torch.promote_types(query.dtype, parameter.dtype) != parameter.dtype:
            raise TypeError(
                f"query and key must be floating and no wider than the mechanism's {parameter.dtype}, got "
                f"{query.dtype}: cast one of them with .to(dtype)"
            )

    def extra_repr(self) -> str:
        """The sizes every mechanism has; subclasses append their options."""
        kv_heads = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}{kv_heads}"


def _check_heads(name: str, tensor: Tensor, heads: int, width: int) -> None:
    if tensor.dim() != 4 or tensor.shape[1] != heads or tensor.shape[3] != width:
        raise ValueError(
            f"{name} must be (batch, {heads}, length, {width}), got {tuple(tensor.shape)};"
            " is the layout (batch, heads, length, head_dim)?"
        )


def require_as_many(query: Tensor, key: Tensor) -> None:
    """Refuse queries and keys (batch, heads, length, head_dim) of unlike lengths.

    Raises:
        ValueError: with both lengths.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"expected as many queries as keys, got {query.shape[2]} queries and {key.shape[2]} keys")
