"""`polysketch convert MODEL --attention polysketch --data DIR`: linearise a softmax model, and say what it regained."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from polysketch.cli import exit_status
from polysketch.cli.attention_options import parse_attention_options
from polysketch.cli.next_command import next_command
from polysketch.conversion import ConversionConfig

__all__ = ["ConvertFlags", "run"]


@dataclass(frozen=True, kw_only=True)
class ConvertFlags(ConversionConfig):
    """Give a softmax model of transformers another attention, and train back what that cost.

    The first stage is attention transfer, layer by layer, with the model frozen. The last is fine-tuning on the text.
    Between them may stand distillation (--distillation-steps): the model learns to give the logits that it gave before.
    Perplexity is measured before, after replacement and after each stage. The share of the gap that was regained is
    printed. A conversion may be stopped or killed at any moment: the same command with --resume goes on.

    Examples:
      polysketch prepare books/ --tokenizer path/to/model --out data/books
      polysketch convert path/to/model --data data/books --out runs/converted
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a model of transformers (config.json, *.safetensors, tokenizer files)."""

    attention_options: tuple[str, ...] = ()  # type: ignore[assignment]
    """Options of the mechanism as key=value pairs, for instance sketch_size=32 local_chunk=256. A misspelt one lists
    those that exist."""

    layers: str = "all"  # type: ignore[assignment]
    """Which layers: all, a negative number for the last so many, or indices with commas between."""

    json: bool = False
    """Print the report as one JSON object on the last line."""


def run(flags: ConvertFlags) -> int:
    """Convert as the flags say.

    Returns:
        Exit status: 0 when it is finished or reached --max-minutes; 130 after SIGINT and 143 after SIGTERM, saved.
    """
    from polysketch.conversion.folder import check_requirements

    check_requirements(flags)  # before PyTorch is loaded, and an unknown mechanism too
    config = configuration(flags)
    from polysketch.conversion import convert

    result = convert(config)
    if result.stopped_by == "finished":
        from polysketch.conversion import report_table  # loads transformers

        print(report_table(result.report))
        model = result.folder / "model"
        print(f"the converted model is in {model}")
        print(next_command("evaluate", model, "--data", config.data, "--context", str(config.context)))
    else:
        print(
            f"stopped after step {result.step} of {flags.steps} and saved in {result.folder}; the same command with "
            "--resume goes on",
            file=sys.stderr,
        )
    if flags.json:
        print(json.dumps(result.report))
    return exit_status.of_result(result)


def configuration(flags: ConvertFlags) -> ConversionConfig:
    """The flags with the mechanism's options typed and the layers parsed.

    Raises:
        ValueError: an unknown mechanism or option (the message lists those that exist), or no list of layers.
    """
    layers = parse_layers(flags.layers)
    from polysketch.attention import mechanism_class

    names = [field.name for field in dataclasses.fields(ConversionConfig)]
    values: dict[str, Any] = {name: getattr(flags, name) for name in names}
    mechanism = mechanism_class(flags.attention)
    values["attention_options"] = parse_attention_options(flags.attention_options, mechanism, flags.attention)
    return ConversionConfig(**{**values, "layers": layers})


def parse_layers(text: str) -> Any:
    """`all`, a negative number, or indices with commas between.

    Raises:
        ValueError: anything else.
    """
    if text == "all":
        return text
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--layers: expected all, -4 or 0,1,2, found {text!r}") from error
    return numbers[0] if len(numbers) == 1 and numbers[0] < 0 else numbers
