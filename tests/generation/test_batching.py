"""Continuous batching: a request's tokens are those of its prompt alone, whatever comes and goes beside it."""

import functools

import pytest
import torch

from generation.recording import split_positions
from polysketch.attention import MECHANISMS
from polysketch.generation import Engine, Request, Sampler, Snapshots, bytes_of_request, generate, state_tensors
from polysketch.generation import snapshots as snapshots_file
from polysketch.generation.slots import Slots
from polysketch.generation.state_tensors import growing_parts
from polysketch.models import ModelConfig, TransformerLM

VOCAB = 40
GREEDY = Sampler(temperature=0)
GROWING = ("softmax", "polynomial", "hyper", "squared-polynomial")


def model_of(*attention: str, options: tuple[dict, ...], heads: int = 2) -> TransformerLM:
    """A sharp distribution that depends on the whole prompt, so that a wrong state shows in the tokens."""
    torch.manual_seed(1)
    around = {"attention": attention, "attention_options": options, "projection_convolution": 2}
    model = TransformerLM(ModelConfig(VOCAB, len(attention), 64, heads, **around))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    """States of three kinds: sums with an open chunk, a ring of tokens beside sums, and a convolution's tail."""
    return model_of(
        "polysketch-paper",
        "polysketch",
        "short-convolution",
        options=({"local_chunk": 16, "sketch_size": 16}, {"window": 8}, {}),
    )


