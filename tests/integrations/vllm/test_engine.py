"""Greedy tokens of vLLM's engine are those of our own, whatever else the engine does at the same time."""

from collections.abc import Iterator

import pytest

from integrations.vllm.lively import lively, prompts
from integrations.vllm.serving import CHUNK, Engine, agree

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

MODEL = {"attention": "polysketch", "attention_options": {"window": 16, "sketch_size": 8}, "num_kv_heads": 1}
PAGES = 14
"""For states: few, so that each is used by one request after the other."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With few pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        every_block = {"prefix_cache_retention_interval": None}
        made = Engine(lively(**MODEL), tmp_path_factory.mktemp("model"), num_gpu_blocks_override=PAGES, **every_block)
        yield made
        made.close()


def test_the_model_says_what_depends_on_all_of_the_past(engine):
    text = prompts(100)[0]
    said = engine.expected(text, 40)
    assert len(set(said)) > 10
    assert engine.expected([text[0] ^ 1, *text[1:]], 40) != said


def test_prompts_that_cross_many_steps(engine):
    agree(engine, prompts(300, CHUNK, CHUNK + 1, 1, 2), [30] * 5)


def test_requests_that_come_and_go(engine):
    agree(engine, prompts(5, 90, 1, 33, 64, 17, 150, 8), [40, 3, 25, 60, 1, 30, 10, 50], every=3)


def test_requests_that_are_cancelled_leave_no_trace(engine):
    agree(engine, prompts(200, 20, 61, 7, 100), [30] * 5, every=2, cancelled={0: 3, 1: 9, 4: 20})


def test_a_prefix_that_was_read_before_is_not_read_again(engine):
    first, other = prompts(150, 40)
    agree(engine, [first], [20])
    for again in (first + other, first, first[:100] + other):
        ((tokens, cached),) = engine.serve([again], [30]).values()
        assert cached >= 64
        assert tokens == engine.expected(again, 30)


def test_requests_that_lose_their_states_begin_anew(engine):
    agree(engine, prompts(100, 30, 61, 8), [40] * 4, driven_out=(3, 20, 21))


@pytest.mark.parametrize("wrong", ["page", "left by another", "not written"])
def test_a_wrong_state_gives_wrong_tokens(engine, monkeypatch, wrong):
    from polysketch.integrations.vllm.rows import Rows
    from polysketch.integrations.vllm.slots import StateSlots

    read, write = StateSlots.read, StateSlots.write
    if wrong == "page":
        monkeypatch.setattr(StateSlots, "read", lambda self, pages, at: read(self, [*pages[1:], pages[0]], at))
    elif wrong == "left by another":
        monkeypatch.setattr(Rows, "is_fresh", property(lambda self: False))
    else:
        monkeypatch.setattr(
            StateSlots, "write", lambda self, pages, state: len(pages) == 1 and write(self, pages, state)
        )
    with pytest.raises(AssertionError, match="request"):
        agree(engine, prompts(40, 41, 42), [30] * 3)
