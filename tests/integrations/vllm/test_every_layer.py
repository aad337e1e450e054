"""One model with a layer of every kind that vLLM can be given, softmax among them."""

from collections.abc import Iterator

import pytest

from integrations.vllm.lively import lively, prompts
from integrations.vllm.serving import Engine, agree
from integrations.vllm.test_slots import GROWING, NOT_CAUSAL
from polysketch.attention import MECHANISMS, option_names

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

SMALL = {"window": 16, "local_chunk": 16, "sketch_size": 8, "heavy_size": 4, "hash_bits": 2}
"""vLLM gives softmax layers blocks of so many tokens as take the memory of the largest state."""
SERVED = sorted({*MECHANISMS, "short-convolution", "softmax"} - (GROWING - {"softmax"}) - NOT_CAUSAL)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """In this process."""
    known = {name: option_names(name) if name in MECHANISMS else () for name in SERVED}
    options = {name: {key: value for key, value in SMALL.items() if key in known[name]} for name in SERVED}
    model = lively(attention=tuple(SERVED), attention_options=options, num_layers=len(SERVED), num_kv_heads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        made = Engine(model, tmp_path_factory.mktemp("model"))
        yield made
        made.close()


def test_prompts_that_cross_many_steps_and_requests_that_come_and_go(engine):
    agree(engine, prompts(300, 5, 90, 1, 33, 64), [20, 40, 3, 25, 30, 1], every=3)


def test_a_prefix_that_was_read_before(engine):
    (text,) = prompts(450)
    agree(engine, [text], [5])
    ((tokens, cached),) = engine.serve([text], [20]).values()
    assert cached >= 400
    assert tokens == engine.expected(text, 20)
