"""A model of ours has the figures of lm_eval's own class for models of transformers, digit for digit."""

import json

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from polysketch.generation import generate
from polysketch.integrations.huggingface import PolysketchForCausalLM
from polysketch.integrations.lm_eval import PolysketchLM, evaluate_tasks, load_tasks
from polysketch.models import ModelConfig, TransformerLM

TASKS = ["hellaswag", "piqa", "lambada", "arc", "winogrande", "openbookqa", "physics", "boolq", "copa", "wsc"]
MAX_LENGTH = 96
"""Shorter than two examples and a question: contexts are cut."""


@pytest.fixture(scope="module")
def transformer(tokenizer) -> TransformerLM:
    """Ours, with chunks shorter than most questions."""
    torch.manual_seed(1)
    options = {"local_chunk": 16, "sketch_size": 8}
    config = ModelConfig(
        tokenizer.vocab_size, 2, 64, num_heads=2, attention="polysketch-paper", attention_options=options
    )
    model = TransformerLM(config).eval()
    torch.nn.init.normal_(model.embedding.weight, std=0.5)  # so that answers differ
    return model


@pytest.fixture(params=["own tokenizer", pytest.param("tokenizer of transformers", marks=pytest.mark.full)])
def pair(request, transformer, tokenizer, fast_tokenizer):
    """(the model in our class, the same in lm_eval's own)."""
    settings = {"max_length": MAX_LENGTH, "batch_size": 5}
    ours = PolysketchLM(
        transformer, tokenizer=tokenizer if request.param == "own tokenizer" else fast_tokenizer, **settings
    )
    wrapped = PolysketchForCausalLM.from_transformer(transformer)
    return ours, HFLM(pretrained=wrapped, tokenizer=fast_tokenizer, backend="causal", **settings)


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    """What lm_eval hands to a model."""
    return [Instance(kind, doc={}, arguments=each, idx=0, metadata=("task", 0, 1)) for each in arguments]


