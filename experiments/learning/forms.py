"""The forms that are compared: mechanisms with their options, by the names of tables and plots."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Form:
    """One form.

    Attributes:
        name: what `--only` takes, and the name of its files.
        label: what tables and plots say.
        attention: name of the mechanism, or a pattern over the layers.
        options: of the mechanism; a pattern's by mechanism. The option that is `None` here takes the window.
    """

    name: str
    label: str
    attention: str | tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def attention_options(self, window: int) -> dict[str, Any]:
        """The options with the window filled in; plain JSON values."""
        return {
            name: {inner: window if value is None else value for inner, value in option.items()}
            if isinstance(option, dict)
            else window
            if option is None
            else option
            for name, option in self.options.items()
        }


_WINDOW = {"window": None}
_SKETCHED = ("polysketch-window", {**_WINDOW, "sketch_size": 32})

FORMS = {
    form.name: form
    for form in (
        Form("softmax", "softmax over all tokens", "softmax"),
        Form("window", "softmax in the window alone", "sliding-window", _WINDOW),
        Form("paper", "the paper's: aligned chunks, one denominator", "polysketch", {"local_chunk": None}),
        Form("gate", "window + learned sketch, by a gate", *_SKETCHED),
        Form("gate-open", "the same, gate half open", _SKETCHED[0], {**_SKETCHED[1], "far_bias": 0.0}),
        Form("gate-decay", "the same, with decay", _SKETCHED[0], {**_SKETCHED[1], "decay_gate": True}),
        Form("gate-random", "window + random sketch, by a gate", _SKETCHED[0], {**_SKETCHED[1], "learned": False}),
        Form("gate-64", "window + learned sketch of 64, by a gate", _SKETCHED[0], {**_SKETCHED[1], "sketch_size": 64}),
        Form("power", "symmetric power 2, no window", "symmetric-power"),
        Form("based", "based and windows in turn", ("based", "sliding-window"), {"sliding-window": _WINDOW}),
        Form(
            "mixture",
            "three layers of window + sketch, one of softmax",
            ("polysketch-window", "polysketch-window", "polysketch-window", "softmax"),
            {"polysketch-window": _SKETCHED[1]},
        ),
    )
}
"""All of them, by name. A pattern needs a number of layers that it divides."""


def chosen(names: Sequence[str]) -> list[Form]:
    """The forms called so.

    Raises:
        ValueError: an unknown name; the message lists those that exist.
    """
    unknown = [name for name in names if name not in FORMS]
    if unknown:
        raise ValueError(f"--only: no form {', '.join(unknown)}; the forms are {', '.join(FORMS)}")
    return [FORMS[name] for name in names]
