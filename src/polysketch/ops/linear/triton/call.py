"""What every launch of a call of linear attention needs: sizes, tuned constants, factors of decay and of folding."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polysketch.ops.linear.packing import expanded_size
from polysketch.ops.linear.types import Inputs, Plan
from polysketch.ops.triton import configuration, launch, precision


@dataclass
class ProgramCall:
    """One call: its sizes and its factors of decay."""

    inputs: Inputs
    plan: Plan

    def __post_init__(self) -> None:
        query, key, value = self.inputs.query, self.inputs.key, self.inputs.value
        self.batch, self.key_heads, self.length, self.features = key.shape
        self.heads, self.queries, self.width = query.shape[1], query.shape[2], value.shape[3]
        self.shared = self.heads // self.key_heads
        # What is not causal reads the sums of everything: one chunk of all keys.
        self.chunk = self.plan.chunk if self.plan.causal else self.length
        self.chunks = num_blocks(self.length, self.chunk)
        self.local = self.inputs.local_query is not None
        self.expanded = expanded_size(self.features, self.plan.power, self.plan.factors)
        self.dot = torch.bfloat16 if value.dtype == torch.bfloat16 else torch.float32
        self.like = value
        inner = (self.inputs.local_query, self.inputs.local_key) if self.local else (query, key)
        self.inner_query, self.inner_key = (_unit_stride(tensor) for tensor in inner if tensor is not None)
        self.query, self.key, self.value = _unit_stride(query), _unit_stride(key), _unit_stride(value)
        self.exponent = self.plan.degree if self.local else self.plan.power
        self.inner_factors = 1 if self.local else self.plan.factors

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory on the call's device."""
        return self.like.new_empty(shape, dtype=dtype)

    def launch(self, kernel, programs: int, *arguments, use: dict[str, int], **constants: int) -> None:
        """Launch with the constants that every program here has."""
        import triton.language as tl  # absolute: Triton, not this module

        dot = tl.bfloat16 if self.dot == torch.bfloat16 else tl.float32
        launch(
            kernel,
            programs,
            *arguments,
            configuration=use,
            WIDTH=self.width,
            PRECISION=precision(self.like.dtype),
            DOT=dot,
            **constants,
        )

    def use(self, program: str, **at_most: int) -> dict[str, int]:
        """The tuned constants, none of the named ones larger than what there is to cover."""
        found = configuration(
            program,
            self.like.device,
            power=self.plan.power,
            factors=self.plan.factors,
            features=self.features,
            width=self.width,
            inner=self.inner_key.shape[3],
            products=_products(self.like.dtype),
        )
        for name, size in at_most.items():
            found[name] = min(found[name], covering_block(size))
        if "ROWS" in found and self.plan.factors == 2:  # the products of an entry of one half with the whole other
            found["ROWS"] = max(found["ROWS"], covering_block(self.features // 2))
        return found

    @cached_property
    def since(self) -> Tensor | None:
        """(batch, key_heads, length): log decay since the chunk began, the token's own included."""
        if self.inputs.log_decay is None:
            return None
        return self._in_chunks(self.inputs.log_decay.float()).cumsum(-1).flatten(2)[..., : self.length].contiguous()

    @cached_property
    def read_factor(self) -> Tensor | None:
        """(batch, key_heads, length): what a query multiplies the sums before its chunk by."""
        return None if self.since is None else self.since.exp()

    @cached_property
    def folded(self) -> Tensor | None:
        """(batch, 1, length) of ones and zeros: whether a token is folded into the sums; None where all are.

        Where nothing reads the last sums, the open chunk may be folded into them as well.
        """
        chunk = self.chunk if self.local else 1
        if self.inputs.length is None and (self.length % chunk == 0 or not self.plan.return_sums):
            return None
        steps = torch.arange(self.length, device=self.like.device)
        if self.inputs.length is None:
            return (steps < self.length - self.length % chunk).float().expand(self.batch, 1, -1)
        length = self.inputs.length.to(self.like.device)[:, None]
        return (steps < length - length % chunk).float()[:, None]

    @cached_property
    def folding(self) -> tuple[Tensor | None, Tensor | None]:
        """What a token is folded with (batch, key_heads, length), and the sums before its chunk (..., chunks)."""
        if self.inputs.log_decay is None:
            if self.folded is None:
                return None, None
            return self.folded.expand(-1, self.key_heads, -1).contiguous(), None
        decay = self.inputs.log_decay.float()
        since = self._in_chunks(decay if self.folded is None else decay * self.folded).cumsum(-1)
        total = since[..., -1:]
        # Differences, never ratios of exponentials: at most zero, so nothing overflows.
        factor = (total - since).clamp(max=0).exp().flatten(2)[..., : self.length]
        return (factor if self.folded is None else factor * self.folded).contiguous(), total[..., 0].exp().contiguous()

    def _in_chunks(self, tokens: Tensor) -> Tensor:
        """(batch, key_heads, length) -> (batch, key_heads, chunks, chunk), filled up with zeros."""
        missing = self.chunks * self.chunk - self.length
        return torch.nn.functional.pad(tokens, (0, missing)).unflatten(2, (self.chunks, self.chunk))

    def chunks_of(self, length: int) -> tuple[int, int]:
        """Tokens of a chunk and how many chunks: one of everything where nothing is causal."""
        chunk = self.chunk if self.plan.causal else length
        return max(1, chunk), num_blocks(length, max(1, chunk))

    def most_rows(self) -> int:
        """Of the sums in one program."""
        return 256 if self.plan.power == 2 else self.expanded

    def sums_blocks(self, rows: int) -> int:
        """Programs of so many rows that the sums of a key head are cut into."""
        if self.plan.factors == 2:
            return num_blocks(self.features // 2, rows // covering_block(self.features // 2))
        return num_blocks(self.expanded, rows)


def _products(dtype: torch.dtype) -> str:
    """What products are made of: bfloat16, tf32, or float32 as it is, "ieee"."""
    return "bfloat16" if dtype == torch.bfloat16 else precision(dtype)


def _unit_stride(tensor: Tensor) -> Tensor:
    """The tensor with neighbouring columns side by side."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def covering_block(size: int) -> int:
    """The smallest block that covers `size`: a power of two, at least 16, which products need."""
    return max(16, 1 << (size - 1).bit_length())


def num_blocks(size: int, block: int) -> int:
    """Blocks that cover `size`."""
    return -(-size // block)
