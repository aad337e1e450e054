"""What the benchmarks time: dataclasses whose fields are flags of the command line, apart from torch and what times."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from polysketch.attention import MECHANISMS, mechanisms_that
from polysketch.benchmarking.way_names import (
    ALL,
    ALONE,
    GIVEN,
    Sizes,
    attentions,
    check_names,
    mechanism_of,
    with_baseline,
)
from polysketch.models.presets import preset_fields

if TYPE_CHECKING:
    from polysketch.benchmarking.floors import Shape


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the settings of every benchmark have."""

    def check_names(self) -> None:
        """Refuse what does not exist: names first, and then options, which PyTorch is loaded for.

        Raises:
            ValueError: an unknown name or option; the message lists those that exist.
        """


_LARGEST_LOCAL = 2**20


@dataclass(frozen=True, kw_only=True)
class _SketchSettings(Settings):
    """What the settings of attention and of whole models have in common."""

    batch: int = 1
    """sequences at once"""
    sketch_size: int = 32
    """number of features"""
    local: int = 256
    """tokens of a chunk with exact weights; in decoding so many are generated in a round"""

    def __post_init__(self) -> None:
        check_positive(batch=self.batch, sketch_size=self.sketch_size, local=self.local)
        if self.local > _LARGEST_LOCAL:
            raise ValueError(f"local: expected at most {_LARGEST_LOCAL:,} tokens, found {self.local:,}")

    @property
    def sizes(self) -> Sizes:
        """Of learned and random."""
        return Sizes(self.sketch_size, self.local)


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(_SketchSettings):
    """What is timed: attention of random queries, keys and values."""

    lengths: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
    """tokens"""
    mechanisms: tuple[str, ...] = (GIVEN, "learned", "random")
    """what to compare with scaled_dot_product_attention: given (features given, the op alone), learned, random (whole
    mechanisms with a learned or a random sketch of that size), all, or mechanisms: name, each with its default options,
    or name:option=value,option=value; bidirectional, and marked so, where they cannot be causal"""
    heads: int = 12
    """of queries, keys and values"""
    head_dim: int = 64
    """width of a head"""
    backend: str = "auto"
    """of the op with features given: auto, chunked, native or reference; whole mechanisms choose their own"""
    budget_seconds: float | None = None
    """end a series before the length at which a call would take longer than this, by its growth so far"""
    bidirectional: bool = False
    """all tokens see one another, as in an encoder; else attention is causal"""
    backward: bool = False
    """time the gradients of all inputs and weights too"""
    memory: bool = False
    """measure peak memory beyond inputs and outputs too; on a CPU every case runs again in a process of its own"""

    def __post_init__(self) -> None:
        check_positive(lengths=self.lengths, heads=self.heads, head_dim=self.head_dim)
        super().__post_init__()
        _check_budget(self.budget_seconds)

    def check_names(self) -> None:
        """As every settings' do."""
        check_names(self.mechanisms, ALL, *ALONE)
        for name in set(self.names) - set(ALONE):
            mechanism, _ = mechanism_of(name, self.sizes)
            if self.bidirectional and not MECHANISMS[mechanism].is_bidirectional:
                both = ", ".join(mechanisms_that("is_bidirectional"))
                raise ValueError(f"--bidirectional: {mechanism} is causal only; mechanisms that see both sides: {both}")

    @property
    def names(self) -> list[str]:
        """What is timed, as `ways.way` knows it, the baseline first; of all mechanisms those that can."""
        able = mechanisms_that("is_bidirectional") if self.bidirectional else list(MECHANISMS)
        given = [one for name in self.mechanisms for one in (able if name == ALL else [name])]
        return with_baseline(given)

    @property
    def direction(self) -> str:
        """In tables and plots."""
        sides = "bidirectional " if self.bidirectional else ""
        return f"{sides}forward+backward" if self.backward else f"{sides}forward"

    @property
    def sizes(self) -> Sizes:
        """What is not the shape."""
        return Sizes(self.sketch_size, self.local, self.backend)

    def shape(self, length: int) -> "Shape":
        """The shape at a length."""
        from polysketch.benchmarking.floors import Shape

        return Shape(self.batch, length, self.heads, self.head_dim, not self.bidirectional)


