"""Work in threads: the same result with any number of them, gradients off, errors passed on, nothing left changed."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ops.linear_cases import Case, assert_same, gradients, make
from polysketch import ops
from polysketch.ops.native import why_unavailable
from polysketch.ops.parallel import deal, num_workers, run_in_parallel

CPU = torch.device("cpu")
TASKS = Path("/proc/self/task")


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """PyTorch's number of threads, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [Case(batch=3, heads=10, key_heads=5), Case(batch=1, heads=7, key_heads=7)], ids=str)
def test_the_result_does_not_depend_on_the_number_of_threads(case, threads):
    found = gradients(case, make(case), "chunked")
    torch.set_num_threads(1)
    assert_same(found, gradients(case, make(case), "chunked"), 1e-14)


def test_every_share_runs_in_a_worker_without_gradients(threads):
    seen = []

    def work(share):
        seen.append((list(share), torch.is_grad_enabled(), threading.current_thread(), num_workers(CPU)))

    run_in_parallel(work, deal(range(10), num_workers(CPU)))
    assert sorted(item for share, *_ in seen for item in share) == list(range(10))
    assert len(seen) == threads
    assert not any(gradient for _, gradient, *_ in seen)
    if threads > 1:
        assert all(thread is not threading.main_thread() and workers == 1 for _, _, thread, workers in seen)


def test_pytorchs_number_of_threads_is_as_before(threads):
    run_in_parallel(lambda share: None, deal(range(4), threads))
    assert torch.get_num_threads() == threads
    found = []
    newcomer = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    newcomer.start()
    newcomer.join()
    assert found == [threads]


def test_results_may_be_written_in_inference_mode(threads):
    with torch.inference_mode():
        output = torch.zeros(6)

        def work(share):
            for item in share:
                output[item] = item

        run_in_parallel(work, deal(range(6), threads))
    assert output.tolist() == list(range(6))


def test_an_error_is_passed_on(threads):
    def work(share):
        raise ValueError("out of range")

    with pytest.raises(ValueError, match="out of range"):
        run_in_parallel(work, deal(range(4), threads))


def test_after_an_error_nobody_works_any_more(threads):
    at_work = []

    def work(share):
        if share[0] == 0:
            raise ValueError("out of range")
        at_work.append(share)
        time.sleep(0.2)
        at_work.remove(share)

    with pytest.raises(ValueError, match="out of range"):
        run_in_parallel(work, deal(range(4), threads))
    assert not at_work


def test_an_error_keeps_no_tensor_alive(threads):
    tensor = torch.zeros(1)
    gone = weakref.ref(tensor)

    def work(share, tensor=tensor):
        raise ValueError("out of range")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="out of range"):
            run_in_parallel(work, deal(range(4), threads))
        del work, tensor
        assert gone() is None
    finally:
        gc.enable()


INTERRUPTED = """
import random, signal, time
import torch
from polysketch import ops

torch.set_num_threads(2)
# What Ctrl-C calls, by the system's clock: a thread that sends the signal could be interrupted itself while it starts.
signal.signal(signal.SIGALRM, signal.default_int_handler)
query, key, value = (torch.randn(1, 4, 2048, 64) for _ in range(3))
forward = lambda: ops.linear_attention(query, key, value, power=2, causal=True, backend="native")
forward()
began = time.perf_counter()
forward()
seconds = time.perf_counter() - began
interrupted, random = 0, random.Random(0)
for _ in range(4):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.1, 0.8) * seconds)
        forward()
        time.sleep(10)
    except KeyboardInterrupt:
        interrupted += 1
    # What the call had is free again, and these are likely to get its memory.
    canaries = [torch.full((1, 4, 2048, 64), 7.0) for _ in range(3)] + [torch.full((1, 4, 2048), 7.0)]
    time.sleep(1.5 * seconds)
    assert all(bool((canary == 7.0).all()) for canary in canaries), "a thread wrote into a tensor of somebody else"
print(interrupted)
"""


@pytest.mark.skipif(why_unavailable() is not None, reason="needs the native programs")
def test_after_an_interrupt_nobody_writes_any_more():
    found = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=250, check=False
    )
    assert found.returncode == 0, (found.returncode, found.stderr[-2000:])
    assert found.stdout.split() == ["4"]


@pytest.mark.parametrize(("items", "hands"), [(10, 3), (2, 5), (7, 1)])
def test_dealing_is_even_and_complete(items, hands):
    shares = deal(range(items), hands)
    assert [item for share in shares for item in share] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(len(share) > 0 for share in shares)


def test_calls_of_every_width_share_one_pool_of_threads():
    """As many threads as the widest call had shares, not one pool for each number of shares."""

    def workers():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("polysketch-worker")]

    before = len(workers())
    for width in (2, 3, 5, 4, 2, 5):
        run_in_parallel(lambda share: None, [[number] for number in range(width)])
    assert len(workers()) == max(5, before)


class ThreadsOfAnOp(Dataset):
    """What a worker of a data loader sees of a call that two threads would share: PyTorch's threads, new ones, result.

    Its last item gives PyTorch three threads first, and so shows that new ones would be seen.
    The result comes as numbers: a tensor's memory is shared by a thread of Python's, which starts whenever it will.
    """

    def __init__(self, call):
        self._call = call

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == len(self) - 1:
            torch.set_num_threads(3)
        before, result = len(os.listdir(TASKS)), self._call()
        return torch.get_num_threads(), len(os.listdir(TASKS)) - before, result.tolist()


# Python's, of forks beside threads, which is what the test is about; PyTorch's, of more workers than cores.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning", "ignore:This DataLoader:UserWarning")
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.skipif(why_unavailable() is not None, reason="needs the native programs")
@pytest.mark.skipif(not TASKS.is_dir(), reason="needs Linux's list of threads")
def test_a_worker_of_a_data_loader_starts_no_threads_and_gets_the_same(threads):
    inputs = torch.randn(3, 1, 6, 40, 8, generator=torch.Generator().manual_seed(0))

    def call():
        return ops.linear_attention(*inputs, power=2, causal=True, offset=1.0, backend="native").output

    expected = call()  # this process has as many threads as it wants, which do not come along
    loader = DataLoader(ThreadsOfAnOp(call), batch_size=None, num_workers=2, multiprocessing_context="fork")
    *found, shown = loader
    assert [(asked, started) for asked, started, _ in found] == [(1, 0)] * 4
    assert shown[:2] == [3, 3]
    assert all(result == expected.tolist() for *_, result in (*found, shown))