def prompt_of(length: int, seed: int) -> list[int]:
    """Random token ids."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((1, 37, 16, 5, 70, 33, 2))]
LENGTHS = (9, 20, 3, 22, 12, 1, 16)


def requests(sampler: Sampler = GREEDY, **changes) -> list[Request]:
    """One for every prompt, of unlike lengths."""
    return [Request(*each, sampler=sampler, **changes) for each in zip(PROMPTS, LENGTHS, strict=True)]


def drain(engine: Engine, made: dict[int, list[int]] | None = None) -> dict[int, list[int]]:
    """Step until nothing is left; the tokens of each ticket."""
    made = {} if made is None else made
    while not engine.is_idle:
        for event in engine.step():
            made.setdefault(event.ticket, []).extend([] if event.token is None else [event.token])
    return made


def alone(model: TransformerLM, request: Request) -> list[int]:
    """What `generate` gives for this prompt and nothing beside it."""
    return generated(
        model, tuple(request.prompt), request.max_new_tokens, request.sampler, request.seed, request.sample
    )


@functools.cache
def generated(
    model: TransformerLM, prompt: tuple[int, ...], length: int, sampler: Sampler, seed: int, sample: int
) -> list[int]:
    found = generate(
        model,
        [prompt] * (sample + 1),
        max_new_tokens=length,
        temperature=sampler.temperature,
        top_k=sampler.top_k,
        top_p=sampler.top_p,
        repetition_penalty=sampler.repetition_penalty,
        seed=seed,
    )
    return found.tokens[sample]


def served(engine: Engine, asked: list[Request], apart: int) -> list[list[int]]:
    """The tokens of requests that come so many steps apart."""
    made: dict[int, list[int]] = {}
    tickets = []
    for request in asked:
        tickets.append(engine.add(request))
        for event in (event for _ in range(apart) for event in engine.step()):
            made.setdefault(event.ticket, []).extend([] if event.token is None else [event.token])
    drain(engine, made)
    return [made[ticket] for ticket in tickets]


def test_the_prompts_tell_models_states_apart(model):
    expected = [alone(model, request) for request in requests()]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert max(len(set(tokens)) for tokens in expected) > 5


@pytest.mark.parametrize(
    ("slots", "chunk", "apart"), [pytest.param(1, 512, 0, marks=pytest.mark.full), (3, 7, 0), (3, 16, 2), (8, 512, 1)]
)
def test_greedy_tokens_are_those_of_the_prompt_alone(model, slots, chunk, apart):
    """All at once or one after the other, more of them than slots, prompts that cross chunks."""
    asked = requests()
    expected = [alone(model, request) for request in asked]
    assert served(Engine(model, slots=slots, chunk=chunk), asked, apart) == expected


def test_settings_and_seeds_are_each_requests_own(model):
    """Drawn tokens too; of several samples of a prompt each is the one that `generate` gives."""
    samplers = [
        Sampler(1.0),
        Sampler(1.3, top_k=5),
        GREEDY,
        Sampler(0.7, top_p=0.8),
        Sampler(0.5, repetition_penalty=1.4),
    ]
    draws = {sampler: ((0, 0), (3, 1)) for sampler in samplers} | {samplers[0]: ((0, 0), (0, 1), (3, 0), (3, 1))}
    asked = [
        Request(PROMPTS[2], 10, sampler, seed=seed, sample=sample)
        for sampler, pairs in draws.items()
        for seed, sample in pairs
    ]
    assert served(Engine(model, slots=5, chunk=16), asked, 1) == [alone(model, request) for request in asked]


def test_a_request_that_is_cancelled_disturbs_nobody(model):
    """While it waits, while its prompt is read, and in each slot."""
    asked = requests()
    expected = [alone(model, request) for request in asked]
    for steps in (0, 4, 9):
        engine = Engine(model, slots=4, chunk=8)
        tickets = [engine.add(request) for request in asked]
        made: dict[int, list[int]] = {}
        for event in (event for _ in range(steps) for event in engine.step()):
            made.setdefault(event.ticket, []).extend([event.token])
        gone = tickets[steps % len(tickets)]
        was_there = engine.cancel(gone)
        before = list(made.get(gone, []))
        drain(engine, made)
        assert was_there == (len(before) < LENGTHS[tickets.index(gone)])
        assert not engine.cancel(gone)
        assert made.get(gone, []) == before == expected[tickets.index(gone)][: len(before)]
        assert [made[t] for t in tickets if t != gone] == [expected[t - 1] for t in tickets if t != gone]


def test_a_prompt_goes_on_from_the_snapshot_of_its_beginning(model):
    """The same tokens, and fewer of the prompt are read."""
    engine = Engine(model, slots=2, chunk=16, snapshots=Snapshots(1 << 24))
    first = Request(PROMPTS[4], 10, GREEDY)
    answer = served(engine, [first], 0)[0]
    for prompt, reused in [
        (PROMPTS[4] + answer + prompt_of(20, 9), 79),  # the next turn: all that was fed, so not the last token
        (PROMPTS[4][:40] + prompt_of(30, 10), 32),
        (PROMPTS[4], 64),
        (prompt_of(50, 11), 0),
    ]:
        request = Request(prompt, 12, GREEDY)
        engine.add(request)
        events = []
        while not engine.is_idle:
            events += engine.step()
        assert {event.reused for event in events} == {reused}
        assert [event.token for event in events] == alone(model, request)


def test_a_snapshot_of_the_whole_prompt_leaves_its_last_token_to_read(model):
    engine = Engine(model, slots=1, chunk=16, snapshots=Snapshots(1 << 24))
    request = Request(prompt_of(32, 5), 6, GREEDY)
    assert served(engine, [request, request], 0) == [alone(model, request)] * 2


def test_snapshots_stay_within_their_bytes_and_the_least_recently_used_goes(model):
    row = bytes_of_request(model)
    snapshots = Snapshots(2 * row + 8 * 8)  # of 3 and 5 tokens, of 8 bytes each
    states = [model.extend(torch.tensor([PROMPTS[1][:n]]), model.init_state(1))[1] for n in (3, 4, 5)]
    snapshots.keep(PROMPTS[1][:3], states[0])
    snapshots.keep(PROMPTS[1][:4], states[1])
    assert snapshots.longest(PROMPTS[1][:3])[0] == 3  # used again
    snapshots.keep(PROMPTS[1][:5], states[2])
    assert snapshots.nbytes == 2 * row + 8 * 8
    assert [len(tokens) for tokens, _ in snapshots] == [3, 5]
    assert snapshots.longest(PROMPTS[1][:4])[0] == 3
    assert snapshots.longest([*PROMPTS[1][:2], 39 - PROMPTS[1][2]]) is None
    small = Snapshots(row + 8 * 3 - 1)
    small.keep(PROMPTS[1][:3], states[0])
    assert (len(small), small.nbytes) == (0, 0)


def test_a_long_prompt_keeps_nobody_waiting(model):
    """While it is read, every step gives the others a token."""
    engine = Engine(model, slots=2, chunk=8)
    engine.add(Request(PROMPTS[0], 30, GREEDY))
    engine.step()
    long = engine.add(Request(prompt_of(80, 3), 5, GREEDY))
    for _ in range(9):
        assert [event.ticket for event in engine.step()] == [1]
    assert [event.ticket for event in engine.step()] == [1, long]


def busy(model: TransformerLM, count: int, chunk: int) -> tuple[Engine, list[int]]:
    """An engine with so many requests that run for long, and a snapshot of these 32 tokens."""
    beginning = prompt_of(32, 40)
    engine = Engine(model, slots=16, chunk=chunk, snapshots=Snapshots(1 << 24))
    engine.add(Request([*beginning, 1], 1, GREEDY))
    for seed in range(count):
        engine.add(Request(prompt_of(1, seed), 60, GREEDY))
    while engine.num_waiting:
        engine.step()
    return engine, beginning


@pytest.mark.parametrize(("rest", "running", "passes"), [(6, 6, 0), (6, 5, 1), (16, 14, 1), (3, 14, 0)])
def test_few_tokens_of_a_prompt_are_fed_by_the_steps_of_many_others(model, monkeypatch, rest, running, passes):
    """The same tokens at every step, and no pass over the prompt, once as many requests run as it has tokens left."""
    read, lengths = Engine._read_span, []
    monkeypatch.setattr(Engine, "_read_span", lambda self, *given: lengths.append(given[1]) or read(self, *given))
    engine, beginning = busy(model, running, 32)
    lengths.clear()
    request = Request(beginning + prompt_of(rest, 50 + rest), 5, GREEDY)
    ticket = engine.add(request)
    events = [event for _ in range(rest + 6) for event in engine.step()]
    assert len(lengths) == passes
    assert [event.token for event in events if event.ticket == ticket] == alone(model, request)
    assert {event.reused for event in events if event.ticket == ticket} == {32}
    others = [event.ticket for event in events if event.ticket != ticket]
    assert {others.count(each) for each in set(others)} == {rest + 6}


def test_steps_that_feed_a_prompt_keep_its_snapshots(model):
    engine, beginning = busy(model, 8, 4)
    request = Request(beginning + prompt_of(7, 51), 5, GREEDY)
    ticket = engine.add(request)
    assert drain(engine)[ticket] == alone(model, request)
    assert engine.snapshots.longest(request.prompt)[0] == 36


def test_a_request_may_leave_while_steps_feed_its_prompt(model):
    engine, beginning = busy(model, 12, 32)
    left, stays = (Request(beginning + prompt_of(8, seed), 5, GREEDY) for seed in (52, 53))
    tickets = [engine.add(left), engine.add(stays)]
    for _ in range(4):
        engine.step()
    assert engine.cancel(tickets[0])
    made = drain(engine)
    assert tickets[0] not in made
    assert made[tickets[1]] == alone(model, stays)


def test_more_requests_than_slots_wait_in_their_order(model):
    engine = Engine(model, slots=2, chunk=512)
    for length in (3, 5, 2):
        engine.add(Request(PROMPTS[3], length, GREEDY))
    assert [event.ticket for event in engine.step()] == [1, 2]
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    assert [event.ticket for event in engine.step()] == [1, 2]
    assert [(event.ticket, event.finish) for event in engine.step()] == [(1, "length"), (2, None), (3, None)]


def test_positions_of_the_device_are_kept_beside_those_of_the_host(monkeypatch):
    """As on a GPU, where programs and rotary positions read the device's."""
    model = model_of("polysketch-paper", "linear", options=({"local_chunk": 16, "sketch_size": 16}, {}))
    expected = [alone(model, request) for request in requests()]
    init_state = TransformerLM.init_state

    def init_split(*given, **options):
        return split_positions(init_state(*given, **options))

    monkeypatch.setattr(TransformerLM, "init_state", init_split)
    engine = Engine(model, slots=3, chunk=16)
    assert served(engine, requests(), 1) == expected
    assert engine.slots.state.device_position is not engine.slots.state.position