def test_figures_are_equal_to_the_last_digit(pair, task_folder):
    """On every task, without and with examples; with log-likelihoods that differ by rounding alone."""
    found, values = [], []
    for model in pair:
        tasks = load_tasks(TASKS, [task_folder])
        found.append(evaluate_tasks(model, tasks, shots=[0, 2]))
        values.append([response for each in tasks for instance in each.task.instances for response in instance.resps])
    assert len(found[0]) == 2 * (7 * 2 + 1 + 3)
    for ours, theirs in zip(*found, strict=True):
        assert (ours.task, ours.shots, ours.metric, ours.num_documents) == (
            theirs.task,
            theirs.shots,
            theirs.metric,
            theirs.num_documents,
        )
        digits = 4 if ours.metric == "perplexity" else 15  # the exponential of a rounded sum, and a share
        assert f"{ours.value:.{digits}g}" == f"{theirs.value:.{digits}g}"
    for ours, theirs in zip(*values, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
        assert ours[1] == theirs[1]
    assert max(abs(value) for value, _ in values[0]) > 20


@pytest.mark.parametrize("context", ["Why ", "Why", "", "a\n\n", "word " * 60, "<|endoftext|>,"])
@pytest.mark.parametrize("continuation", [" basket", "basket", "t", " a b c"])
def test_boundaries_between_context_and_continuation_are_equal(pair, context, continuation):
    """Spaces at the end of a context belong to the continuation; nothing before a text is the end of another."""
    (ours,), (theirs,) = (
        model.loglikelihood(requests("loglikelihood", [(context, continuation)]), disable_tqdm=True) for model in pair
    )
    assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
    assert ours[1] == theirs[1]


def test_a_context_of_spaces_alone_is_none(pair):
    """The spaces belong to the continuation, and what is left is the beginning of a text; lm_eval's own class fails."""
    ours, _ = pair
    spaced, plain = ours.loglikelihood(requests("loglikelihood", [("  ", "anchor"), ("", "  anchor")]), True)
    assert spaced == plain


def test_greedy_answers_and_answers_of_one_token_are_equal(pair):
    """What the model would say itself is greedy; answers to one question share an input; order is kept."""
    ours, theirs = pair
    context = ours.tok_encode("He opens the anchor. She looks at the")
    said = context.copy()
    for _ in range(4):
        with torch.no_grad():
            said.append(int(ours.model.inner(torch.tensor([said]))[0, -1].argmax()))
    asked = [(("", ""), context, said[len(context) :])]
    asked += [(("", ""), context, [token]) for token in (7, said[len(context)], 9)]
    asked += [(("", ""), context * 20, [3, 4, 5]), (("", ""), context[:2], [*said[len(context) :], 1])]
    found = ours._loglikelihood_tokens(asked, disable_tqdm=True)
    expected = theirs._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [greedy for _, greedy in found][:4] == [True, False, True, False]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_whole_texts_are_equal_also_beyond_the_longest_input(pair):
    """In windows that predict every token once, the last one with all the context it can have."""
    texts = [("He opens the basket. " * repeats,) for repeats in (1, 9, 40)] + [("",), ("x",)]
    ours, theirs = (model.loglikelihood_rolling(requests("loglikelihood_rolling", texts), True) for model in pair)
    assert ours == pytest.approx(theirs, abs=2e-3, rel=1e-6)
    assert ours[2] < -400


def test_figures_of_generated_answers_are_equal(transformer, tokenizer, fast_tokenizer, tmp_path):
    """A BIG-bench task without choices, whose targets are what the model says, but for one."""
    wrapped = PolysketchForCausalLM.from_transformer(transformer)
    ours = PolysketchLM(transformer, tokenizer=tokenizer, max_length=MAX_LENGTH)
    theirs = HFLM(pretrained=wrapped, tokenizer=fast_tokenizer, max_length=MAX_LENGTH, batch_size=4, backend="causal")
    settings = {"until": ["\n"], "max_gen_toks": 64}
    asked = [(f"\nQ: {index} and\nA: ", settings) for index in range(4)]
    said = ours.generate_until(requests("generate_until", asked), True)
    examples = [{"input": f"{index} and", "target": answer} for index, answer in enumerate(said)]
    examples[0]["target"] = "something else"
    (tmp_path / "said.json").write_text(json.dumps({"examples": examples}))
    found = [evaluate_tasks(model, load_tasks(["said"], [tmp_path])) for model in (ours, theirs)]
    assert found[0] == found[1]
    assert [(figure.metric, figure.value, figure.chance) for figure in found[0]] == [("exact_match", 0.75, None)]


def test_generated_answers_are_equal(transformer, tokenizer, fast_tokenizer):
    """Greedy, with a padded batch, a context that is cut, and stop strings that meet some of the rows."""
    ours = PolysketchLM(transformer, tokenizer=tokenizer, max_length=MAX_LENGTH, batch_size=3)
    wrapped = PolysketchForCausalLM.from_transformer(transformer)
    theirs = HFLM(pretrained=wrapped, tokenizer=fast_tokenizer, max_length=MAX_LENGTH, batch_size=3, backend="causal")
    contexts = ["He", "She looks at the", "why " * 80, "Which of these opens", "\n"]
    free = ours.generate_until(requests("generate_until", [(each, {"max_gen_toks": 24}) for each in contexts]), True)
    stop = free[1][6:8]
    settings = {"until": [stop, "\n\n"], "max_gen_toks": 24, "do_sample": False}
    asked = [(each, dict(settings)) for each in contexts]
    found, expected = (model.generate_until(requests("generate_until", asked), True) for model in (ours, theirs))
    assert found == expected
    assert stop not in "".join(found)
    assert len(found[1]) < len(free[1])


@pytest.mark.parametrize("contexts", [[""], ["", "She looks at the"]])
def test_an_empty_context_is_the_end_of_a_text(transformer, tokenizer, contexts):
    model = PolysketchLM(transformer, tokenizer=tokenizer, max_length=MAX_LENGTH, batch_size=3)
    settings = {"until": ["no stop"], "max_gen_toks": 12, "do_sample": False}
    found = model.generate_until(requests("generate_until", [(each, dict(settings)) for each in contexts]), True)
    for context, text in zip(contexts, found, strict=True):
        prompt = tokenizer.encode(context) or [tokenizer.end_of_text]
        end = tokenizer.end_of_text
        new = generate(transformer, [prompt], max_new_tokens=12, temperature=0.0, stop=end).tokens[0]
        assert text == tokenizer.decode([index for index in new if index != end])


def test_logits_are_held_where_something_is_scored_and_nowhere_else(pair, monkeypatch):
    """The context of 90 tokens has none; inputs that several answers share are read once."""
    ours, _ = pair
    read, logits = [], []
    inner = ours.model.inner
    hidden_states, over_vocabulary = inner.hidden_states, inner.logits
    monkeypatch.setattr(inner, "hidden_states", lambda ids: (read.append(tuple(ids.shape)), hidden_states(ids))[1])
    monkeypatch.setattr(inner, "logits", lambda x: (logits.append(x.shape[:2].numel()), over_vocabulary(x))[1])
    context = list(range(10, 90))
    ours._loglikelihood_tokens([(None, context, [answer]) for answer in (3, 4, 5)], disable_tqdm=True)
    assert read == [(1, 80)]
    assert logits == [1, 1, 1]


def test_more_to_generate_than_there_is_room_for_is_refused(pair):
    """Before anything is generated, with what to change."""
    ours, _ = pair
    asked = requests("generate_until", [("He", {"until": ["."], "max_gen_toks": MAX_LENGTH})])
    with pytest.raises(ValueError, match=r"beside 96 generated tokens, found a model that reads 96: allow it a longer"):
        ours.generate_until(asked, True)


def test_more_to_score_than_may_be_read_is_refused(pair):
    """In one line, as other mistakes; lm_eval's own class asserts."""
    ours, _ = pair
    with pytest.raises(ValueError, match=r"expected at most 96 tokens to score, found .*: allow the model longer"):
        ours.loglikelihood(requests("loglikelihood", [("He", " drum" * 97)]), disable_tqdm=True)