@dataclass(frozen=True, kw_only=True)
class HyperSettings(Settings):
    """What is timed: HyperAttention of random queries, keys and values, by default at its paper's sizes."""

    lengths: tuple[int, ...] = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
    """tokens"""
    heads: int = 12
    """of queries, keys and values"""
    head_dim: int = 64
    """width of a head"""
    batch: int = 1
    """sequences at once"""
    chunk_size: int = 256
    """keys near a query, which it attends to exactly; for each span of a causal call"""
    sample_size: int = 256
    """keys that stand for the others; for each span of a causal call"""
    min_length: int = 4_096
    """up to how many tokens attention is exact"""
    budget_seconds: float | None = None
    """end a series before the length at which a call would take longer than this, by its growth so far"""
    backward: bool = False
    """time forward and backward together too"""
    memory: bool = False
    """measure peak memory beyond inputs and outputs too; on a CPU every case runs again in a process of its own"""

    def __post_init__(self) -> None:
        check_positive(lengths=self.lengths, heads=self.heads, head_dim=self.head_dim, batch=self.batch)
        check_positive(**self.options)
        _check_budget(self.budget_seconds)

    @property
    def options(self) -> dict[str, int]:
        """Of the mechanism `hyper`."""
        return {"chunk_size": self.chunk_size, "sample_size": self.sample_size, "min_length": self.min_length}

    @property
    def way(self) -> str:
        """As `ways.way` knows it."""
        return "hyper:" + ",".join(f"{name}={size}" for name, size in self.options.items())

    def shape(self, length: int, causal: bool) -> "Shape":
        """The shape at a length."""
        from polysketch.benchmarking.floors import Shape

        return Shape(self.batch, length, self.heads, self.head_dim, causal)