def test_a_stop_id_ends_its_request_and_is_not_a_token_of_it(model):
    tokens = alone(model, Request(PROMPTS[1], 25, GREEDY))
    stop = tokens[7]
    engine = Engine(model, slots=2)
    engine.add(Request(PROMPTS[1], 25, GREEDY, stop_ids={stop}))
    engine.add(Request(PROMPTS[1], 25, GREEDY))
    events = []
    while not engine.is_idle:
        events += engine.step()
    first = [event for event in events if event.ticket == 1]
    assert [event.token for event in first] == [*tokens[: tokens.index(stop)], None]
    assert first[-1].finish == "stop"
    assert [event.token for event in events if event.ticket == 2] == tokens


def test_whoever_hears_the_tokens_may_end_them(model):
    """Text is the listener's business."""
    tokens, heard = alone(model, Request(PROMPTS[1], 25, GREEDY)), []

    def until(token: int) -> bool:
        heard.append(token)
        return len(heard) == 4

    engine = Engine(model, slots=1)
    engine.add(Request(PROMPTS[1], 25, GREEDY, until=until))
    assert drain(engine) == {1: tokens[:4]}
    assert heard == tokens[:4]


def test_slots_do_not_grow_and_do_not_move(model):
    """Their bytes are those of one request, times their number, from the beginning to the end."""
    engine = Engine(model, slots=3, chunk=16)
    assert engine.slots.nbytes == 3 * bytes_of_request(model)
    sums = engine.slots.state.layers[0].attention.sums.data_ptr()
    served(engine, requests(), 1)
    engine.add(Request(PROMPTS[1], 3))
    engine.step()
    assert engine.slots.state.layers[0].attention.sums.data_ptr() == sums
    assert engine.slots.nbytes == 3 * bytes_of_request(model)


