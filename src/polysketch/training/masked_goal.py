"""Encoders of prepared text, which learn to find hidden tokens."""

from typing import Any

from polysketch.data import PreparedData
from polysketch.tasks import Task
from polysketch.tasks.masked import MaskedTokens, TextInputs
from polysketch.training.answers_goal import AnswersGoal
from polysketch.training.config import TrainingConfig
from polysketch.training.requirements import check_data, check_masked_text, tokenizer_of_data, verify_at_start
from polysketch.training.run_folder import RunFolder


class MaskedTextGoal(AnswersGoal):
    """A MaskedLanguageModel of windows of prepared text; arguments and errors as for `AnswersGoal` and `TextGoal`.

    Attributes:
        config, sizes, task: as there.
        data: the opened data folder.
    """

    data: PreparedData

    def open_task(self, config: TrainingConfig) -> Task:
        """As the base class has it."""
        check_masked_text(config)
        self.data = PreparedData.open(config.data, tokenizer_of_data(config))
        check_data(config, self.data.description)
        return MaskedTokens(TextInputs(self.data, config.context, config.seed), config.mask_share, config.seed)

    def describe(self) -> dict[str, Any]:
        """As that of a language model's data, and what is learned."""
        named = {"task": self.task.name, "alphabet": self.task.alphabet}
        return {"description_sha256": self.data.sha256, "tokenizer": self.data.tokenizer.name, **named}

    def verify(self) -> None:
        """As `verify_at_start`."""
        verify_at_start(self.data)

    def lay_out(self, run: RunFolder) -> None:
        """The description and the tokenizer of the data, so that the run can be used without the data."""
        run.tokenizer.mkdir(exist_ok=True)
        self.data.copy_tokenizer(run.tokenizer)
