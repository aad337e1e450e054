"""Native programs called from several threads of Python at once, with one worker or several: bits as alone."""

import threading

import pytest
import torch

from ops.linear_cases import Case, arguments, empty_state, gradients, make
from ops.test_window_native import CASES as WINDOWS
from ops.test_window_native import make as make_window
from ops.test_window_native import output_and_gradients
from polysketch import ops
from polysketch.feature_maps import LearnedSketch
from polysketch.ops.native import pairs, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason="needs the native programs")

CALLERS, TIMES = 4, 3


def attention(seed):
    case = Case(length=70, causal=seed % 2 == 0, dtype=torch.float32, seed=seed)
    return [*gradients(case, make(case), "native").values()]


def decoding(seed):
    case = Case(length=20, local_chunk=8, decays=True, dtype=torch.float32, seed=seed)
    tensors, state = make(case), empty_state(case)
    return [
        ops.linear_attention_extend_(
            *(x.contiguous() for x in (one.query, one.key, one.value)), state, **arguments(case, one)
        ).output
        for one in (tensors.span(i, i + 1) for i in range(case.length))
    ]


def window(seed):
    case = WINDOWS[9 + seed]  # of some hundred tokens
    tensors, mask = make_window(case)
    return output_and_gradients(case, [x.float() for x in tensors], mask, "native")


SKETCH = LearnedSketch(12, sketch_size=8)


def sketch(seed):
    x = torch.randn(2, 4, 30, 12, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    features = SKETCH.map_queries(x)
    return [
        features.detach(),
        *torch.autograd.grad(features.square().sum(), [x, *SKETCH.parameters()], allow_unused=True),
    ]


def delta(seed):
    generator = torch.Generator().manual_seed(seed)
    key = torch.nn.functional.normalize(torch.randn(2, 2, 40, 8, generator=generator), dim=-1)
    value, strength = (torch.rand(2, 2, 40, *more, generator=generator) for more in ((5,), ()))
    inputs = [x.requires_grad_() for x in (key, value, strength)]
    writes = ops.delta_writes(*inputs, backend="native")
    return [writes.detach(), *torch.autograd.grad(writes.square().sum(), inputs)]


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch):
    """PyTorch's number of threads, put back afterwards; each window is worth them."""
    monkeypatch.setattr(pairs, "_PRODUCTS_WORTH_A_THREAD", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("call", [attention, decoding, window, sketch, delta])
def test_calls_at_the_same_time_give_the_bits_of_calls_alone(call):
    expected, found = [call(seed) for seed in range(CALLERS)], {}
    start = threading.Barrier(CALLERS)

    def caller(seed):
        start.wait()
        found[seed] = [call(seed) for _ in range(TIMES)]

    callers = [threading.Thread(target=caller, args=(seed,)) for seed in range(CALLERS)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    for seed, alone in enumerate(expected):
        for time in found[seed]:
            assert all(_equal(*pair) for pair in zip(time, alone, strict=True))


def _equal(one, other):
    return one is other is None or torch.equal(one, other)
