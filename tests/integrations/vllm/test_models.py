"""Models that vLLM takes for ordinary ones, and those that it cannot serve."""

import pytest

from integrations.vllm.lively import lively, prompts
from integrations.vllm.serving import Engine, agree

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.mark.parametrize("taps", [0, 4])
def test_softmax_alone(tmp_path, taps):
    made = Engine(lively(attention="softmax", projection_convolution=taps), tmp_path)
    try:
        agree(made, prompts(100, 5, 60, 1), [20, 30, 10, 5], every=2)
    finally:
        made.close()


def test_a_layer_whose_state_grows_is_named(tmp_path):
    with pytest.raises(ValueError, match="layers of hyper cannot be served"):
        Engine(lively(attention="hyper"), tmp_path)