CONSTANT = [name for name in MECHANISMS if MECHANISMS[name].is_causal and name not in GROWING]


@pytest.mark.parametrize("name", CONSTANT)
def test_requests_of_every_mechanism_share_a_batch(name):
    """Whose states are of many kinds."""
    model = model_of(name, options=(dict(MECHANISMS[name].examples[0]),), heads=8)
    asked = [Request(prompt, 6, GREEDY) for prompt in PROMPTS[:4]]
    assert served(Engine(model, slots=3, chunk=16), asked, 1) == [alone(model, request) for request in asked]


@pytest.fixture(scope="module")
def hybrid() -> TransformerLM:
    """A layer of constant size between two that keep every key and value."""
    options = ({}, {"local_chunk": 16, "sketch_size": 16}, {})
    return model_of("softmax", "polysketch-paper", "polynomial", options=options)


@functools.cache
def growing(name: str) -> TransformerLM:
    """A model whose states grow, one for all tests of it."""
    return model_of(name, options=(dict(MECHANISMS[name].examples[0]),), heads=8)


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize(("slots", "chunk", "apart"), [(3, 7, 0), (4, 16, 2)])
def test_requests_whose_states_grow_share_a_batch(name, slots, chunk, apart):
    """Each to a length of its own; more of them than slots, so that rows come and go and move."""
    model, asked = growing(name), requests()
    expected = [alone(model, request) for request in asked]
    assert served(Engine(model, slots=slots, chunk=chunk), asked, apart) == expected


def test_a_hybrid_gives_the_tokens_of_the_prompt_alone(hybrid):
    asked = requests()
    expected = [alone(hybrid, request) for request in asked]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    for slots, chunk, apart in ((3, 7, 1), (8, 16, 0)):
        assert served(Engine(hybrid, slots=slots, chunk=chunk), asked, apart) == expected


def test_a_hybrid_goes_on_from_a_snapshot_and_leaves_it_as_it_was(hybrid):
    """Two turns at the same time, neither of which sees the other's tokens. The second goes on from the first one's."""
    engine = Engine(hybrid, slots=3, chunk=16, snapshots=Snapshots(1 << 24))
    first = Request(PROMPTS[4], 10, GREEDY)
    answer = served(engine, [first], 0)[0]
    turns = [Request(PROMPTS[4] + answer + prompt_of(5, seed), 12, GREEDY) for seed in (9, 10)]
    tickets, events = [engine.add(turn) for turn in turns], []
    while not engine.is_idle:
        events += engine.step()
    for ticket, turn, reused in zip(
        tickets, turns, (79, 80), strict=True
    ):  # the second has a token more from the first
        mine = [event for event in events if event.ticket == ticket]
        assert {event.reused for event in mine} == {reused}
        assert [event.token for event in mine] == alone(hybrid, turn)
    kept = [state.nbytes for tokens, state in engine.snapshots if len(tokens) == 79]
    assert kept == [bytes_of_request(hybrid, 79)]  # without the room that the request had


