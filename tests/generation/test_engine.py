"""Generation: what is drawn for a prompt is the prompt's own affair, and the state is carried faithfully."""

import numpy as np
import pytest
import torch

from attention.covering import first_always
from polysketch.generation import Engine, PromptLookup, Request, beam_search, generate, generate_with_drafts
from polysketch.models import ModelConfig, TransformerLM

VOCAB = 40


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    """A sharp distribution that depends on the whole prompt, so that a wrong state shows in the tokens."""
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=VOCAB,
        num_layers=2,
        hidden_size=64,
        num_heads=2,
        attention=("softmax", "polysketch-paper"),
        attention_options=({}, {"local_chunk": 16, "sketch_size": 16}),
    )
    model = TransformerLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.05 * torch.randn_like(parameter))
    return model


def prompt_of(length: int, seed: int) -> list[int]:
    """Random token ids."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt_of(1, 0), prompt_of(37, 1), prompt_of(16, 2), prompt_of(5, 3)]


@torch.no_grad()
def greedy_by_definition(model: TransformerLM, prompt: list[int], count: int) -> list[int]:
    """The whole forward again for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_generation_is_the_forward_repeated_for_every_token(model):
    """Prefill in spans, padding and steps together give the definition's tokens."""
    result = generate(model, PROMPTS, max_new_tokens=20, temperature=0, span=7)
    expected = [greedy_by_definition(model, prompt, 20) for prompt in PROMPTS]
    assert result.tokens == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert max(len(set(tokens)) for tokens in expected) > 2


@torch.no_grad()
def test_what_prompt_and_text_have_already_is_penalised(model):
    """Greedy tokens by the definition, the whole text of each row looked at for every token."""
    result = generate(model, PROMPTS, max_new_tokens=20, temperature=0, repetition_penalty=1.5)
    for prompt, tokens in zip(PROMPTS, result.tokens, strict=True):
        ids = list(prompt)
        for token in tokens:
            logits = model(torch.tensor([ids]))[0, -1]
            for seen in set(ids):
                logits[seen] = logits[seen] / 1.5 if logits[seen] > 0 else logits[seen] * 1.5
            assert token == int(logits.argmax())
            ids.append(token)
    assert result.tokens != generate(model, PROMPTS, max_new_tokens=20, temperature=0).tokens


@pytest.mark.parametrize("settings", first_always([{"top_p": 0.8, "temperature": 1.3}, {}, {"top_k": 5}]))
def test_the_tokens_of_a_prompt_do_not_depend_on_the_rest_of_the_batch(model, settings):
    """Alone, in another order, or among others: the same draws."""
    together = generate(model, PROMPTS, max_new_tokens=25, seed=3, **settings).tokens
    backwards = generate(model, PROMPTS[::-1], max_new_tokens=25, seed=3, **settings).tokens
    alone = [generate(model, [prompt], max_new_tokens=25, seed=3, **settings).tokens[0] for prompt in PROMPTS]
    assert together == backwards[::-1] == alone


def test_the_seed_decides_the_tokens(model):
    """The same one gives the same, another one others; the global generator is neither used nor moved."""
    before = torch.get_rng_state()
    first = generate(model, PROMPTS[:1], max_new_tokens=30, seed=0).tokens
    torch.manual_seed(123)
    again = generate(model, PROMPTS[:1], max_new_tokens=30, seed=0).tokens
    torch.set_rng_state(before)
    other = generate(model, PROMPTS[:1], max_new_tokens=30, seed=1).tokens
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_prompts_in_a_batch_get_different_continuations(model):
    """Several samples of one prompt are worth having; the first is the one it gets alone."""
    samples = generate(model, [PROMPTS[1]] * 3, max_new_tokens=25, seed=5).tokens
    assert len({tuple(sample) for sample in samples}) == 3
    assert samples[0] == generate(model, [PROMPTS[1]], max_new_tokens=25, seed=5).tokens[0]