@dataclass(frozen=True, kw_only=True)
class _ModelSettings(_SketchSettings):
    """What the settings of whole models have in common."""

    preset: str = "mini"
    """size of the model: tiny, mini, gpt2-small, ..."""
    models: tuple[str, ...] = ("learned",)
    """attention to compare with softmax: learned, random (polysketch with a learned or a random sketch of that size),
    or a causal mechanism: name, or name:option=value,option=value; name/4 is in every fourth layer, windows between"""

    def check_names(self) -> None:
        """As every settings' do."""
        preset_fields(self.preset)
        check_names(attentions(self.models))
        for name in attentions(self.models):
            mechanism_of(name, self.sizes)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(_ModelSettings):
    """What is timed: whole training steps on random tokens."""

    models: tuple[str, ...] = ("learned", "random")
    """attention to compare with softmax: learned, random (polysketch with a learned or a random sketch of that size),
    or a mechanism: name, or name:option=value,option=value; name/4 is in every fourth layer, windows between"""
    layers: int | None = None
    """layers of the model. Default: the preset's"""
    contexts: tuple[int, ...] = (8_192, 16_384)
    """tokens of a training window"""
    memory: bool = False
    """measure peak memory too: on a CPU that of a process of its own that makes one step"""

    def __post_init__(self) -> None:
        check_positive(contexts=self.contexts, layers=1 if self.layers is None else self.layers)
        super().__post_init__()

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of the model's configuration beside the preset's."""
        return {} if self.layers is None else {"num_layers": self.layers}


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(_ModelSettings):
    """What is timed: generating one token after the other."""

    positions: tuple[int, ...] = (8_192, 32_768)
    """tokens before the first timed one, rounded down to a whole chunk"""
    state_dtype: Literal["float16", "bfloat16"] | None = None
    """dtype of states; default: as models have it"""

    def __post_init__(self) -> None:
        check_positive(positions=self.positions)
        super().__post_init__()

    def start(self, position: int) -> int:
        """The chunk boundary at or before a position."""
        return position - position % self.local


@dataclass(frozen=True, kw_only=True)
class PicturesSettings(_ModelSettings):
    """What is timed: a vision transformer forward, on random pictures."""

    preset: str = "mini"
    """size of the model: tiny, mini, gpt2-small, ..."""
    models: tuple[str, ...] = ("learned", "linear", "focused")
    """attention to compare with softmax: learned, random (polysketch-paper with a learned or a random sketch of that
    size), or a mechanism that sees both sides: name, or name:option=value,option=value"""
    image_sizes: tuple[int, ...] = (256,)
    """pixels of a side of a square picture of three colours"""
    patch: int = 4
    """pixels of a side of a patch: 4 in 256 are 4,096 patches"""

    def __post_init__(self) -> None:
        check_positive(image_sizes=self.image_sizes, patch=self.patch)
        super().__post_init__()
        for size in self.image_sizes:
            if size % self.patch:
                raise ValueError(f"expected patches that divide {size} x {size} pixels, found --patch {self.patch}")

    def check_names(self) -> None:
        """As every settings' do."""
        super().check_names()
        for name in self.models:
            mechanism, _ = mechanism_of(name, self.sizes)
            if not MECHANISMS[mechanism].is_bidirectional:
                both = ", ".join(mechanisms_that("is_bidirectional"))
                raise ValueError(
                    f"{mechanism} is causal only, and a patch sees the whole picture; expected one of {both}"
                )


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings):
    """What is measured: a server under load."""

    preset: str = "tiny"
    """size of the model, whose weights are random: tiny, mini, gpt2-small, ..."""
    mechanisms: tuple[str, ...] = ("polysketch", "softmax")
    """attention of the models that are served, one after the other: name, or name:option=value,option=value"""
    users: tuple[int, ...] = (1, 4, 16, 64, 256)
    """how many ask at the same time"""
    prompt_lengths: tuple[int, ...] = (128, 2_048, 16_384)
    """tokens"""
    new_tokens: int = 32
    """tokens of an answer"""
    requests: int = 2
    """of each user, one after the other"""
    beside: int = 64
    """users whose time between tokens is measured while the longest prompt is read"""
    memory: int = 8_192
    """megabytes: a cell is left out where the states alone would take more"""
    chunk: int | None = None
    """--chunk of the server; default: the server's own"""
    url: str | None = None
    """measure this server instead, by OpenAI's interface: http://HOST:PORT. Of its memory nothing is known"""
    token: str | None = None
    """that it wants"""

    def __post_init__(self) -> None:
        check_positive(users=self.users, prompt_lengths=self.prompt_lengths, new_tokens=self.new_tokens)
        check_positive(requests=self.requests, beside=self.beside, memory=self.memory)
        if min(self.prompt_lengths) < _SHORTEST_PROMPT:
            raise ValueError(
                f"expected prompts of at least {_SHORTEST_PROMPT} tokens, found {min(self.prompt_lengths)}"
            )

    @property
    def longest(self) -> int:
        """The longest prompt."""
        return max(self.prompt_lengths)

    @property
    def num_steps(self) -> int:
        """Lines of progress, at most: a server for each number of users, its cells, prompts read, users beside one."""
        servers = len(self.users) if self.url is None else 0
        lengths = len(self.prompt_lengths)
        of_a_server = servers + len(self.users) * lengths + lengths + 1
        return of_a_server * (len(self.mechanisms) if self.url is None else 1)

    def check_names(self) -> None:
        """As every settings' do."""
        preset_fields(self.preset)
        check_names(attentions(self.mechanisms))
        for name in attentions(self.mechanisms):
            mechanism_of(name, Sizes())


_SHORTEST_PROMPT = 8


def _check_budget(seconds: float | None) -> None:
    if seconds is not None and not seconds > 0:
        raise ValueError(f"expected a budget of more than 0 seconds, found {seconds}")


def check_positive(**counts: int | Sequence[int]) -> None:
    """Refuse counts below one, and empty rows of them.

    Raises:
        ValueError: naming the one that does not fit.
    """
    for name, value in counts.items():
        numbers = [value] if isinstance(value, int) else list(value)
        if not numbers or min(numbers) < 1:
            raise ValueError(f"expected {name} of at least 1, found {value if numbers else 'none'}")
