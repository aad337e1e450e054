"""Which mechanisms can be what a model asks: messages that refuse one name those that can."""

from polysketch.attention.registry import MECHANISMS, build, option_names

__all__ = ["mechanisms_that", "mechanisms_that_cross"]


def mechanisms_that(*abilities: str) -> list[str]:
    """Names of the mechanisms that can be all of that, in the table's order; loads PyTorch.

    Args:
        *abilities: attributes of their classes: "is_causal", "is_bidirectional", "is_blockwise".
    """
    return [name for name, kind in MECHANISMS.items() if all(getattr(kind, ability) for ability in abilities)]


def mechanisms_that_cross() -> list[str]:
    """Names of the mechanisms whose queries may be of another sequence than the keys, in the table's order.

    It depends on options, so each is built, with its own: milliseconds. One that can only without chunks of tokens is
    listed as "NAME with local_chunk=None".
    """
    names = []
    for name in MECHANISMS:
        if build(name, num_heads=1, head_dim=8).is_cross:
            names.append(name)
        elif "local_chunk" in option_names(name) and _crosses_whole(name):
            names.append(f"{name} with local_chunk=None")
    return names


def _crosses_whole(name: str) -> bool:
    try:
        return build(name, num_heads=1, head_dim=8, local_chunk=None).is_cross
    except (ValueError, TypeError):
        return False