@pytest.mark.parametrize("span", [1, 5, 16, 1000])
def test_the_span_of_the_prefill_changes_nothing(model, span):
    """It bounds memory."""
    expected = generate(model, PROMPTS, max_new_tokens=12, span=11).tokens
    assert generate(model, PROMPTS, max_new_tokens=12, span=span).tokens == expected


def test_no_span_of_the_prefill_exceeds_the_asked_length(model, monkeypatch):
    """A long prompt does not need memory in proportion."""
    lengths = []
    extend_hidden = TransformerLM.extend_hidden

    def recorded(self, ids, state, **options):
        lengths.append(ids.shape[1])
        return extend_hidden(self, ids, state, **options)

    monkeypatch.setattr(TransformerLM, "extend_hidden", recorded)
    generate(model, [prompt_of(50, 9)], max_new_tokens=1, span=20)
    assert lengths[:3] == [20, 20, 10]


def test_the_stop_id_ends_its_row_and_no_other(model):
    """It is not part of the tokens, and what a row said before it stays the same."""
    free = generate(model, PROMPTS, max_new_tokens=30, seed=2).tokens
    stop = free[0][10]
    result = generate(model, PROMPTS, max_new_tokens=30, seed=2, stop=stop)
    for tokens, unstopped, stopped in zip(result.tokens, free, result.stopped, strict=True):
        assert stopped == (stop in unstopped)
        assert tokens == (unstopped[: unstopped.index(stop)] if stopped else unstopped)
    assert result.stopped[0]


def test_generation_ends_when_every_row_has_stopped(model, monkeypatch):
    """Not after max_new_tokens steps for nothing."""
    free = generate(model, PROMPTS[:1], max_new_tokens=5, seed=2).tokens[0]
    result = generate(model, PROMPTS[:1], max_new_tokens=10**9, seed=2, stop=free[4])
    assert result.stopped == [True]
    assert len(result.tokens[0]) <= 4


def test_on_token_hears_every_token_in_order_and_not_the_stop_id(model):
    """Row by row what it heard is what is returned."""
    stop = generate(model, PROMPTS, max_new_tokens=8, seed=2).tokens[1][5]
    heard = [[] for _ in PROMPTS]
    result = generate(
        model, PROMPTS, max_new_tokens=8, seed=2, stop=stop, on_token=lambda row, token: heard[row].append(token)
    )
    assert heard == result.tokens
    assert any(result.stopped)


def test_the_result_counts_the_state_and_the_speed(model):
    """The state is that of all rows."""
    one = generate(model, PROMPTS[1:2], max_new_tokens=4)
    assert one.state_bytes > 0
    assert one.tokens_per_second > 0
    assert one.prefill_seconds > 0
    assert [len(tokens) for tokens in one.tokens] == [4]


def test_generating_leaves_the_model_in_training_mode(model):
    """Also when it fails half way."""
    model.train()
    generate(model, PROMPTS, max_new_tokens=2)
    assert model.training

    def fail(row, token):
        raise OSError("nobody listens")

    with pytest.raises(OSError, match="nobody listens"):
        generate(model, PROMPTS, max_new_tokens=2, on_token=fail)
    assert model.training


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "at least one prompt"),
        ([[1], []], {}, "at least one token in prompt 1"),
        ([[1, VOCAB]], {}, "expected token ids from 0 to 39, found 1 to 40 in prompt 0"),
        ([[-1, 3]], {}, "found -1 to 3"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1]], {"span": 0}, "span"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"top_p": 2.0}, "top_p"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_computed(model, prompts, changes, message):
    """Each with what was expected and what was found."""
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **{"max_new_tokens": 4, **changes})


