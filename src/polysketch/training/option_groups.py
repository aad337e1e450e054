"""Options of a training run, by what they are about. Each field is a flag of `polysketch train`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polysketch.training.options import OnResume, option


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """What is read, and what is learned from it."""

    objective: Literal["auto", "masked"] = option("auto", on_resume=OnResume.REFUSED)
    """What is learned. auto: to continue text, or to answer what a task asks. masked: an encoder finds tokens that are
    hidden, in windows of the text, or in the inputs of a task; --init-from gives it to a task afterwards."""

    mask_share: float = option(0.15, on_resume=OnResume.REFUSED, positive=True)
    """Share of the tokens that --objective masked asks for. Of these 80 % are hidden, 10 % become others, 10 % stay."""

    tokenizer: str | None = option(None, on_resume=OnResume.FREE)
    """What made the ids of token files that others made: bytes, a tokenizer.json, GPT-2's encoder.json, a sentencepiece
    .model, or the folder of a model."""

    vocab_size: int | None = option(None, on_resume=OnResume.FREE, least=2)
    """Number of ids in such files, in place of a tokenizer. The model then knows ids alone, and no text."""

    end_of_text: str | None = option(None, on_resume=OnResume.FREE)
    """Token that ends a document in such files; beside --vocab-size its id. Default: the tokenizer's own; beside
    --vocab-size none, and documents are what Megatron-LM's index says, or whole files."""

    pack: Literal["auto", "documents", "windows"] = option("auto", on_resume=OnResume.REFUSED)
    """What a row of the batch holds. documents: documents side by side, none of which sees another; a longer one than
    the context is cut. windows: a stretch of the text, with what stood before a document in view. auto: documents; with
    --compile windows; with --resume what the run was begun with, which is windows where it is older than this
    option."""

    carry_state: bool = option(False, on_resume=OnResume.REFUSED)
    """Long documents go on from step to step: the state after a row is where the next row of the document begins, and
    no gradient passes through it (truncated backpropagation through time). Each row of the batch is a lane in which
    documents follow one another. For mechanisms with a state of constant size; not for softmax."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model."""

    preset: str = option("tiny", on_resume=OnResume.REFUSED)
    """Size of the model: tiny (about 1 million parameters), mini (about 10 million), gpt2-small, gpt2-medium,
    gpt2-large; based-tiny and based-360m interleave linear attention, short windows and short convolutions."""

    layers: int | None = option(None, on_resume=OnResume.REFUSED, least=1)
    """Number of layers, if other than the preset's."""

    attention: str | tuple[str, ...] | None = option(None, on_resume=OnResume.REFUSED)
    """Attention mechanism: polysketch, softmax, polynomial or another; an unknown name lists those that exist. A tuple
    is a pattern, repeated over the layers. Default: the preset's own, else polysketch."""

    attention_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = option(
        default_factory=dict, on_resume=OnResume.REFUSED
    )
    """Options of the mechanism, for instance {"sketch_size": 24, "window": 256}; with a pattern, the options of
    each mechanism under its name. Without `attention` they change the preset's own."""

    attention_every: int | None = option(None, on_resume=OnResume.REFUSED, least=1)
    """The mechanism in every such layer, counted from the last: 4 is the last of each four. The others are softmax over
    a window (as many tokens as the mechanism's window, else 256). Default: 1 beside `attention`, else the preset's own,
    2 in most."""

    projection_convolution: int | None = option(None, on_resume=OnResume.REFUSED, least=0)
    """Number of taps of a short causal convolution of queries, keys and values, 4 for instance; 0: none. For every
    mechanism. Default: the preset's own, 4 in most."""

    query_key_norm: bool | None = option(None, on_resume=OnResume.REFUSED)
    """Norm the queries and keys of every head (root mean square), whatever the mechanism. Default: the preset's own,
    true in most."""

    head_gate: bool | None = option(None, on_resume=OnResume.REFUSED)
    """Gate the output of every head by a sigmoid of the layer's input, whatever the mechanism. Default: the preset's
    own, true in most."""

    input_positions: bool | None = option(None, on_resume=OnResume.REFUSED)
    """Add sinusoidal positions to the embedded tokens. Default: the preset's own, true in the
    papers' models alone. Rotary positions of the heads are not meant."""

    rotary: bool | None = option(None, on_resume=OnResume.REFUSED)
    """Rotary positions in the heads of every layer. Default: the preset's own, true in most; for layers that
    --attention puts in their place, true."""

    init_from: Path | None = option(None, on_resume=OnResume.FREE)  # matters before the first step alone
    """Run folder whose latest weights to start from (the weights only; step, data and learning rate start anew). For a
    task, a run of a task or of --objective masked: an encoder gives its body to an encoder that asks something else."""

    init_new: tuple[str, ...] = option((), on_resume=OnResume.FREE)  # likewise
    """With --init-from: parts of the model that the other run lacks and that begin anew, by a word of their weights'
    names; feature_map where attention=polynomial is to be gone on with by attention=polysketch-paper. Learned gains of
    a prefix are then calibrated."""


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """Steps and the learning rate."""

    steps: int = option(1000, on_resume=OnResume.EXTENDING, least=1)
    """Number of optimizer steps of the whole run."""

    warmup: int | None = option(None, on_resume=OnResume.EXTENDING, least=0)
    """Number of steps over which the learning rate rises to its peak. Default: a tenth of the steps."""

    learning_rate: float = option(2e-3, on_resume=OnResume.REFUSED, positive=True)
    """Peak learning rate. Small models stand 1e-3 to 3e-3; for gpt2-small the papers use 7e-4."""

    schedule: Literal["linear", "cosine", "wsd"] = option("linear", on_resume=OnResume.REFUSED)
    """The learning rate after the warm-up. linear: straight down towards zero. cosine: down along half a cosine to a
    tenth of the peak. wsd: at the peak, then straight down towards zero over the last fifth of the steps."""

    optimizer: Literal["adamw", "muon"] = option("adamw", on_resume=OnResume.REFUSED)
    """What turns gradients into steps. muon: Muon for the matrices of the hidden layers and AdamW for all else, at one
    learning rate and weight decay; find the rate anew for each."""

    betas: tuple[float, float] = option((0.9, 0.95), on_resume=OnResume.REFUSED)
    """Decay rates of AdamW's running mean of the gradient and of its square."""

    weight_decay: float = option(0.1, on_resume=OnResume.REFUSED, least=0.0)
    """Decoupled weight decay of parameters of two axes or more; biases and gains with one axis have none."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Processes, threads and memory."""

    mesh: str | None = option(None, on_resume=OnResume.FREE)  # of what processes do share, a run says more itself
    """What several processes, started by torchrun, share: replicate=2,shard=4 are 2 copies of the model, each shared
    out over 4 processes, which have rows of their own. With context=2 beside it, 2 neighbouring processes share every
    row, and each copy is shared out over 8. The product is the number of processes. Default: all share one model."""

    threads: int | None = option(None, on_resume=OnResume.ROUNDING, least=1)
    """Number of CPU threads. Default: PyTorch's choice. Another number changes the rounding on a CPU."""

    activation_checkpointing: bool = option(False, on_resume=OnResume.ROUNDING)
    """Keep only each layer's input for the backward pass and recompute the rest: less memory, about a third slower."""

    compile: bool = option(False, on_resume=OnResume.REFUSED)
    """Compile the model with torch.compile: minutes at the start, then faster steps on a GPU."""
