"""A chat as the token ids that a model was taught to answer: by the template of Jinja that its tokenizer has."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysketch.data.tokenization.base import check_unicode
from polysketch.integrations.template import Template
from polysketch.integrations.transformers_folder import is_transformers_folder, read_tokenizer
from polysketch.storage.outside import read_json

if TYPE_CHECKING:
    from polysketch.data import TokenizerLike

__all__ = ["Chat", "Messages", "ends_of", "load_chat", "renderer"]

Messages = list[dict[str, str]]
"""What was said: of each message the `role` and the `content`."""

_GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class Chat:
    """How a model takes part in a chat.

    Attributes:
        render: the token ids of messages, up to where the answer begins; ValueError where the template refuses them.
        ends: token ids that end an answer, beside the end of a text.
    """

    render: Callable[[Messages], list[int]]
    ends: frozenset[int] = frozenset()


def load_chat(folder: str | Path, tokenizer: TokenizerLike, template_file: Path | None = None) -> Chat:
    """Load the chat template of a model.

    Args:
        folder: of a run, or of a model of transformers.
        tokenizer: of the run.
        template_file: with a template of Jinja, in place of the tokenizer's own. A run has none of its own.

    Raises:
        ValueError: there is no template, or the settings for generation in the folder are malformed.
        ImportError: the extra `hf` is missing.
    """
    folder = Path(folder)
    template = None if template_file is None else template_file.read_text(encoding="utf-8")
    if is_transformers_folder(folder):
        fast = read_tokenizer(folder)
        render, ends = renderer(fast, template), ends_of(folder, fast)
    else:
        render, ends = _renderer_of_run(tokenizer, template), frozenset[int]()
    if render is None:
        raise ValueError(
            f"{folder} has no chat template, so that nobody knows what it was taught to answer: give one by "
            "--chat-template FILE, or leave --chat out"
        )
    return Chat(render, ends)


def renderer(tokenizer: Any, template: str | None = None) -> Callable[[Messages], list[int]] | None:
    """What makes token ids of messages by a tokenizer of transformers, as its `apply_chat_template` does.

    The template has bounds of time and memory; see `Template`.

    Args:
        tokenizer: of transformers.
        template: of Jinja. Default: the tokenizer's own.

    Returns:
        A function that raises ValueError where the template refuses messages, or UTF-8 cannot hold them. None where
        there is no template.

    Raises:
        ValueError: the folder of the tokenizer has templates, and none that is to be used.
        ImportError: the extra `serve` is missing.
    """
    if template is None and not tokenizer.chat_template:
        return None
    source = tokenizer.get_chat_template(template)
    if not isinstance(source, str):
        raise ValueError(
            f"expected a chat template that is text, found {type(source).__name__} in the tokenizer's folder"
        )
    marks = _marks(tokenizer) if getattr(tokenizer, "split_special_tokens", False) else {}
    variables = {name: marks.get(str(token), token) for name, token in tokenizer.special_tokens_map.items()}
    program = Template(_any_of(marks).sub(lambda token: marks[token[0]], source), variables)
    ids = {mark: tokenizer.convert_tokens_to_ids(token) for token, mark in marks.items()}
    borders = _any_of(ids)

    def render(messages: Messages) -> list[int]:
        """The token ids of messages."""
        text = program.render(messages)
        check_unicode([text])
        found: list[int] = []
        for piece in filter(None, borders.split(text)):
            found += [ids[piece]] if piece in ids else tokenizer(piece, add_special_tokens=False)["input_ids"]
        return found

    return render


def _marks(tokenizer: Any) -> dict[str, str]:
    """What a template is given in place of special tokens, where a text that spells one stays text.

    No message can hold a mark, for nobody knows it: so the template's own special tokens are told from spelled ones.
    """
    named = (token for token in tokenizer.special_tokens_map.values() if isinstance(token, str))
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {token: f"[{secrets.token_hex(16)}]" for token in {*named, *added} if token}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Where one of them stands, the longest first; nowhere, where there are none."""
    found = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return re.compile(f"({found})" if found else "(?!)")


def _renderer_of_run(tokenizer: TokenizerLike, template: str | None) -> Callable[[Messages], list[int]] | None:
    if template is None:
        return None
    from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer

    return renderer(to_fast_tokenizer(tokenizer), template)


def ends_of(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The token ids that the tokenizer and the settings for generation call the end.

    Args:
        folder: of a model of transformers; it may have a generation_config.json.
        tokenizer: of transformers.

    Raises:
        ValueError: the settings are malformed.
    """
    file = folder / _GENERATION_FILE
    declared = _declared_ends(file) if file.is_file() else []
    return frozenset([*declared, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])])


def _declared_ends(file: Path) -> list[int]:
    """`eos_token_id`: absent, an id, or a list of ids."""
    settings = read_json(file)
    declared = settings.get("eos_token_id") if isinstance(settings, dict) else None
    ends = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not isinstance(settings, dict) or any(type(each) is not int or each < 0 for each in ends):
        raise ValueError(f"{file} must be an object whose eos_token_id, if any, is a token id or a list of them")
    return ends
