"""The line that a command ends with: what to do next, ready to paste."""

import json
import shlex
from pathlib import Path

__all__ = ["next_command", "open_in_transformers"]


def next_command(*words: str | Path) -> str:
    """`next: polysketch ...`, quoted for a shell.

    Args:
        words: of the command line, after `polysketch`.
    """
    return f"next: polysketch {shlex.join(map(str, words))}"


def open_in_transformers(folder: Path) -> str | None:
    """The line that generates with an exported model by transformers alone; None where it does not write text.

    A model of a task of numbers has no tokenizer, and cannot be given a text.
    """
    architectures = json.loads((folder / "config.json").read_bytes()).get("architectures") or [""]
    if not architectures[0].endswith("ForCausalLM") or not (folder / "tokenizer_config.json").is_file():
        return None
    program = (
        "import polysketch.integrations.huggingface; from transformers import pipeline; "
        f'print(pipeline("text-generation", {json.dumps(str(folder))})("The ", max_new_tokens=40)[0]["generated_text"])'
    )
    return f"next: {shlex.join(['python', '-c', program])}"
