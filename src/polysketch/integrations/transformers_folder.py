"""A folder of transformers as a model and a tokenizer: ours, one with its attention replaced, or any other.

What is asked of a folder before a model is read loads neither transformers nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polysketch.data.prepared import read_description
from polysketch.extras import how_to_install
from polysketch.storage import require_free
from polysketch.storage.outside import read_json, read_object, require_file
from polysketch.storage.sums import is_no_weight, require_sums
from polysketch.training.run_folder import find_run

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "is_transformers_folder",
    "load_transformers",
    "new_model",
    "read_model",
    "read_tokenizer",
    "require_model",
    "require_ours",
    "require_unchanged",
]

MODEL_TYPE = "polysketch"
"""What config.json calls a language model of ours."""

ENCODER_TYPE, ENCODER_DECODER_TYPE = f"{MODEL_TYPE}-encoder", f"{MODEL_TYPE}-encoder-decoder"
"""What it calls our encoders, with whatever head, and a model of an encoder and a decoder."""

_NUMBERS_OF_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")

_WITHOUT_CLASS = {
    "pair": "a class for two documents",
    "picture": "a class for a picture in patches",
    "recovered": "to recover rows",
}
"""What is asked of models of ours that transformers has no class for, and what they learn."""


def is_transformers_folder(folder: str | Path) -> bool:
    """Whether the config.json of a folder is one that transformers writes."""
    return "model_type" in _config(Path(folder))


def load_transformers(folder: str | Path, *, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """Read a model, as `read_model` does in the precision it was saved in, and its tokenizer."""
    require_sums(Path(folder))
    tokenizer = _read_tokenizer(folder)
    return _read_model(folder, "auto", device), tokenizer


def read_model(
    folder: str | Path, *, dtype: torch.dtype | Literal["auto"] = "auto", device: torch.device | str = "cpu"
) -> Any:
    """Read a causal language model; nothing is downloaded.

    Args:
        folder: on this machine, as `polysketch export` or `convert`, `save_replaced` or `save_pretrained` write it.
        dtype: of its weights; "auto" is the precision they were saved in.
        device: where to put them.

    Returns:
        The model, in evaluation mode.

    Raises:
        FileNotFoundError: no such folder, or no model in it.
        ValueError, OSError: files that are not those of the folder's SHA256SUMS, where it has one; files that
            transformers cannot read, or weights that do not fit.
        ImportError: the extra `hf` is missing; the message has the pip command.

    Cost: a folder with sums is read once more, about a second for 500 MB.
    """
    require_sums(Path(folder))
    return _read_model(folder, dtype, device)


def _read_model(folder: str | Path, dtype: torch.dtype | Literal["auto"], device: torch.device | str) -> Any:
    from polysketch.integrations.huggingface import quiet, reading  # which make our models known to transformers
    from polysketch.integrations.replacement.bookkeeping import CONFIG_KEY
    from polysketch.integrations.replacement.saving import read_replaced

    require_model(folder)
    with quiet(), reading(folder):
        _require_numbers_of(Path(folder))
        if CONFIG_KEY in _config(Path(folder)):
            return read_replaced(folder, dtype=dtype).to(device).eval()
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    return model.to(device).eval()


def new_model(config: Mapping[str, Any]) -> Any:
    """A causal language model with random weights, drawn from PyTorch's generator.

    Args:
        config: what its config.json would hold, `model_type` among it: "llama".

    Raises:
        ValueError: a model type that transformers does not know.
        ImportError: the extra `hf` is missing; the message has the pip command.
    """
    _require_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def read_tokenizer(folder: str | Path) -> Any:
    """Read the tokenizer of a model's folder; errors as in `read_model`.

    It raises ValueError on a text that takes a regular expression of its file too long. Of a folder with sums the
    tokenizer's files are compared.
    """
    require_sums(Path(folder), is_no_weight)
    return _read_tokenizer(folder)


def _read_tokenizer(folder: str | Path) -> Any:
    from polysketch.integrations.huggingface import quiet, reading
    from polysketch.integrations.tokenizer_bounds import loaded

    require_model(folder)
    with quiet(), reading(folder):
        from transformers import AutoTokenizer

        file = Path(folder) / "tokenizer.json"
        return loaded(
            lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
            file.stat().st_size if file.is_file() else 0,
        )


def require_unchanged(folder: str | Path) -> None:
    """Compare a folder with its SHA256SUMS, where it has one, for a program that does not; see `require_sums`."""
    require_sums(Path(folder))


def tokens_of(text: str, folder: str | Path) -> np.ndarray:
    """(tokens,) int64, by the tokenizer in a model's folder; errors as in `read_model`."""
    import numpy as np

    return np.asarray(read_tokenizer(folder)(text, verbose=False)["input_ids"], dtype=np.int64)


