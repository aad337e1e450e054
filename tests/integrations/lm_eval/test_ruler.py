"""RULER's texts are lm_eval's own to the letter, by the model's tokenizer, and nothing is looked for elsewhere."""

import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import lm_eval
import lm_eval.tasks
import numpy as np
import pytest
import torch
import transformers
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks.ruler import fwe_utils, vt_utils

from polysketch.data.tokenization import BpeTokenizer, BytesTokenizer
from polysketch.integrations.huggingface import PolysketchForCausalLM
from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer
from polysketch.integrations.lm_eval import (
    RULER_TASKS,
    PolysketchLM,
    RulerTexts,
    evaluate_tasks,
    load_tasks,
    room_for,
)
from polysketch.integrations.lm_eval.tasks import quiet
from polysketch.models import ModelConfig, TransformerLM

EACH = pytest.mark.parametrize("name", RULER_TASKS)
LENGTH = 1000


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    """One whose tokens are words of RULER's prompts: texts are short."""
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    return BpeTokenizer.train([noise * 20, vt_utils.TEMPLATE * 20, fwe_utils.TEMPLATE * 20, "VAR = VAR " * 20], 700)


@pytest.fixture(scope="module")
def fast_tokenizer(tokenizer):
    return to_fast_tokenizer(tokenizer)


