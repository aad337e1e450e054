"""A batch that cannot fit is refused before anything is computed, and one that can fit never is."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from polysketch.attention import MECHANISMS
from polysketch.models import (
    EncoderConfig,
    EncoderDecoderConfig,
    ModelConfig,
    TransformerEncoderDecoder,
    TransformerLM,
    preset,
)
from polysketch.training import memory, train
from polysketch.training.memory import check_memory, least_bytes_of_a_token

CAUSAL = [name for name, kind in MECHANISMS.items() if kind.is_causal]


def kept_by(model: nn.Module, compute: Callable[[], torch.Tensor]) -> int:
    """Bytes that autograd keeps of a computation, weights apart."""
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, int] = {}

    def note(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        loss = compute()
    assert loss.requires_grad
    return sum(size for place, size in kept.items() if place not in weights)


def kept_for_backward(model: TransformerLM, tokens: int) -> float:
    """Bytes of a token that autograd keeps, weights apart."""
    ids = torch.randint(0, model.config.vocab_size, (2, tokens + 1))
    return kept_by(model, lambda: model.loss(ids[:, :-1], ids[:, 1:])) / (2 * tokens)


@pytest.mark.parametrize("attention", CAUSAL)
def test_the_estimate_is_below_what_is_kept_but_not_far(attention):
    model = TransformerLM(preset("tiny", vocab_size=300, num_layers=2, attention=attention))
    least = least_bytes_of_a_token(model, 4)
    assert least < kept_for_backward(model, 256) < 10 * least


def test_it_is_below_what_a_model_keeps_whose_decoder_writes_little():
    sizes = {"vocab_size": 300, "num_layers": 2, "hidden_size": 64, "num_heads": 2}
    model = TransformerEncoderDecoder(EncoderDecoderConfig(EncoderConfig(**sizes), ModelConfig(**sizes)))
    source, target = torch.randint(300, (2, 256)), torch.randint(300, (2, 9))
    kept = kept_by(model, lambda: model.loss(source, target[:, :-1], target[:, 1:]))
    assert least_bytes_of_a_token(model, 4) < kept / source.numel()


def test_with_checkpointing_it_is_below_what_is_kept_too():
    model = TransformerLM(preset("tiny", vocab_size=300))
    model.activation_checkpointing = True
    least = least_bytes_of_a_token(model, 4, checkpointing=True)
    assert 4 * 4 * 128 < least < kept_for_backward(model, 256)


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}])
def test_a_batch_of_millions_is_refused_and_leaves_nothing(make_config, changes):
    config = make_config(batch_size=10_000_000, **changes)
    with pytest.raises(
        ValueError, match=r"--batch-size 10000000: expected .* fits into the .* GB that are free"
    ) as info:
        train(config, progress=False)
    assert not (config.out / "config.json").exists()
    found = int(str(info.value).partition(": --batch-size ")[2].partition(" ")[0])
    assert 0 < found < 10_000_000


def test_what_is_said_to_fit_is_taken_and_parts_count(make_config, monkeypatch):
    model = TransformerLM(preset("tiny", vocab_size=300))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)

    def check(batch_size: int, accumulation: int = 1, shared: int = 1) -> None:
        config = make_config(batch_size=batch_size, accumulation=accumulation, context=1024)
        check_memory(model, config, torch.device("cpu"), torch.float32, shared)

    def said(*sizes: int) -> int:
        with pytest.raises(ValueError) as info:
            check(*sizes)
        return int(str(info.value).partition(": --batch-size ")[2].partition(" ")[0])

    fitting = said(1_000)
    check(fitting)
    check(4 * fitting, 4)
    check(4 * fitting, 1, 4)
    assert said(8_000, 8) == 8 * fitting
    monkeypatch.setattr(memory, "free_bytes", lambda device: 15 * 10**6)
    with pytest.raises(ValueError, match="no row is likely to fit: a smaller --preset"):
        check(1_000)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    check(10**9)


def test_free_memory_is_the_least_of_what_the_system_and_the_container_give(tmp_path):
    free = memory._free_in_main_memory
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert free(meminfo, cgroup) is None
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert free(meminfo, cgroup) == 512_000
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000\n")
    assert free(meminfo, cgroup) == 512_000
    (cgroup / "memory.max").write_text("5000\n")
    assert free(meminfo, cgroup) == 4_000
