"""ONNX Runtime's operator LinearAttention, to be timed beside ours: one thread, no normalization."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

_NEEDED = ("onnx", "onnxruntime")


def installed() -> bool:
    """Whether there is anything to compare with."""
    return all(importlib.util.find_spec(name) is not None for name in _NEEDED)


class OnnxLinearAttention:
    """out_i = sum over j <= i of (q_i . k_j) v_j, of tensors (1, heads, tokens, width) in float32.

    Tensors are laid out once, outside of what is timed: ONNX has heads side by side in a token's row.

    Raises:
        ImportError: onnx or onnxruntime is not installed.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._heads, self._width = query.shape[1], value.shape[3]
        named = {"query": query, "key": key, "value": value}
        self._given = {name: x.detach().transpose(1, 2).flatten(2).numpy() for name, x in named.items()}
        self._session = _session(self._heads)

    def __call__(self) -> Any:
        """The output in ONNX's layout."""
        return self._session.run(["output"], self._given)[0]

    def output(self) -> Tensor:
        """The output, (1, heads, tokens, value_dim)."""
        return torch.from_numpy(self()).unflatten(2, (self._heads, self._width)).transpose(1, 2)


def _session(heads: int) -> Any:
    import onnxruntime
    from onnx import TensorProto, helper

    node = helper.make_node(
        "LinearAttention",
        ["query", "key", "value"],
        ["output", "state"],
        domain="com.microsoft",
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule="linear",
        scale=1.0,
    )
    given, made = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        for names in (["query", "key", "value"], ["output"])
    )
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "attention", given, made), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