class Reader(LM):
    """Names some of the words that are asked for, more or fewer of them by the letters of the text."""

    def generate_until(self, requests, disable_tqdm=False):
        return [self._answer(request.args[0]) for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    @staticmethod
    def _answer(context: str) -> str:
        question = context.rpartition("Memorize and track")[2]
        if question != context:
            words = re.findall(r"VAR ([A-Z]{5}) =", question)
        else:
            words = [word for word, _ in Counter(re.findall(r"\b[a-z]{6}\b", context)).most_common(3)]
        return " ".join(words[: sum(map(ord, context)) % len(words) + 1]).lower()


def by_words(text: str) -> SimpleNamespace:
    """Stands for a tokenizer: lm_eval makes all of its 500 texts, and asks for nothing but their numbers of tokens."""
    return SimpleNamespace(input_ids=re.findall(r"\w+|\S", text))


def lm_evals_own(name: str, monkeypatch):
    """Its task as `lm_eval run --tasks NAME --metadata ...` makes it; a module of other tasks needs packages."""
    others = SimpleNamespace(generate_samples=None, get_haystack=None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ruler.prepare_niah", others)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **_: {"by words": by_words}[name])
    settings = {"tokenizer": "by words", "max_seq_lengths": [LENGTH]}
    place = Path(lm_eval.tasks.__file__).parent / "ruler"
    with quiet():
        manager = TaskManager(include_path=str(place), include_defaults=False, metadata=settings)
        random.seed(0)
        np.random.seed(1234)  # noqa: NPY002 - as lm_eval does
        return manager.load([name])["tasks"][name]


def prompts(task, limit: int) -> list[tuple]:
    with quiet():
        task.build_all_requests(limit=limit)
    return [instance.args for instance in task.instances]


@EACH
def test_texts_and_figures_are_lm_evals_to_the_last_digit(name, monkeypatch):
    theirs = lm_evals_own(name, monkeypatch)
    (ours,) = load_tasks([name], [], ruler=RulerTexts(by_words, [LENGTH], limit=6))
    assert list(ours.task.eval_docs) == list(theirs.eval_docs)[:6]
    assert prompts(ours.task, 6) == prompts(theirs, 6)
    (figure,) = evaluate_tasks(Reader(), [ours])
    with quiet():
        found = lm_eval.evaluate(lm=Reader(), task_dict={"tasks": {name: theirs}}, limit=6, bootstrap_iters=0)
    assert figure.value == found["results"][name][f"{LENGTH},none"]
    assert (figure.task, figure.metric, figure.num_documents, figure.chance) == (name, str(LENGTH), 6, None)
    assert 0.3 < figure.value < 0.9
    assert figure.stderr > 0


def test_all_of_lm_evals_texts_are_made_unless_fewer_are_asked_for():
    assert [RulerTexts(by_words, limit=limit).rows for limit in (None, 7, 700)] == [500, 7, 500]


@EACH
def test_texts_of_a_length_do_not_depend_on_what_else_is_asked_for(name):
    """And the random states of the process are left alone."""
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - lm_eval draws from it
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - lm_eval draws from it
    alone = load_tasks([name], [], ruler=RulerTexts(by_words, [LENGTH], limit=2))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002 - lm_eval draws from it
    both = load_tasks(["ruler_fwe", "ruler_vt"], [], ruler=RulerTexts(by_words, [LENGTH + 300, LENGTH], limit=3))
    assert [each.name for each in both] == ["ruler_fwe"] * 2 + ["ruler_vt"] * 2
    same = [each for each in both if each.name == name][1]
    assert list(same.task.eval_docs)[:2] == list(alone[0].task.eval_docs)
    figures = evaluate_tasks(Reader(), both, limit=3)
    assert [(each.task, each.metric, each.num_documents) for each in figures] == [
        (task, str(length), 3) for task in ("ruler_fwe", "ruler_vt") for length in (LENGTH + 300, LENGTH)
    ]


@EACH
def test_texts_fill_the_length_and_leave_room_for_the_answer(name, tokenizer, fast_tokenizer):
    """`room` is what the longest prompt takes with the tokens of its answer."""
    (loaded,) = load_tasks([name], [], ruler=RulerTexts(fast_tokenizer, [LENGTH], limit=3))
    asked = [(len(tokenizer.encode(text)), settings["max_gen_toks"]) for text, settings in prompts(loaded.task, 3)]
    assert loaded.room == max(map(sum, asked))
    assert all(0.6 * LENGTH < tokens < 1.1 * LENGTH for tokens, _ in asked)
    assert room_for([loaded]) is None  # the 2,048 tokens that lm_eval lets a model read are enough
    (longer,) = load_tasks(["ruler_fwe"], [], ruler=RulerTexts(tokenizer, [3000], limit=1))
    assert room_for([loaded, longer]) == longer.room > 2900


def test_a_model_of_ours_answers_what_it_answers_in_lm_evals_own_class(tokenizer, fast_tokenizer):
    torch.manual_seed(1)
    model = TransformerLM(ModelConfig(tokenizer.vocab_size, 1, 32, num_heads=2, attention="linear")).eval()
    torch.nn.init.normal_(model.embedding.weight, std=0.5)
    tasks = load_tasks([*RULER_TASKS], [], ruler=RulerTexts(tokenizer, [LENGTH], limit=1))
    settings = {"batch_size": 1, "max_length": max(each.room for each in tasks)}
    wrapped = PolysketchForCausalLM.from_transformer(model)
    answers = []
    for lm in (
        PolysketchLM(model, tokenizer=tokenizer, **settings),
        HFLM(pretrained=wrapped, tokenizer=fast_tokenizer, backend="causal", **settings),
    ):
        evaluate_tasks(lm, tasks)
        answers.append([instance.resps[-1] for each in tasks for instance in each.task.instances])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 2


def test_bytes_have_a_longer_example_for_which_lm_eval_would_look_for_ever():
    (loaded,) = load_tasks(["ruler_vt"], [], ruler=RulerTexts(BytesTokenizer(), [3000], limit=2))
    for text, _ in prompts(loaded.task, 2):
        assert text.count("Memorize and track") == 2
        assert 2000 < len(text) <= 3000


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("ruler_vt", 300, r"^ruler_vt: expected --lengths of at least \d{3} for this tokenizer, found 300$"),
        (
            "ruler_fwe",
            150,
            "^ruler_fwe: expected longer --lengths for this tokenizer, found 150: in so short a text no ",
        ),
        ("ruler", LENGTH, "^expected ruler_vt or ruler_fwe of RULER's tasks, found 'ruler': the others need packages "),
        ("ruler_qa_squad", LENGTH, "found 'ruler_qa_squad': the others need packages and texts that are downloaded"),
        ("niah_single_1", LENGTH, "found 'niah_single_1': the others need packages and texts that are downloaded"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(name, length, message):
    """With a download allowed too, for tasks that lm_eval would fetch have no tokenizer there."""
    for download in (False, True):
        with pytest.raises(ValueError, match=message) as error:
            load_tasks([name], [], download=download, ruler=RulerTexts(by_words, [length], limit=2))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("length", [300, 400])
def test_texts_without_room_for_words_or_without_three_most_frequent_ones_are_refused(length):
    """The prompt alone has 364 bytes."""
    with pytest.raises(ValueError, match=f"ruler_fwe: expected longer --lengths for this tokenizer, found {length}"):
        load_tasks(["ruler_fwe"], [], ruler=RulerTexts(BytesTokenizer(), [length], limit=1))


def test_the_least_length_that_is_named_is_enough():
    with pytest.raises(ValueError, match="at least") as error:
        load_tasks(["ruler_vt"], [], ruler=RulerTexts(by_words, [1], limit=1))
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    assert len(load_tasks(["ruler_vt"], [], ruler=RulerTexts(by_words, [least], limit=20))[0].task.eval_docs) == 20
    with pytest.raises(ValueError, match=f"at least {least} .* found {least - 1}"):
        load_tasks(["ruler_vt"], [], ruler=RulerTexts(by_words, [least - 1], limit=1))


def test_a_tokenizer_is_needed_and_examples_are_not_taken():
    with pytest.raises(ValueError, match="ruler_vt: expected RulerTexts with the model's tokenizer"):
        load_tasks(["ruler_vt"], [])
    tasks = load_tasks(["ruler_fwe"], [], ruler=RulerTexts(by_words, [LENGTH], limit=1))
    with pytest.raises(ValueError, match="ruler_fwe: expected --shots 0, found 2"):
        evaluate_tasks(Reader(), tasks, shots=[0, 2])
