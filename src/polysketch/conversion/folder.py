"""The folder of a conversion: where things are, and whether it may be gone on with."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polysketch.conversion.config import ConversionConfig
from polysketch.data.prepared import read_description, split_in
from polysketch.data.tokenization.loading import FILES_OF_FOLDERS
from polysketch.integrations.transformers_folder import require_model
from polysketch.models.former import FORMAT, attention_of_format, check_format
from polysketch.storage import disk
from polysketch.storage.outside import read_object
from polysketch.storage.sealed import sealed, unsealed
from polysketch.training.checkpoint import list_checkpoints
from polysketch.training.options import as_json, check_changes, identity_of
from polysketch.training.run_folder import IDENTITY, LoopFolder

_BLOCK = 2**22


@dataclass(frozen=True)
class ConversionFolder(LoopFolder):
    """The places in the folder of a conversion."""

    @property
    def model(self) -> Path:
        """The converted model: a folder for `load_replaced`."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """report.json: what was measured before, between and after the stages."""
        return self.path / "report.json"

    @property
    def report_plot(self) -> Path:
        """report.png: the loss by position, before, between and after."""
        return self.path / "report.png"

    def read_config(self) -> dict[str, Any]:
        """Read config.json.

        Raises:
            ValueError: it is not a conversion's.
        """
        try:
            config = unsealed(read_object(self.config), str(self.config))
            options, sources = dict(config["conversion"]), dict(config["sources"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.config}: expected the configuration of a conversion, found something else: is it the folder of "
                "a training run? Give another --out"
            ) from error
        check_format(config.get("format", 1), str(self.config))
        return {
            "conversion": attention_of_format(config.get("format", 1), options),
            "sources": sources,
        }


def check_requirements(config: ConversionConfig) -> None:
    """Refuse what no conversion can start with: its data, its model or its folder. Loads no PyTorch.

    Raises:
        FileNotFoundError: one of them is missing.
        ImportError: the extra `hf` is.
        ValueError: one of them is damaged, too short, in use for something else, or holds a conversion already.
    """
    data = read_description(config.data)
    for split in ("train", "validation"):
        found = split_in(config.data, data, split).tokens
        if found < config.context + 1:
            raise ValueError(
                f"--context {config.context}: expected at least {config.context + 1} tokens in the {split} split of "
                f"{config.data}, found {found}: choose a shorter context or prepare more text"
            )
    require_model(config.model)
    if config.tokenizer is not None and not has_tokenizer(config.tokenizer):
        raise ValueError(
            f"--tokenizer: expected a folder with one of {', '.join(FILES_OF_FOLDERS)}, found none in "
            f"{config.tokenizer}"
        )
    _require_claimable(ConversionFolder(config.out), config)


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a file of a tokenizer as transformers has them."""
    return any((folder / name).is_file() for name in FILES_OF_FOLDERS)


def _require_claimable(folder: ConversionFolder, config: ConversionConfig) -> None:
    """Before there is a checkpoint there is nothing to lose: another attempt may take the folder."""
    if not folder.has_run():
        folder.require_free()
        return
    folder.read_config()
    if list_checkpoints(folder.checkpoints) and not config.resume:
        raise ValueError(f"{folder.path} already holds a conversion: give --resume to go on with it, or another --out")


def claim(folder: ConversionFolder, config: ConversionConfig, say: Callable[[str], None]) -> None:
    """Write config.json, or check that the conversion in the locked folder is this one.

    Raises:
        ValueError: the folder holds other files, or a conversion and `resume` was not asked for, or an option or a
            source changed that the result depends on.
    """
    new = {"conversion": as_json(config), "sources": _sources(config)}
    _require_claimable(folder, config)
    if not list_checkpoints(folder.checkpoints):
        identity = identity_of(new["conversion"], ConversionConfig, new["sources"])
        folder.write_config({"format": FORMAT, IDENTITY: identity, **new})
        return
    old = folder.read_config()
    for note in check_changes(ConversionConfig, old["conversion"], new["conversion"]):
        say(f"note: {note}")
    for name, digest in new["sources"].items():
        if old["sources"].get(name) != digest:
            raise ValueError(
                f"--{name}: expected what the conversion was started with, found other content: it was altered, or is "
                "another folder; start a new conversion"
            )


def _sources(config: ConversionConfig) -> dict[str, str]:
    """sha256 sums of the model's configuration and weights, and of the data's description, which holds those of its
    tokens."""
    weights = sorted(config.model.glob("*.safetensors"))
    if not (config.model / "config.json").is_file() or not weights:
        raise FileNotFoundError(
            f"expected the folder of a transformers model, with config.json and *.safetensors, found none in "
            f"{config.model}: save the model there with save_pretrained first"
        )
    return {
        "model": _digest([config.model / "config.json", *weights]),
        "data": _digest([config.data / "description.json"]),
    }


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def write_report(folder: ConversionFolder, report: dict[str, Any]) -> None:
    """Write report.json atomically, with a sha256 of itself."""
    disk.replace_file(folder.report, json.dumps(sealed(report), indent=2).encode() + b"\n")
