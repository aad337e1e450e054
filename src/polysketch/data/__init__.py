"""Data: tokenizers, text turned into memory-mapped tokens, the order of training windows, synthetic tasks."""

from typing import TYPE_CHECKING

from polysketch.data.corpus import ReadOptions
from polysketch.data.description import DataDescription, SplitDescription, TokenizerDescription
from polysketch.data.preparation import prepare
from polysketch.data.prepared import PreparedData, Split
from polysketch.data.tokenization import (
    TOKENIZERS,
    TokenizerLike,
    load_tokenizer,
    require_same_tokenizer,
)
from polysketch.lazy import on_demand

if TYPE_CHECKING:
    from polysketch.data.windows import TrainingWindows
else:
    __getattr__, __dir__ = on_demand(__name__, {"windows": ["TrainingWindows"]})  # tensors: preparing needs no torch

__all__ = [
    "TOKENIZERS",
    "DataDescription",
    "PreparedData",
    "ReadOptions",
    "Split",
    "SplitDescription",
    "TokenizerDescription",
    "TokenizerLike",
    "TrainingWindows",
    "load_tokenizer",
    "prepare",
    "require_same_tokenizer",
]
