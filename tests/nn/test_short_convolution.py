"""Gated short convolutions: their formula, that they look back and never ahead, and their state."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.nn import SHORT_CONVOLUTION, ShortConvolution, TransformerBlock, build_mixer, check_mixer, mixer_class

BATCH, LENGTH, HIDDEN = 2, 9, 6


def layer(dtype: torch.dtype = torch.float64, **options) -> ShortConvolution:
    torch.manual_seed(0)
    made = ShortConvolution(HIDDEN, **options).to(dtype)
    for parameter in made.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))  # biases too
    return made


def tokens(length: int = LENGTH, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, length, HIDDEN, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"filter_size": 4, "expansion": 1}, {"filter_size": 1}])
def test_it_is_its_formula_token_by_token(options: dict):
    mixer, x = layer(**options), tokens()
    width, size = mixer.filter.shape
    inputs = x @ mixer.input_gate.weight[:width].T + mixer.input_gate.bias[:width]
    gates = x @ mixer.input_gate.weight[width:].T + mixer.input_gate.bias[width:]
    for position in range(LENGTH):
        seen = sum(
            inputs[:, position - back] * mixer.filter[:, size - 1 - back] for back in range(min(size, position + 1))
        )
        expected = (F.silu(seen) * gates[:, position]) @ mixer.output.weight.T + mixer.output.bias
        torch.testing.assert_close(mixer(x)[:, position], expected)


def test_a_token_is_seen_by_itself_and_the_two_after_it():
    mixer, x = layer(), tokens()
    other = x.clone()
    other[:, 4] += 1
    moved = (mixer(x) - mixer(other)).abs().amax((0, 2))
    assert (moved[4:7] > 1e-3).all()
    assert moved[:4].max() == moved[7:].max() == 0


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [4, 1, 4], [2, 7], [LENGTH]])
def test_forward_equals_extend_over_a_split_with_a_state_of_constant_size(sizes: list[int]):
    mixer, x = layer(), tokens()
    state = mixer.init_state(BATCH)
    size, outputs = state.nbytes, []
    for part in x.split(sizes, dim=1):
        output, returned = mixer.extend(part, state)
        assert returned is state
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), mixer(x))
    assert state.nbytes == size == BATCH * (2 * 2 * HIDDEN * 8 + 8)
    assert state.position.tolist() == [LENGTH] * BATCH


def test_left_padding_changes_nothing_whatever_it_holds():
    mixer, x = layer(), tokens()
    mask = torch.ones(BATCH, LENGTH + 3, dtype=torch.bool)
    mask[:, :3] = False
    padded = torch.cat([tokens(3, seed=7), x], 1)
    torch.testing.assert_close(mixer(padded, key_mask=mask)[:, 3:], mixer(x))
    _, state = mixer.extend(padded[:, :5], mixer.init_state(BATCH), key_mask=mask[:, :5])
    assert state.position.tolist() == [2] * BATCH
    torch.testing.assert_close(mixer.extend(padded[:, 5:], state)[0], mixer(x)[:, 2:])


def test_a_cloned_state_rolls_back_and_a_reordered_one_follows_its_rows():
    mixer, x, more = layer(), tokens(), tokens(2, seed=3)
    _, state = mixer.extend(x, mixer.init_state(BATCH))
    kept = state.clone()
    expected, _ = mixer.extend(more, state)
    indices = torch.tensor([1, 0, 1])
    found, reordered = mixer.extend(more[indices], kept.reorder(indices))
    torch.testing.assert_close(found, expected[indices])
    assert reordered.position.tolist() == [LENGTH + 2] * 3
    assert kept.position.tolist() == [LENGTH] * BATCH


def test_its_gradient_is_that_of_finite_differences():
    mixer, x = layer(), tokens(4).requires_grad_()
    parameters = dict(mixer.named_parameters())

    def output(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(mixer, dict(zip(parameters, values, strict=True)), x)

    assert torch.autograd.gradcheck(output, (x, *parameters.values()), fast_mode=True)


def test_under_autocast_it_is_close_and_its_state_stays_float32():
    mixer, x = layer(torch.float32), tokens().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = mixer(x)
        decoded, state = mixer.extend(x, mixer.init_state(BATCH))
    assert state.tail.dtype == torch.float32
    for output in (found, decoded):
        assert 0 < (output - mixer(x)).norm() < 0.02 * mixer(x).norm()


def test_it_starts_as_documented():
    torch.manual_seed(0)
    mixer = ShortConvolution(256)
    mixer.reset_parameters(residual_scale=0.25)
    assert mixer.input_gate.weight.std().item() == pytest.approx(1 / 16, rel=0.03)
    assert mixer.filter.std().item() == pytest.approx(3**-0.5, rel=0.05)
    assert mixer.output.weight.std().item() == pytest.approx(0.25 * 512**-0.5, rel=0.03)
    assert mixer.input_gate.bias.abs().max() == mixer.output.bias.abs().max() == 0


def test_it_stands_in_a_block_and_is_refused_what_needs_attention():
    block, x = TransformerBlock(HIDDEN, layer()).double(), tokens()
    middle = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(block(x), middle + block.feedforward(block.feedforward_norm(middle)))
    assert block.mechanism is None
    with pytest.raises(TypeError, match="a block of ShortConvolution has no queries and keys"):
        block.attention_inputs(x)
    with pytest.raises(ValueError, match="causal only"):
        block(x, causal=False)


def test_layers_are_built_by_name_with_the_options_of_each():
    sizes = {"hidden_size": HIDDEN, "num_heads": 1, "head_dim": 6}
    assert build_mixer("short-convolution", {"filter_size": 5}, **sizes).filter.shape == (2 * HIDDEN, 5)
    attending = build_mixer("polysketch-paper", {"decay_gate": True, "local_chunk": None}, **sizes)
    assert attending.mechanism.decay_gate.weight.shape[1] == HIDDEN
    assert mixer_class(SHORT_CONVOLUTION) is mixer_class("short-convolution") is ShortConvolution


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "convolution",
            {},
            "unknown attention mechanism 'convolution'; known .*; layers without attention: short-conv",
        ),
        ("short-convolution", {"size": 3}, "'short-convolution' has no option 'size'; it takes filter_size, expansion"),
        ("short-convolution", {"hidden_size": 3}, "has no option 'hidden_size'"),
        ("softmax", {"filter_size": 3}, "'softmax' has no option 'filter_size'"),
    ],
)
def test_unknown_layers_and_options_are_refused_with_those_that_exist(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        check_mixer(name, options)


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="filter_size must be at least 1, got 0"):
        ShortConvolution(HIDDEN, filter_size=0)
