"""A model with what serving needs of it: its tokenizer, its name, and how a chat becomes a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysketch.integrations.chat import Messages, ends_of, renderer
from polysketch.serving.errors import ApiError

if TYPE_CHECKING:
    import torch

    from polysketch.data import TokenizerLike
    from polysketch.models import TransformerLM

__all__ = ["ServedModel", "load_served"]


@dataclass(frozen=True)
class ServedModel:
    """What is served.

    Attributes:
        name: by which clients ask for it.
        model: in evaluation mode.
        tokenizer: of its texts.
        render: the token ids of a chat, up to where the answer begins, or ValueError; None where there is no chat
            template.
        declared_ends: token ids that the folder's settings for generation call the end.
    """

    name: str
    model: TransformerLM
    tokenizer: TokenizerLike
    render: Callable[[Messages], list[int]] | None = None
    declared_ends: frozenset[int] = frozenset()

    @property
    def ends(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return self.declared_ends | {self.tokenizer.end_of_text}

    def prompt(self, asked: Any) -> list[int]:
        """The token ids of a text, of ids, or of a chat's messages; of an empty text, the end of the text before.

        Raises:
            ApiError: text that no tokenizer takes, or a chat without a template for it.
        """
        if isinstance(asked, str):
            try:
                return self.tokenizer.encode(asked) or [self.tokenizer.end_of_text]
            except ValueError as error:
                raise ApiError(400, str(error), param="prompt") from None
        if not isinstance(asked[0], dict):
            return list(asked)
        if self.render is None:
            raise ApiError(
                400,
                f"{self.name} has no chat template, so that nobody knows what it was taught to answer: ask "
                "/v1/completions, or start the server with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        try:
            return self.render(asked)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None

    @property
    def key_value_bytes(self) -> int:
        """Bytes that a key-value cache of the same layers and dtype would take for a token."""
        config, size = self.model.config, self.model.output_bias.element_size()
        heads = config.num_kv_heads or config.num_heads
        return 2 * config.num_layers * heads * config.head_dim * size


def load_served(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    checkpoint: str = "latest",
    name: str | None = None,
    chat_template: Path | None = None,
) -> ServedModel:
    """Load a run, or a folder that `polysketch export` wrote.

    Args:
        folder: of either.
        device: where to put the model.
        checkpoint: of a run.
        name: for clients; the folder's where None.
        chat_template: a file with a template of Jinja, in place of the tokenizer's own.

    Raises:
        FileNotFoundError: no model there, or no such template.
        ValueError: a folder of transformers with another model than ours, a run of token ids alone, malformed
            settings for generation; whatever loading refuses.
        ImportError: the extra `hf` is missing, for an exported folder or a template.
    """
    from polysketch.integrations.transformers_folder import is_transformers_folder

    template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    name = folder.resolve().name if name is None else name
    if is_transformers_folder(folder):
        return _exported(folder, name, device, template)
    from polysketch.training import load_model

    model, description = load_model(folder, device=device, checkpoint=checkpoint)
    if description.tokenizer.kind == "ids":
        raise ValueError(f"{folder}: expected a model of text, found one of token ids, whose text nobody knows")
    render = None
    if template is not None:
        from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer

        render = renderer(to_fast_tokenizer(description.tokenizer), template)
    return ServedModel(name, model, description.tokenizer, render)


def _exported(folder: Path, name: str, device: torch.device | str, template: str | None) -> ServedModel:
    from polysketch.integrations.huggingface.import_model import find_tokenizer, known_of_run
    from polysketch.integrations.transformers_folder import read_model, read_tokenizer, require_ours

    require_ours(folder)
    wrapped = read_model(folder, device=device)
    tokenizer = find_tokenizer(folder, known_of_run(wrapped.config, folder).get("tokenizer"))
    fast = read_tokenizer(folder)
    return ServedModel(name, wrapped.inner, tokenizer, renderer(fast, template), ends_of(folder, fast))
