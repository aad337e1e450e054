"""Models of random weights of which every layer matters, and what runs their graphs."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from integrations.vllm.lively import lively
from polysketch.models import TransformerLM

KINDS: dict[str, dict[str, Any]] = {
    "polysketch": {"num_layers": 1, "attention_options": {"window": 8, "sketch_size": 4}, "num_kv_heads": 1},
    "polysketch-paper": {"attention": "polysketch-paper", "attention_options": {"local_chunk": 8, "sketch_size": 4}},
    "linear-and-window": {
        "attention": ("linear", "sliding-window"),
        "attention_options": {"sliding-window": {"window": 8}},
        "projection_convolution": 0,
    },
    "gated": {
        "attention": ("polysketch-window", "short-convolution"),
        "attention_options": {
            "polysketch-window": {"window": 8, "sketch_size": 4, "decay_gate": True, "features": "random"}
        },
        "head_gate": True,
        "query_key_norm": True,
        "input_positions": True,
    },
    "local-and-performer": {
        "attention": ("local", "performer"),
        "attention_options": {"local": {"local_chunk": 8}, "performer": {"num_features": 8, "local_chunk": 8}},
    },
    "means": {"attention": ("focused", "polarity")},
    "powers": {"attention": ("based", "symmetric-power"), "attention_options": {"based": {"feature_dim": 4}}},
    "sketches": {"attention": ("hedgehog", "llops"), "attention_options": {"llops": {"num_features": 16}}},
}
"""Changes of `lively`: each kind of state, and each kind of node, is in one of the first four."""


def small(kind: str) -> TransformerLM:
    """The model of a kind, two layers; of the first kind, which is always tested, one."""
    return lively(3, hidden_size=32, head_dim=16, **KINDS[kind])


@dataclass(frozen=True)
class Exported:
    """A model and its graphs.

    Attributes:
        model: the model.
        folder: of the files.
        manifest: what manifest.json would hold.
    """

    model: TransformerLM
    folder: Path
    manifest: dict[str, Any]

    @cached_property
    def sessions(self) -> dict[str, Any]:
        """The graphs in ONNX Runtime."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return {
            name: onnxruntime.InferenceSession(self.folder / file, options, providers=["CPUExecutionProvider"])
            for name, file in self.manifest["graphs"].items()
        }

    def first_state(self) -> dict[str, np.ndarray]:
        """Before the first token, by the names of inputs."""
        return {part["input"]: np.zeros(part["shape"], part["dtype"]) for part in self.manifest["state"]}

    def inputs_of(self, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a graph left, as the next one takes it."""
        return {part["input"]: outputs[part["output"]] for part in self.manifest["state"]}


def run(session: Any, ids: Tensor, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a graph by their names."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"ids": ids.numpy(), **state}), strict=True))


@torch.no_grad()
def expected_logits(model: TransformerLM, ids: Tensor) -> np.ndarray:
    """(length, vocab_size): of every token's successor, by the model itself."""
    return model(ids)[0].numpy()
