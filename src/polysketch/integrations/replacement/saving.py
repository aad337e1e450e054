"""Folders that hold a replaced model: transformers' own files, the mechanisms' weights among them."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from polysketch.integrations.replacement.bookkeeping import CONFIG_KEY, SUBMODULE, Replacement
from polysketch.integrations.replacement.locating import plain_model, replaced_layers
from polysketch.integrations.replacement.replace import install
from polysketch.models.former import check_format, mechanism_of_format
from polysketch.storage.outside import read_object
from polysketch.storage.sums import SUMS, require_sums

VARIANT = "polysketch"
"""In the names of the files of weights, model.polysketch.safetensors: under the usual name, transformers would load
them into a model with its own attention, leave the mechanisms' weights out, and say so in a warning alone."""


_USUAL = ("model*.safetensors", "pytorch_model*.bin")
"""Files that transformers loads without a variant."""

_GROUP_KEYS = {"layers", "name", "options", "sliding_window", "dropout"}
_LATER_KEYS = {"position_bias", "softcap"}  # which earlier versions did not write


def save_replaced(model: Any, folder: str | Path) -> None:
    """Write a replaced model as a folder for `load_replaced`.

    It is what `save_pretrained` writes, so that AutoConfig and AutoTokenizer read it (save the tokenizer there too),
    with what was replaced in config.json. The files of weights carry "polysketch" in their names, so that
    `AutoModelForCausalLM.from_pretrained(folder)` finds none and fails, rather than to compute softmax attention.

    Args:
        model: after `replace_attention`, at least one layer of it.
        folder: is made if need be; a SHA256SUMS in it is deleted.

    Raises:
        TypeError: not a transformers model.
        ValueError: nothing was replaced in it, or adapters of PEFT are not merged into its weights.
        FileExistsError: the folder holds weights under the usual name, which transformers would go on to load.
    """
    plain = plain_model(model)
    if plain is not model or any(name.endswith(".base_layer") for name, _ in plain.named_modules()):
        raise ValueError(
            "expected a model without adapters, found those of PEFT beside its weights: merge them first,"
            " model = model.merge_and_unload()"
        )
    if not replaced_layers(plain):
        raise ValueError("no attention was replaced in this model: call replace_attention first, or save_pretrained")
    _require_no_other_weights(Path(folder))
    plain.save_pretrained(folder, variant=VARIANT)
    (Path(folder) / SUMS).unlink(missing_ok=True)  # of files that are gone


def _require_no_other_weights(folder: Path) -> None:
    files = (file for pattern in _USUAL for file in sorted(folder.glob(pattern)))
    other = next((file for file in files if f".{VARIANT}." not in file.name), None)
    if other is not None:
        raise FileExistsError(
            f"expected a folder without other weights, found {other}: transformers would load these, with softmax "
            "attention. Choose another folder"
        )


def load_replaced(folder: str | Path, **options: Any) -> Any:
    """Read a model that `save_replaced` wrote, or `save_pretrained` after `replace_attention`; it computes bit for bit
    what the saved one did.

    Args:
        folder: on this machine.
        **options: for `from_pretrained` of the model's class, dtype for instance.

    Returns:
        The model with its attention replaced, in evaluation mode.

    Raises:
        FileNotFoundError: no such folder, or no model in it.
        ValueError: a model whose attention was not replaced, files that are not those of the folder's SHA256SUMS, where
            it has one, or weights that do not fit what was replaced.
    """
    require_sums(Path(folder))
    return read_replaced(folder, **options)


def read_replaced(folder: str | Path, **options: Any) -> Any:
    """As `load_replaced`, of a folder whose sums were compared."""
    folder = Path(folder)
    groups = _description(folder)
    variant = VARIANT if any(folder.glob(f"model*.{VARIANT}.*")) else None
    with _silent():
        loaded: Any = _class_of(folder).from_pretrained(
            folder,
            variant=variant,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **options,
        )
    model, info = loaded
    for group in groups:
        given = {name: value for name, value in group.items() if name != "layers"}
        install(model, Replacement(**given), layers=group["layers"])
    prefixes = _prefixes(model)
    _check_loaded(folder, info, prefixes)
    _load_mechanisms(model, folder, variant, prefixes)
    return model.eval()


