"""Muon: updates are orthogonal matrices of AdamW's size, and every parameter has one of the two rules."""

import copy

import pytest
import torch
from torch import Tensor, nn

from polysketch.models import TransformerLM, preset
from polysketch.nn.joined_linear import JoinedLinear
from polysketch.training.muon import Muon, muon_matrices, orthogonalize
from polysketch.training.step import build_optimizer


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_singular_values(values: Tensor, rows: int, columns: int) -> Tensor:
    left, _, right = torch.linalg.svd(normal(rows, columns), full_matrices=False)
    return left * values @ right


SHAPES = [(48, 48), (32, 200), (200, 32)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_singular_values_come_to_lie_in_the_known_band_whatever_the_scale(rows, columns, scale):
    values = torch.logspace(-1.2, 0, min(rows, columns)) * scale
    found = torch.linalg.svdvals(orthogonalize(with_singular_values(values, rows, columns)))
    assert found.min() > 0.67
    assert found.max() < 1.15


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_singular_vectors_stay_and_singular_values_go_through_the_published_polynomial(rows, columns):
    values = torch.logspace(-4, 0, min(rows, columns))
    left, _, right = torch.linalg.svd(normal(rows, columns), full_matrices=False)
    expected = values / values.norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    found = orthogonalize(left * values @ right)
    torch.testing.assert_close(found, left * expected @ right, rtol=1e-4, atol=1e-5)


def test_zero_is_orthogonalised_to_zero():
    assert torch.equal(orthogonalize(torch.zeros(4, 7)), torch.zeros(4, 7))


def muon(weight: nn.Parameter, parts=None, weight_decay: float = 0.0) -> Muon:
    matrices = {weight: parts or (len(weight),)}
    return Muon(matrices, [{"params": []}], learning_rate=0.01, betas=(0.9, 0.95), weight_decay=weight_decay)


def test_a_zero_gradient_changes_nothing_and_no_gradient_neither():
    weight = nn.Parameter(normal(32, 40))
    before = weight.detach().clone()
    optimizer = muon(weight)
    optimizer.step()
    assert not optimizer.state
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weight, before)


def test_weight_decay_is_decoupled():
    weight = nn.Parameter(normal(32, 40))
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    muon(weight, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), before * (1 - 0.01 * 0.5))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_updates_have_the_size_of_adamws(rows, columns):
    """0.2 of the learning rate; AdamW's are up to the learning rate itself where gradients agree, as here at first."""
    weight = nn.Parameter(torch.zeros(rows, columns))
    weight.grad = with_singular_values(torch.logspace(-1, 0, min(rows, columns)), rows, columns)
    muon(weight).step()
    size = weight.detach().square().mean().sqrt() / 0.01
    assert 0.2 * 0.67 < size < 0.2 * 1.15


