"""The campaign of numbers finds nothing in ours, and finds what is planted; a case comes back by its seed."""

import pytest
import torch
from campaigns.harness import Found

from campaigns import drawn, numbers
from polysketch import attention
from polysketch.attention.local import LocalAttention
from polysketch.attention.softmax import SoftmaxAttention
from polysketch.ops.native import why_unavailable

needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason="no native programs here")


def faults(count, seed, folder):
    return numbers.campaign(count, seed, folder).faults


def test_dozens_of_cases_find_nothing(tmp_path):
    found = numbers.campaign(14, 0, tmp_path)
    assert found.faults == []
    assert len(found.outcomes) > 7


def test_a_case_is_its_seed():
    one, other = drawn.draw(17), drawn.draw(17)
    assert str(one) == str(other) != str(drawn.draw(18))
    assert all(torch.equal(x, y) for x, y in zip(one.inputs, other.inputs, strict=True))


def of_softmax(monkeypatch, change):
    """Cases of softmax attention alone, changed."""
    monkeypatch.setattr(drawn, "NAMES", ("softmax",))
    attend = SoftmaxAttention.attend
    monkeypatch.setattr(SoftmaxAttention, "attend", lambda *given, **options: change(attend(*given, **options)))


def test_other_numbers_are_found(monkeypatch, tmp_path):
    of_softmax(monkeypatch, lambda output: output * 1.01 if output.dtype == torch.float32 else output)
    assert any("forward 0: error" in fault and "float32" in fault for fault in faults(12, 0, tmp_path))


def test_other_bits_are_found(monkeypatch, tmp_path):
    of_softmax(monkeypatch, lambda output: output + 1e-6 * torch.rand(()))
    assert any("a second run has other bits" in fault for fault in faults(12, 0, tmp_path))


def test_wrong_gradients_are_found(monkeypatch, tmp_path):
    of_softmax(monkeypatch, lambda output: output if output.dtype == torch.float64 else output * 2 - output.detach())
    found = faults(12, 0, tmp_path)
    assert any("gradient" in fault for fault in found)
    assert not any("forward" in fault for fault in found)


@pytest.mark.full
def test_a_leak_of_padding_is_found(monkeypatch, tmp_path):
    def as_given(self, query, key, value, key_mask, hidden=None):
        return query, key, value, hidden

    monkeypatch.setattr(attention.Mechanism, "real_inputs", as_given)
    assert any("error nan" in fault or "error inf" in fault for fault in faults(40, 0, tmp_path))


def long_faults(case, tokens):
    found = Found()
    numbers.attack_long(case, 0, found, tokens)
    return found.faults


@pytest.fixture
def own_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize(
    "case", [numbers.Long(1, True, 1e-5), pytest.param(numbers.Long(2, False, 1.0), marks=pytest.mark.full)], ids=str
)
def test_long_cases_find_nothing(case, own_threads):
    assert long_faults(case, 20_000) == []


def test_cumulative_sums_are_the_quadratic_definition():
    case = numbers.Long(1, False, 1e-5)
    inputs, _ = case.draw(0, 300)
    inputs = [x.double() for x in inputs]
    found, wanted = numbers._by_cumulative_sums(case, *inputs), numbers._output(case, *inputs, backend="reference")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@needs_compiler
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda output: output.bfloat16().float(), "native, forward 0: error"),
        (lambda output: output * 2 - output.detach(), "native, gradient 0: error"),
    ],
)
def test_what_is_wrong_at_length_is_found(change, words, monkeypatch, own_threads):
    attend = numbers._output

    def changed(case, query, key, value, backend="chunked"):
        output = attend(case, query, key, value, backend)
        return change(output) if query.dtype == torch.float32 else output

    monkeypatch.setattr(numbers, "_output", changed)
    assert any(words in fault for fault in long_faults(numbers.Long(1, False, 0.0), 2000))


@pytest.mark.full
def test_hundreds_of_cases_find_nothing(tmp_path):
    assert faults(400, 1_000_000, tmp_path) == []


def test_what_a_rounding_of_the_inputs_changes_as_much_is_no_fault_and_an_error_there_is(monkeypatch):
    """Seed 236963: a key's gradient through the norm of three large numbers, in bfloat16."""
    found = Found()
    numbers.attack(236963, found)
    assert found.faults == []
    assert found.outcomes["beyond a bound, as by a rounding of the inputs"] == 1
    attend = LocalAttention.forward
    monkeypatch.setattr(
        LocalAttention,
        "forward",
        lambda self, query, *given, **options: (
            attend(self, query, *given, **options) * (1.1 if query.dtype == torch.bfloat16 else 1.0)
        ),
    )
    numbers.attack(236963, found)
    assert any("forward 0: error" in fault for fault in found.faults)