def require_model(folder: str | Path) -> None:
    """Refuse what is no folder of a model, and a missing transformers, which is not loaded for that.

    Raises:
        FileNotFoundError: no such folder, or no model in it.
        ValueError: a pipe or a device in the place of a file, an index that names other files than those of the folder,
            more layers than weights, or a number that PyTorch has not.
        ImportError: the extra `hf` is missing; the message has the pip command.
    """
    folder = Path(folder)
    _require_transformers()
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"expected the folder of a transformers model, found no {folder / 'config.json'}")
    for path in folder.iterdir():
        require_file(path, most=None)
    require_plain_indexes(folder)
    config = _config(folder)
    _require_numbers(config, folder / "config.json")
    _require_layers(config, folder)


def _require_numbers(value: Any, file: Path, name: str = "number") -> None:
    """Refuse whole numbers beyond 64 bits: PyTorch has none, and says so in the middle of a model's work."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            _require_numbers(item, file, name)
    elif isinstance(value, list):
        for item in value:
            _require_numbers(item, file, name)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{file}: expected whole numbers of at most 64 bits, found a larger {name}")


def _require_layers(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse more layers than there are weights: transformers builds all before it compares, for hours."""
    import safetensors  # which transformers brings

    files = [path for path in folder.glob("*.safetensors") if path.is_file()]
    layers = max(_layers_said(config), default=0)
    try:
        tensors = 0
        for path in files:
            with safetensors.safe_open(path, framework="numpy") as file:
                tensors += len(file.keys())
    except (OSError, safetensors.SafetensorError):
        return  # damaged, which reading them tells
    if files and layers > tensors:
        raise ValueError(f"{folder}: expected weights of {layers:,} layers, found {tensors:,} tensors")


def _require_numbers_of(folder: Path) -> None:
    """Refuse a model of more numbers than its files have bits: transformers allocates it before it compares.

    Ours are compared first by transformers, without memory.
    """
    config, held = _config(folder), sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
    if not held or config.get("model_type") == MODEL_TYPE:
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if type(described) not in AutoModelForCausalLM._model_mapping:
        return  # which reading tells
    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    except (RuntimeError, NotImplementedError):
        return  # a model that computes with numbers as it is made
    asked = sum(parameter.numel() for parameter in model.parameters())
    if asked > 8 * held:
        raise ValueError(f"{folder}: expected weights of {asked:,} numbers, found files of {held:,} bytes")


def _layers_said(config: Mapping[str, Any]) -> Iterator[int | float]:
    """Every number of layers in a configuration, and in those inside it."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _layers_said(value)
        elif name in _NUMBERS_OF_LAYERS and isinstance(value, int | float):
            yield value


def require_plain_indexes(folder: Path) -> None:
    """Refuse an index of weights that names files outside the folder, which may come from a stranger.

    Raises:
        ValueError: names the file.
    """
    for path in sorted(folder.glob("*.index.json")):
        try:
            names = set(read_object(path)["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"expected an index of weights in {path}, found something else: {error}") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
                raise ValueError(f"expected plain names of files in {path}, found {name!r}")


def check_export(run: str | Path, folder: str | Path, *, checkpoint: str = "latest") -> None:
    """Refuse an export without a run to export, or without a free folder to write; errors as in `export_run`."""
    _require_transformers()
    require_free(Path(folder))
    learned = _WITHOUT_CLASS.get(find_run(run, checkpoint)[0]["model"].get("asks"))
    if learned is not None:
        raise ValueError(f"{run}: expected a model that transformers has a class for, found one that learned {learned}")


def check_import(folder: str | Path, run: str | Path, *, data: str | Path | None = None) -> None:
    """Refuse an import without a model of ours, without a free folder to write, or with a folder that holds no data;
    errors as in `import_model`."""
    _require_transformers()
    require_free(Path(run))
    require_ours(Path(folder))
    if data is not None:
        read_description(Path(data))


def require_ours(folder: Path) -> None:
    """Refuse what is no folder of a model of ours, before anything of it is loaded.

    Raises:
        FileNotFoundError: no config.json there.
        ValueError: a run, an adapter without its model, or a model of another kind.
    """
    path = folder / "config.json"
    if (folder / "adapter_config.json").exists() and not path.exists():
        raise ValueError(f"{folder} holds an adapter without its model: merge_and_unload() it, then save_pretrained")
    if not path.exists():
        raise FileNotFoundError(f"expected a folder that `polysketch export` wrote, found no config.json in {folder}")
    values = read_object(path)
    if "training" in values and "model_type" not in values:
        raise ValueError(f"{folder} is the folder of a run already: evaluate or generate from it, or export it")
    if values.get("model_type") in (ENCODER_TYPE, ENCODER_DECODER_TYPE):
        raise ValueError(f"expected a language model in {folder}, found a model with an encoder: it cannot be imported")
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"expected a model of type {MODEL_TYPE} in {folder}, found {values.get('model_type')!r}: "
            "models of other kinds, and converted ones, can be read by polysketch generate and by transformers alone"
        )


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise ImportError(how_to_install("transformers"))


def _config(folder: Path) -> dict[str, Any]:
    """What config.json holds, {} where there is none."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = read_json(file)
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}