def step_with(optimizer: torch.optim.Optimizer, gradients: dict[nn.Parameter, Tensor]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_it_is_pytorchs_muon_but_for_the_rounding_of_its_bfloat16(rows, columns):
    """PyTorch's own rounds to three digits; the scale, the momentum and the decay are exact in both."""
    ours, theirs = (nn.Parameter(normal(rows, columns)) for _ in range(2))
    before = ours.detach().clone()
    options = {"momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizer, other = muon(ours, weight_decay=0.1), torch.optim.Muon([theirs], 0.01, **options)
    for seed in range(4):
        gradient = with_singular_values(torch.logspace(-1, 0, min(rows, columns)), rows, columns) * 2.0**seed
        gradient = gradient + 0.1 * normal(rows, columns, seed=seed) / (rows * columns) ** 0.5
        step_with(optimizer, {ours: gradient})
        step_with(other, {theirs: gradient})
    difference = (ours - theirs).detach().norm() / (theirs - before).detach().norm()
    assert difference < 0.02


def test_each_matrix_of_several_in_one_is_orthogonalised_by_itself():
    parts = (40, 32, 64)
    joined = nn.Parameter(normal(sum(parts), 48))
    alone = [nn.Parameter(part.clone()) for part in joined.detach().split(parts)]
    gradient = normal(sum(parts), 48, seed=1)
    step_with(muon(joined, parts), {joined: gradient})
    for weight, part in zip(alone, gradient.split(parts), strict=True):
        step_with(muon(weight), {weight: part})
    torch.testing.assert_close(joined.detach(), torch.cat([weight.detach() for weight in alone]))


def test_a_quadratic_is_learned():
    """The weight comes within its last steps of a target that one step does not reach."""
    weight, target = nn.Parameter(torch.zeros(32, 48)), normal(32, 48) * 0.1
    optimizer = muon(weight)
    errors = []
    for step in range(100):
        optimizer.param_groups[0]["lr"] = 0.05 * (100 - step) / 100
        optimizer.zero_grad()
        error = (weight - target).square().sum()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 1e-3 * errors[0]


PATTERN = ("polysketch-paper", "short-convolution", "llops", "hedgehog", "focused", "based")


def make_model(**changes) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(preset("tiny", **changes))


@pytest.mark.parametrize(
    "changes", [{"num_layers": 6, "attention": PATTERN}, {"hidden_size": 8, "num_heads": 1}, {"num_layers": 1}]
)
def test_every_parameter_is_in_one_group_alone(changes):
    model = make_model(**changes)
    optimizer = build_optimizer(model, learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.1, name="muon")
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters()}


def names_of_matrices(model: nn.Module) -> set[str]:
    chosen = {id(weight) for weight in muon_matrices(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def test_projections_gated_units_and_sketch_networks_are_muons_and_all_else_adamws():
    around = {"projection_convolution": 40, "query_key_norm": True, "head_gate": True}
    found = names_of_matrices(make_model(num_layers=6, attention=PATTERN, **around))
    networks = [
        f"networks.{index}.{part}_{way}" for index in "01" for part in ("input", "middle") for way in ("up", "down")
    ]
    expected = {f"blocks.0.attention.mechanism.feature_map.{name}.weight" for name in networks}
    expected |= {f"blocks.{layer}.feedforward.{name}.weight" for layer in range(6) for name in ("gate_up", "down")}
    expected |= {f"blocks.{layer}.attention.output.weight" for layer in range(6)}
    expected |= {f"blocks.{layer}.attention.query_key_value.weight" for layer in (0, 2, 3, 4, 5)}
    assert found == expected | {"blocks.1.attention.input_gate.weight"}


def test_a_matrix_with_a_tiny_side_is_adamws():
    gate, wide = nn.Linear(128, 20), nn.Linear(128, 32)
    assert list(muon_matrices(nn.ModuleList([gate, wide]))) == [wide.weight]
    joined = JoinedLinear(128, (64, 20), bias=False)
    assert not muon_matrices(joined)


def test_an_embedding_is_adamws_also_where_it_is_the_output_layer():
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(300, 64), "output": nn.Linear(64, 300), "other": nn.Linear(64, 64)}
    )
    model["output"].weight = model["embedding"].weight
    assert list(muon_matrices(model)) == [model["other"].weight]


def test_what_is_not_trained_is_left_out():
    model = nn.Linear(64, 64)
    model.requires_grad_(False)
    assert not muon_matrices(model)


def test_the_parts_of_the_layers_are_their_queries_keys_values_gates_and_inputs():
    model = make_model(num_layers=2, attention=("softmax", "short-convolution"), num_kv_heads=1)
    parts = {name: muon_matrices(model)[p] for name, p in model.named_parameters() if p in muon_matrices(model)}
    assert parts["blocks.0.attention.query_key_value.weight"] == (128, 64, 64)
    assert parts["blocks.1.attention.input_gate.weight"] == (256, 256)
    assert parts["blocks.0.feedforward.gate_up.weight"] == (336, 336)
    assert parts["blocks.0.feedforward.down.weight"] == (128,)


def test_what_is_not_muons_is_trained_as_by_adamw_alone():
    model = make_model(num_layers=1)
    other = copy.deepcopy(model)
    options = {"learning_rate": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours, theirs = build_optimizer(model, name="muon", **options), build_optimizer(other, **options)
    gradients = [normal(*p.shape, seed=index) for index, p in enumerate(model.parameters())]
    for _ in range(3):
        step_with(ours, dict(zip(model.parameters(), gradients, strict=True)))
        step_with(theirs, dict(zip(other.parameters(), gradients, strict=True)))
    matrices = names_of_matrices(model)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two) == (name not in matrices), name


def test_pytorchs_own_way_of_saving_goes_on_with_the_same_bits():
    model = make_model(num_layers=1)
    options = {"learning_rate": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "name": "muon"}
    optimizer = build_optimizer(model, **options)

    def step(owner: nn.Module, by: torch.optim.Optimizer, seed: int) -> None:
        step_with(by, {p: normal(*p.shape, seed=seed + index) for index, p in enumerate(owner.parameters())})

    step(model, optimizer, 0)
    other = copy.deepcopy(model)
    resumed = build_optimizer(other, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer, 1)
    step(other, resumed, 1)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_another_optimizer_is_refused():
    with pytest.raises(ValueError, match="--optimizer: expected adamw or muon, found 'sgd'"):
        build_optimizer(nn.Linear(2, 2), learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.1, name="sgd")
