"""Work in threads: the same result with any number of them, gradients off, errors passed on, nothing left changed."""

import threading

import pytest
import torch

from ops.linear_cases import Case, assert_same, gradients, make
from polysketch.ops.parallel import deal, num_workers, run_in_parallel

CPU = torch.device("cpu")


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


@pytest.mark.parametrize(("items", "hands"), [(10, 3), (2, 5), (7, 1)])
def test_dealing_is_even_and_complete(items, hands):
    shares = deal(range(items), hands)
    assert [item for share in shares for item in share] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(len(share) > 0 for share in shares)
