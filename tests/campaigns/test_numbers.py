"""The campaign of numbers finds nothing in ours, and finds what is planted; a case comes back by its seed."""

import pytest
import torch

from campaigns import drawn, numbers
from polysketch import attention
from polysketch.attention.softmax import SoftmaxAttention


def faults(count, seed, folder):
    return numbers.campaign(count, seed, folder).faults


def test_dozens_of_cases_find_nothing(tmp_path):
    found = numbers.campaign(25, 0, tmp_path)
    assert found.faults == []
    assert len(found.outcomes) > 12


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


def test_a_leak_of_padding_is_found(monkeypatch, tmp_path):
    def as_given(self, query, key, value, key_mask, hidden=None):
        return query, key, value, hidden

    monkeypatch.setattr(attention.Mechanism, "real_inputs", as_given)
    assert any("error nan" in fault or "error inf" in fault for fault in faults(40, 0, tmp_path))


@pytest.mark.full
def test_hundreds_of_cases_find_nothing(tmp_path):
    assert faults(400, 1_000_000, tmp_path) == []