def test_requests_whose_states_grow_wait_until_their_longest_fits(hybrid):
    """Nothing is stopped because something else grew: the bytes of a whole request are there when it begins."""
    asked = requests()
    needed = [bytes_of_request(hybrid, len(each.prompt) + each.max_new_tokens - 1) for each in asked]
    bound = sorted(needed)[-1] + sorted(needed)[-2]
    engine = Engine(hybrid, slots=8, chunk=512, state_bytes=bound)
    for request in asked:
        engine.add(request)
    made: dict[int, list[int]] = {}
    together = []
    while not engine.is_idle:
        for event in engine.step():
            made.setdefault(event.ticket, []).append(event.token)
        growing = engine.slots.nbytes - engine.slots.count * engine.slots.fixed_bytes
        assert growing + engine.num_running * engine.slots.fixed_bytes <= bound
        together.append(engine.num_running)
    assert 2 <= max(together) < len(asked)
    assert list(made) == sorted(made)  # in the order of their coming
    assert [made[ticket] for ticket in sorted(made)] == [alone(hybrid, request) for request in asked]


def test_a_request_that_never_fits_is_refused(hybrid):
    bound = bytes_of_request(hybrid, 50)
    engine = Engine(hybrid, slots=2, state_bytes=bound)
    engine.check(Request(PROMPTS[1], 14))
    with pytest.raises(ValueError, match=f"at most {bound:,} bytes, found one of 37 prompt tokens and 15 new ones"):
        engine.add(Request(PROMPTS[1], 15))
    assert engine.is_idle


def test_keys_and_values_of_requests_that_left_are_given_up(hybrid):
    engine = Engine(hybrid, slots=4, chunk=16)
    empty = engine.slots.nbytes
    tickets = [engine.add(request) for request in requests()]
    for _ in range(4):
        engine.step()
    assert engine.slots.nbytes > empty
    for ticket in tickets:
        engine.cancel(ticket)
    assert engine.slots.nbytes == empty
    engine.add(requests()[1])
    engine.step()
    engine.abandon("out of memory")
    assert engine.slots.nbytes == empty


def test_a_state_that_grows_otherwise_is_refused_by_name(monkeypatch):
    model = model_of("linear", "softmax", options=({}, {}))
    monkeypatch.setattr(state_tensors, "_grows", lambda value: False)
    with pytest.raises(ValueError, match="found softmax in layer 1, whose state grows"):
        Engine(model, slots=1)


def test_logits_that_are_not_finite_end_one_request(model, monkeypatch):
    def logits(self, hidden):
        found = original(self, hidden)
        found[-1] = float("nan")
        return found

    engine = Engine(model, slots=2)
    engine.add(Request(PROMPTS[1], 4, GREEDY))
    engine.add(Request(PROMPTS[2], 4, GREEDY))
    engine.step()
    original = TransformerLM.logits
    monkeypatch.setattr(TransformerLM, "logits", logits)
    events = engine.step()
    assert [(event.ticket, event.finish) for event in events] == [(1, None), (2, "error")]
    assert "finite logits" in events[1].error
    monkeypatch.undo()
    assert drain(engine) == {1: alone(model, Request(PROMPTS[1], 4, GREEDY))[2:]}


def test_after_a_failure_everything_is_given_up_and_the_engine_goes_on(model):
    engine = Engine(model, slots=2, chunk=16)
    for request in requests():
        engine.add(request)
    engine.step()
    events = engine.abandon("out of memory")
    assert sorted(event.ticket for event in events) == list(range(1, 8))
    assert {(event.finish, event.error) for event in events} == {("error", "out of memory")}
    assert engine.is_idle
    assert served(engine, requests()[:2], 0) == [alone(model, request) for request in requests()[:2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1, VOCAB]}, "expected token ids from 0 to 39, found 1 to 40"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_a_request_that_nobody_can_serve_is_refused(model, changes, message):
    engine = Engine(model, slots=1)
    with pytest.raises(ValueError, match=message):
        engine.add(Request(**{"prompt": [1], "max_new_tokens": 1, **changes}))
    assert engine.is_idle


@pytest.mark.parametrize(("slots", "chunk"), [(0, 4), (1, 0)])
def test_an_engine_needs_a_slot_and_a_chunk(model, slots, chunk):
    with pytest.raises(ValueError, match="at least 1"):
        Engine(model, slots=slots, chunk=chunk)