@pytest.mark.parametrize("stop", [{3, 5}, [3, 5], torch.tensor([3, 5])])
def test_ids_that_end_a_text_come_in_any_collection(model, stop):
    expected = generate(model, PROMPTS, max_new_tokens=20, temperature=1.3, stop=frozenset((3, 5)))
    assert generate(model, PROMPTS, max_new_tokens=20, temperature=1.3, stop=stop).tokens == expected.tokens
    assert any(expected.stopped)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("end", "expected a token id or several, found 'end'"),
        (["end"], "expected token ids, which are whole numbers, found 'end'"),
        ([1.0], "expected token ids, which are whole numbers, found 1.0"),
        (2.5, "expected a token id or several, found 2.5"),
        (-1, "expected token ids from 0 to 39, found -1"),
        ([0, 40], "expected token ids from 0 to 39, found 40"),
    ],
)
def test_what_ends_no_text_is_refused(model, stop, message):
    for work in (
        lambda: generate(model, PROMPTS, max_new_tokens=2, stop=stop),
        lambda: generate_with_drafts(model, PROMPTS[1], PromptLookup(), max_new_tokens=2, stop=stop),
        lambda: beam_search(model, PROMPTS, max_new_tokens=2, num_beams=2, stop=stop),
        lambda: Engine(model, slots=1).add(Request(PROMPTS[1], 2, stop_ids=stop)),
    ):
        with pytest.raises((TypeError, ValueError), match=f"stop: {message}"):
            work()


def test_prompts_may_be_tensors(model):
    expected = generate(model, [PROMPTS[2]], max_new_tokens=5).tokens
    assert generate(model, torch.tensor([PROMPTS[2]]), max_new_tokens=5).tokens == expected
    assert generate(model, [torch.tensor(PROMPTS[2])], max_new_tokens=5).tokens == expected


def test_rows_of_a_given_state_that_end_apart_are_refused(model):
    """A row that has ended would read what nobody is told; alone it reads nothing after its end."""
    two, settings = PROMPTS[:2], {"max_new_tokens": 12, "temperature": 0}
    with pytest.raises(ValueError, match="give each row a state of its own"):
        generate(model, two, **settings, stop=0, state=model.init_state(2))
    with pytest.raises(ValueError, match="give each row a state of its own"):
        generate(model, two, **settings, on_token=lambda row, token: row == 1, state=model.init_state(2))
    stop = generate(model, two[1:], **settings).tokens[0][6]
    state = model.init_state(1)
    found = generate(model, two[1:], **settings, stop=stop, state=state)
    assert found.stopped == [True]
    assert state.position.tolist() == [len(two[1]) + len(found.tokens[0])]
    together = model.init_state(2)
    generate(model, two, **settings, on_token=lambda row, token: True, state=together)
    assert together.position.tolist() == list(map(len, two))


def test_a_state_that_generate_moved_on_is_read_outside_of_inference_mode(model):
    state = model.init_state(1)
    generate(model, [PROMPTS[1]], max_new_tokens=3, state=state)
    with torch.no_grad():
        model.extend(torch.tensor([[5]]), state)
    assert state.position.tolist() == [len(PROMPTS[1]) + 3]


def test_numbers_of_any_kind_draw_the_same(model):
    """Of NumPy, of PyTorch: what counts is which numbers they are."""
    expected = generate(model, [PROMPTS[1]], max_new_tokens=12, seed=4).tokens
    kinds = (np.array(PROMPTS[1]), torch.tensor(PROMPTS[1]), list(torch.tensor(PROMPTS[1])), list(np.array(PROMPTS[1])))
    for prompt in kinds:
        assert generate(model, [prompt], max_new_tokens=12, seed=np.int64(4)).tokens == expected
    with pytest.raises(TypeError, match="expected token ids, which are whole numbers"):
        generate(model, [[1.5]], max_new_tokens=1)


def test_samples_say_which_draws_of_a_prompt_they_are(model):
    """So a batch may be cut anywhere."""
    whole = generate(model, [PROMPTS[1]] * 3, max_new_tokens=12).tokens
    rest = generate(model, [PROMPTS[1]] * 2, max_new_tokens=12, samples=[2, 0]).tokens
    assert rest == [whole[2], whole[0]]
    assert len(set(map(tuple, whole))) == 3
    with pytest.raises(ValueError, match="sample number for each of 1 prompts, found 2"):
        generate(model, [PROMPTS[1]], max_new_tokens=1, samples=[0, 1])