def _class_of(folder: Path) -> Any:
    """What loads the model: transformers' own class of an encoder, by the name in config.json; else a language model's.

    Raises:
        ValueError: config.json names a class that transformers does not have.
    """
    names = read_object(folder / "config.json").get("architectures") or ["ForCausalLM"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ValueError(f"{folder / 'config.json'}: expected the names of classes as architectures, found {names!r}")
    if names[0].endswith(("ForCausalLM", "LMHeadModel")):
        return transformers.AutoModelForCausalLM
    found = getattr(transformers, str(names[0]), None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(f"{folder / 'config.json'} names the model {names[0]!r}, which transformers does not have")
    return found


def _description(folder: Path) -> list[dict[str, Any]]:
    """What was replaced, from the folder's config.json."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: expected a folder that save_replaced wrote")
    found = read_object(file).get(CONFIG_KEY)
    if not found:
        raise ValueError(
            f"{file} does not say that attention was replaced (no {CONFIG_KEY!r}): load it with AutoModelForCausalLM"
        )
    groups = found.get("replaced", []) if isinstance(found, dict) else []
    if not groups or not all(isinstance(group, dict) and group.keys() - _LATER_KEYS == _GROUP_KEYS for group in groups):
        raise ValueError(
            f"{CONFIG_KEY!r} in {file} must hold 'replaced', a list of groups of layers with "
            f"{', '.join(sorted(_GROUP_KEYS))}, got {found}; it was written by version {_version(found)} of polysketch"
        )
    written = found.get("format", 1)
    check_format(written, f"{CONFIG_KEY!r} in {file}")
    return [_of_today(written, group) for group in groups]


def _of_today(written: int, group: dict[str, Any]) -> dict[str, Any]:
    name, options = mechanism_of_format(written, group["name"], group["options"])
    return {**group, "name": name, "options": options}


def _version(found: Any) -> str:
    return str(found.get("version", "?")) if isinstance(found, dict) else "?"


@contextmanager
def _silent() -> Iterator[None]:
    """Without transformers' warning that weights are left over: they are the mechanisms', and loaded next."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _prefixes(model: nn.Module) -> tuple[str, ...]:
    """What the names of the mechanisms' weights begin with."""
    layers = {id(layer) for layer in replaced_layers(model).values()}
    return tuple(f"{name}.{SUBMODULE}." for name, module in model.named_modules() if id(module) in layers)


def _check_loaded(folder: Path, info: Mapping[str, Any], prefixes: tuple[str, ...]) -> None:
    """Refuse weights that are missing, of another shape, or left over though they are not a mechanism's."""
    left_over = [name for name in info["unexpected_keys"] if not name.startswith(prefixes)]
    wrong = [*info["missing_keys"], *info["mismatched_keys"], *left_over]
    if wrong:
        raise ValueError(
            f"the weights in {folder} do not fit the model of its config.json: {', '.join(map(str, wrong))}"
        )


def _load_mechanisms(model: nn.Module, folder: Path, variant: str | None, prefixes: tuple[str, ...]) -> None:
    """Fill the mechanisms' weights and buffers, every one of them and no others."""
    weights = _of_mechanisms(_weights(folder, variant), prefixes)
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefixes)}
    shapes = {name: tensor.shape for name, tensor in own.items()}
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        odd = sorted(name for name in own.keys() ^ weights.keys()) or "of other shapes"
        raise ValueError(f"the weights in {folder} do not fit the mechanisms of its config.json: {odd}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _of_mechanisms(weights: Mapping[str, Tensor], prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The mechanisms' weights by the names of today.

    transformers writes some architectures under the names that they once had. The order of the layers is the same.
    """
    inside = f".{SUBMODULE}."
    parts = {name: name.partition(inside) for name in weights if inside in name}
    saved = sorted({before for before, _, _ in parts.values()}, key=lambda name: [*map(int, re.findall(r"\d+", name))])
    if len(saved) != len(prefixes) or {f"{before}{inside}" for before in saved} == set(prefixes):
        return {name: weights[name] for name in parts}
    today = dict(zip(saved, prefixes, strict=True))
    return {f"{today[before]}{rest}": weights[name] for name, (before, _, rest) in parts.items()}


def _weights(folder: Path, variant: str | None) -> dict[str, Tensor]:
    files = sorted(folder.glob(f"model*.{variant}.safetensors" if variant else "model*.safetensors"))
    if variant:
        files += sorted(folder.glob(f"model.{variant}-*.safetensors"))
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= load_file(file)
    return weights
