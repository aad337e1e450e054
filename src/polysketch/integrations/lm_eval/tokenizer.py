"""A run's tokenizer where lm_eval expects one of transformers: the same ids for every text."""

from itertools import groupby
from typing import Any

from transformers import AddedToken, PreTrainedTokenizer

from polysketch.data import TokenizerLike
from polysketch.data.tokenization.bpe import END_OF_TEXT

__all__ = ["RunTokenizer", "in_transformers"]


def in_transformers(tokenizer: Any) -> Any:
    """A tokenizer of transformers as it is, one of `polysketch.data` as a `RunTokenizer`."""
    return RunTokenizer(tokenizer) if isinstance(tokenizer, TokenizerLike) else tokenizer


class RunTokenizer(PreTrainedTokenizer):
    """Asks the run's own tokenizer for every text, so that any kind can be evaluated, also one that has no fast form.

    No special token is added to a text, and text that spells one stays text. Padding stands on the left.

    Args:
        tokenizer: of `polysketch.data`.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - transformers wants a list

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._added_tokens_decoder = {tokenizer.end_of_text: AddedToken(END_OF_TEXT, special=True)}
        special = {name: END_OF_TEXT for name in ("bos_token", "eos_token", "pad_token")}
        super().__init__(**special, padding_side="left", split_special_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer, the end of the text among them."""
        return self._tokenizer.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Name -> id; a token is named by its id, for its bytes need not be text."""
        return {str(index): index for index in range(self.vocab_size)} | {END_OF_TEXT: self._tokenizer.end_of_text}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [str(index) for index in self._tokenizer.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token)

    def _convert_id_to_token(self, index: int) -> str:
        return str(index)

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(index) for index in token_ids]
        end = self._tokenizer.end_of_text
        ended = "" if skip_special_tokens else END_OF_TEXT
        return "".join(
            ended * len(part) if is_end else self._tokenizer.decode(part)
            for is_end, part in ((is_end, list(run)) for is_end, run in groupby(ids, end.__eq__))
        )
