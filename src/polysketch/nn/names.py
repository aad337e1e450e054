"""The names of layers, apart from the layers: a wrong one is refused without PyTorch."""

from polysketch.attention import MECHANISMS

SHORT_CONVOLUTION = "short-convolution"
"""The name of the layer without attention: `ShortConvolution`."""


def check_mixer_name(name: str) -> None:
    """Refuse an unknown layer; loads nothing.

    Raises:
        ValueError: no such layer; the message lists them.
    """
    if name != SHORT_CONVOLUTION and name not in MECHANISMS:
        raise ValueError(
            f"unknown attention mechanism {name!r}; known mechanisms: {', '.join(sorted(MECHANISMS))}; "
            f"layers without attention: {SHORT_CONVOLUTION}"
        )
