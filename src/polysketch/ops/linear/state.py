"""What decoding carries: sums over the tokens seen, of a size that depends on features, values and chunk alone."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from polysketch.extras import require
from polysketch.ops.linear.packing import expanded_size

HALF = (torch.bfloat16, torch.float16)
"""What `sums` may be kept in besides the dtype of a state."""

_OPTIONS = ("power", "factors")
"""Fields that are numbers."""
_DIGEST = "sha256"
_MOST_TOKENS = 2**53
"""Positions beyond this are none that anybody counted to."""

Result = TypeVar("Result")


@dataclass
class LinearAttentionState:
    """The state of `linear_attention` between two spans of a sequence; the same layout for every backend.

    Tokens before the last boundary of a local chunk (all tokens, where there is no local part) are folded into sums;
    the tokens since are kept, because the exact local weights still need them. Tensors are float32, or float64 for
    float64 inputs; `sums` may be in half precision. Sizes below: r features, e = `expanded_size(r, power, factors)`, b
    tokens a local chunk (0: no local part).

    Attributes:
        sums: (batch, key_heads, e, value_dim), sum of expanded key features times values, decayed to the boundary.
        normalizer: (batch, key_heads, e), the same for a value of one.
        log_decay: (batch, key_heads), sum of the log decay of all folded tokens.
        open_features: (batch, key_heads, b, r), key features since the boundary; unused slots are zero here and below.
        open_value: (batch, key_heads, b, value_dim).
        open_key: (batch, key_heads, b, head_dim), keys of the exact local part.
        open_log_decay: (batch, key_heads, b).
        position: (batch,) int64 in host memory, tokens seen since the row's first real one; in host memory so that
            no decision about chunks waits for a device. It changes in place (`advance_`, `move_to_`).
        power: 1 or 2, the power of the feature products.
        factors: 1 or 2, whether features are two halves whose products are multiplied.
        device_position: the same numbers in the memory of the sums' device, for programs and captured graphs that
            decide there; `position` itself where the sums are in host memory.
    """

    sums: Tensor
    normalizer: Tensor
    log_decay: Tensor
    open_features: Tensor
    open_value: Tensor
    open_key: Tensor
    open_log_decay: Tensor
    position: Tensor
    power: int
    factors: int = 1
    device_position: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Give the device positions of its own; refuse tensors that cannot be those of a state.

        Raises:
            ValueError: sums or what is open are not of four dimensions.
        """
        for name in ("sums", "open_features", "open_value", "open_key"):
            if getattr(self, name).dim() != 4:
                shape = tuple(getattr(self, name).shape)
                raise ValueError(f"{name} of a state must be (batch, key_heads, ..., width), got the shape {shape}")
        device = self.sums.device
        self.device_position = self.position if device.type == "cpu" else self.position.to(device)

    @classmethod
    def init(
        cls,
        batch_size: int,
        num_key_heads: int,
        feature_dim: int,
        value_dim: int,
        *,
        power: int = 1,
        factors: int = 1,
        local_chunk: int = 0,
        local_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        sums_dtype: torch.dtype | None = None,
    ) -> "LinearAttentionState":
        """The state before the first token: zeros.

        Args:
            batch_size, num_key_heads, feature_dim, value_dim: sizes; of `feature_dim` r, both halves with two factors.
            power, factors: as in `linear_attention`.
            local_chunk: tokens of a local chunk; 0 where there is no local part.
            local_dim: width of the keys of the local part.
            dtype: float32 or float64; narrower types are raised to float32.
            sums_dtype: of `sums`, nearly all of a state; `dtype` when None. In float16 or bfloat16 they take half of
                the memory, and what decoding reads. Every call computes in `dtype` and rounds them once. Roundings add
                up: by the delta rule, which corrects itself, to little; where a token is added at a time, without a
                local part, to more than the sums themselves.

        Raises:
            TypeError: another `sums_dtype`.
        """
        dtype = state_dtype(dtype)
        if sums_dtype not in (None, dtype, *HALF):
            raise TypeError(f"sums of a state in {dtype} are kept in that, bfloat16 or float16, got {sums_dtype}")
        lead = (batch_size, num_key_heads)
        expanded = expanded_size(feature_dim, power, factors)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*lead, *shape, device=device, dtype=dtype)

        return cls(
            sums=zeros(expanded, value_dim).to(sums_dtype or dtype),
            normalizer=zeros(expanded),
            log_decay=zeros(),
            open_features=zeros(local_chunk, feature_dim),
            open_value=zeros(local_chunk, value_dim),
            open_key=zeros(local_chunk, local_dim),
            open_log_decay=zeros(local_chunk),
            position=torch.zeros(batch_size, dtype=torch.int64, device="cpu"),
            power=power,
            factors=factors,
        )

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return self.sums.shape[0]

    @property
    def value_dim(self) -> int:
        """Width of the values."""
        return self.sums.shape[3]

    @property
    def pool(self) -> "LinearAttentionState":
        """Itself: the state that has the tensors, as of `StateRows`."""
        return self

    @property
    def rows(self) -> None:
        """Nothing: its own rows, in their order, as of `StateRows`."""
        return None

    @property
    def local_chunk(self) -> int:
        """Tokens of a local chunk, 0 where there is no local part."""
        return self.open_key.shape[2]

    @property
    def feature_dim(self) -> int:
        """Width r of the features."""
        return self.open_features.shape[3]

    @property
    def fill(self) -> Tensor:
        """(batch,) int64, tokens in each row's open chunk."""
        return self.position % self.local_chunk if self.local_chunk else torch.zeros_like(self.position)

    def opened(self) -> tuple[Tensor, Tensor]:
        """Copies of `open_key` and `open_value`."""
        return self.open_key.clone(), self.open_value.clone()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: the same at every position."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, for saving and for walking over them; the device's copy of the positions is left out."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name not in _OPTIONS}

    def advance_(self, tokens: int = 1) -> None:
        """Count so many more tokens in every row, on the host and on the device; nothing waits."""
        self.position += tokens
        if self.device_position is not self.position:
            self.device_position += tokens

    def move_to_(self, position: Tensor | int) -> None:
        """Take these (batch,) positions, or one for all rows, on the host and on the device."""
        self.position.copy_(torch.as_tensor(position))
        if self.device_position is not self.position:
            self.device_position.copy_(self.position)

    def reset_(self) -> None:
        """Back to before the first token, at the same addresses."""
        for tensor in (*self.tensors().values(), self.device_position):
            tensor.zero_()

    def clone(self) -> "LinearAttentionState":
        """A copy to roll back to."""
        return self._map(Tensor.clone)

    def reorder(self, indices: Tensor) -> "LinearAttentionState":
        """The rows `indices` (int64) of the batch, repeated or dropped as they are named: for beam search."""
        return self._map(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def copy_(self, other: "LinearAttentionState") -> "LinearAttentionState":
        """Overwrite with `other`, at the same addresses."""
        for name, tensor in self.tensors().items():
            tensor.copy_(getattr(other, name))
        if self.device_position is not self.position:
            self.device_position.copy_(other.device_position)
        return self

    @property
    def rounds_sums(self) -> bool:
        """Whether the sums are in half precision, of a narrower dtype than the state."""
        return self.sums.dtype in HALF

    def with_sums_in(self, dtype: torch.dtype) -> "LinearAttentionState":
        """This state with a copy of its sums in `dtype`, where that is another; all else is shared."""
        return replace(self, sums=self.sums.to(dtype))

    def on_wide_sums(self, move_on: Callable[["LinearAttentionState"], Result]) -> Result:
        """Move on with sums in the dtype of the state: those in half precision are copied into it, and rounded back.

        Args:
            move_on: moves a state on in place; all its other tensors are those of this one.

        Returns:
            What `move_on` gave.
        """
        if not self.rounds_sums:
            return move_on(self)
        own = self.with_sums_in(self.normalizer.dtype)
        result = move_on(own)
        self.sums.copy_(own.sums)
        if self.device_position is not self.position:
            self.device_position.copy_(own.device_position)
        return result

    def _map(self, function: Callable[[Tensor], Tensor]) -> "LinearAttentionState":
        changed = {name: function(tensor) for name, tensor in self.tensors().items()}
        return LinearAttentionState(**changed, power=self.power, factors=self.factors)

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file, with a sha256 of all that is in it."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.tensors().items()}
        options = {name: str(getattr(self, name)) for name in _OPTIONS}
        require("safetensors.torch").save_file(
            tensors, path, metadata={**options, _DIGEST: state_sha256(tensors, options)}
        )

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str = "cpu") -> "LinearAttentionState":
        """Read what `save` wrote; only tensors and two numbers are read, nothing is unpickled.

        Native programs trust sizes and positions, so all of them are checked, and every byte against the digest. That
        finds damage; it is no signature: whoever can write the file can write any numbers.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is another one, damaged, or holds tensors that do not fit one another.
        """
        tensors, options = _read(Path(path))
        _check_read(tensors, options, path)
        tensors = {name: tensor if name == "position" else tensor.to(device) for name, tensor in tensors.items()}
        return cls(**tensors, power=int(options["power"]), factors=int(options["factors"]))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a saved state, on the CPU, and its options; every byte verified."""
    safetensors = require("safetensors")
    if not path.is_file():
        raise FileNotFoundError(f"expected the file of a state, found none at {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: expected the file of a state, found something else: {error}") from error
    options = {name: metadata.get(name, "") for name in _OPTIONS}
    if metadata.get(_DIGEST) != state_sha256(tensors, options):
        raise ValueError(
            f"{path}: expected a state whose sha256 is {metadata.get(_DIGEST, 'in the file')}, found another: the file "
            "is damaged, or no saved state"
        )
    return tensors, options


def _check_read(tensors: Mapping[str, Tensor], options: Mapping[str, str], path: str | Path) -> None:
    """Refuse what no state is."""
    names = {each.name for each in fields(LinearAttentionState) if each.init and each.name not in _OPTIONS}
    well_formed = tensors.keys() == names and all(options[name] in ("1", "2") for name in _OPTIONS)
    if not well_formed or any(tensors[name].dim() != 4 for name in ("sums", "open_features", "open_key", "open_value")):
        raise ValueError(f"{path}: expected the tensors and options of a state, found others")
    try:
        check_sizes(tensors, int(options["power"]), int(options["factors"]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in ("sums", "position")}
    fits = dtypes in ({torch.float32}, {torch.float64}) and tensors["sums"].dtype in (*dtypes, *HALF)
    if not fits or tensors["position"].dtype != torch.int64:
        raise ValueError(
            f"{path}: expected float32 or float64, sums in that or in half precision, and positions in int64, found"
            " other types"
        )
    position = tensors["position"]
    if bool(((position < 0) | (position > _MOST_TOKENS)).any()):
        raise ValueError(f"{path}: expected positions from 0 to 2**53, found {position.tolist()[:8]}")


def check_sizes(tensors: Mapping[str, Tensor], power: int, factors: int) -> None:
    """Refuse tensors of a state that do not fit one another; native programs read and write as far as these say.

    Raises:
        ValueError: with the name, what was expected and what came.
    """
    batch, heads, _, width = tensors["sums"].shape
    chunk, local_dim = tensors["open_key"].shape[2:]
    features = tensors["open_features"].shape[3]
    expanded = expanded_size(features, power, factors)
    lead = (batch, heads)
    expected = {
        "sums": (*lead, expanded, width),
        "normalizer": (*lead, expanded),
        "log_decay": lead,
        "open_features": (*lead, chunk, features),
        "open_value": (*lead, chunk, width),
        "open_key": (*lead, chunk, local_dim),
        "open_log_decay": (*lead, chunk),
        "position": (batch,),
    }
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"the state does not fit itself: expected {name} of shape {shape}, got {tuple(tensors[name].shape)}"
            )


def state_sha256(tensors: Mapping[str, Tensor], options: Mapping[str, str]) -> str:
    """sha256 of names, types, sizes, numbers and options."""
    digest = hashlib.sha256(repr(sorted(options.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def combine(earlier: LinearAttentionState, later: LinearAttentionState) -> LinearAttentionState:
    """The state of two spans in a row, given the state of each (both started from zeros); associative.

    `earlier` must end on a boundary of a local chunk in every row, for chunks of `later` count from its first token.
    The result shares no memory with either.
    """
    if bool(earlier.fill.any()):
        raise ValueError(
            f"combine needs an earlier span that ends on a chunk boundary (multiples of {earlier.local_chunk} tokens); "
            f"got rows of {earlier.position.tolist()} tokens"
        )
    kinds = [
        (state.power, state.factors, state.feature_dim, tuple(state.sums.shape), state.normalizer.dtype)
        for state in (earlier, later)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "combine needs states of the same power, factors, feature_dim, shape of sums and dtype, got "
            f"{kinds[0]} and {kinds[1]}"
        )
    decay = later.log_decay.exp()
    return replace(
        later.clone(),
        sums=(earlier.sums * decay[..., None, None] + later.sums).to(later.sums.dtype),
        normalizer=earlier.normalizer * decay[..., None] + later.normalizer,
        log_decay=earlier.log_decay + later.log_decay,
        position=earlier.position + later.position,
    )


def adding_dtype(like: Tensor) -> torch.dtype:
    """The dtype in which many sums are added to a sum in the dtype of `like`: float64 where the device has it."""
    return like.dtype if like.device.type == "mps" else torch.float64


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