def put_in_the_slot_before(self, row):
    """What a slot counted wrongly by one would do."""
    slot = put(self, row)
    if slot:
        self._settle()
        self.free(slot - 1)
        put(self, self.copy(slot - 1))
    return slot


def free_without_moving(self, slot):
    self._settle()
    self._used = self._first(len(self) - 1)


def free_another_row(self, slot):
    """Keys and values of the first request go, whoever leaves."""
    free(self, slot)
    for rows in growing_parts(self._all).values():
        rows.rows.reverse()


def never_settle(self):
    """Positions that a step replaced are lost."""


put, free = Slots.put, Slots.free
MUTANTS = {"put": put_in_the_slot_before, "free": free_without_moving, "_settle": never_settle}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_slot_gives_wrong_tokens(model, monkeypatch, name):
    """So the tests above would see it."""
    asked = requests()
    expected = [alone(model, request) for request in asked]
    monkeypatch.setattr(Slots, name, MUTANTS[name])
    assert served(Engine(model, slots=3, chunk=16), asked, 1) != expected


def test_another_requests_keys_and_values_give_wrong_tokens(hybrid, monkeypatch):
    asked = requests()
    expected = [alone(hybrid, request) for request in asked]
    monkeypatch.setattr(Slots, "free", free_another_row)
    assert served(Engine(hybrid, slots=3, chunk=16), asked, 1) != expected


def test_a_snapshot_of_other_tokens_gives_wrong_tokens(model, monkeypatch):
    """A hash of a part of the tokens, here of their number, would."""
    monkeypatch.setattr(snapshots_file, "_digests", lambda tokens, lengths: [b"%d" % length for length in lengths])
    engine = Engine(model, slots=1, chunk=16, snapshots=Snapshots(1 << 24))
    asked = [Request(prompt_of(40, seed), 10, GREEDY) for seed in (1, 2)]
    found = served(engine, asked, 0)
    assert found[0] == alone(model, asked[0])
    assert found[1] != alone(model, asked[1])


@pytest.mark.parametrize("last", [4, 5])
def test_what_a_step_found_before_it_failed_is_told_with_the_failures(model, monkeypatch, last):
    """Reading a prompt fails in the very step in which another request gets a token: its last one, or not."""
    engine = Engine(model, slots=2)
    request = Request(PROMPTS[3], last, GREEDY)
    first = engine.add(request)
    made = [event for _ in range(3) for event in engine.step()]
    monkeypatch.setattr(engine, "_read_span", lambda sequence, length: 1 / 0)
    second = engine.add(Request(PROMPTS[4], 3, GREEDY))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    told = engine.abandon("full")
    made += [event for event in told if event.ticket == first and event.token is not None]
    assert [event.token for event in made] == alone(model, request)[:4]
    ends = {event.ticket: event.finish for event in told if event.finish is not None}
    assert ends == {first: "length" if last == 4 else "error", second: "error"}
    assert len(told) == (2 if last == 4 else 3)
    assert engine.is_idle
    assert engine.abandon("again") == []


def test_a_request_whose_snapshot_fails_at_its_end_ends_once(model, monkeypatch):
    engine = Engine(model, slots=1, snapshots=Snapshots(1 << 24))
    ticket = engine.add(Request(PROMPTS[3], 2, GREEDY))
    engine.step()
    monkeypatch.setattr(engine.snapshots, "keep", lambda tokens, state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert [(event.ticket, event.finish) for event in engine.abandon("full")] == [(ticket, "length")]


def test_ids_and_stops_of_any_kind_are_those_of_generate(model):
    """Tensors, and one id that ends a text, given as a number."""
    prompt = torch.tensor(PROMPTS[4])
    whole = generate(model, [prompt], max_new_tokens=30, seed=2).tokens[0]
    stop = whole[11]
    engine = Engine(model, slots=1)
    engine.add(Request(prompt, 30, seed=2, stop_ids=stop))
    expected = generate(model, [PROMPTS[4]], max_new_tokens=30, seed=2, stop=stop).tokens[0]
    assert drain(engine) == {1: expected}
    assert len(expected) < 30


def test_layers_that_keep_keys_ask_for_the_number_of_tokens(hybrid):
    with pytest.raises(ValueError, match="expected a number of tokens"):
        bytes_of_request(hybrid)
    assert bytes_of_request(hybrid, 10) > bytes_of_request(hybrid, 0)
