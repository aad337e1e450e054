"""The programs of norm and rotation of heads under Triton's interpreter, against `QueryKeyNorm` and `apply_rotation`.

TRITON_INTERPRET=1 python -m pytest tests/ops/triton
"""

import math

import pytest
import torch
import torch.nn.functional as F
import triton as compiler
import triton.language as tl
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from attention.covering import first_always, pairs_always
from polysketch.attention import unit_scale
from polysketch.feature_maps import sketch_products
from polysketch.nn import QueryKeyNorm, Rotation, SelfAttention, apply_rotation, build_mixer, rotation_at
from polysketch.ops.rotated_heads import api, programs_take, rotated_heads, rotated_heads_backend
from polysketch.ops.rotated_heads.triton.programs import backward, forward
from polysketch.ops.rotated_heads.triton.programs.backward import add_up as add_own
from polysketch.ops.triton import forced

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

SMALL = {"TOKENS": 16, "GROUP": 2, "num_warps": 4, "num_stages": 1}
PROGRAMS = ("rotated_heads", "rotated_heads_backward")
BOTH = ("normed", "rotated")


@pytest.fixture
def small_blocks():
    """Several tiles of tokens and groups of heads, the last of them not full."""
    with forced(**dict.fromkeys(PROGRAMS, SMALL)):
        yield


@pytest.fixture
def programs_on_a_cpu(nothing_asked, monkeypatch):
    """A CPU that "auto" of this op alone takes for a device of the programs, which has asked nothing yet."""
    monkeypatch.setattr(api, "AUTO_DEVICES", {"cpu"})


def case(shape=(1, 3, 19, 20), *, parts="norm and rotation", positions="shared"):
    """x of another size in every row, as a projection lies in memory; scale, cos and sin, None for what is no part."""
    batch, heads, length, width = shape
    generator = torch.Generator().manual_seed(length)
    normal = lambda *sizes: torch.randn(sizes, generator=generator)  # noqa: E731
    x = (normal(batch, length, heads + 1, width) * normal(batch, length, heads + 1, 1).exp()).transpose(1, 2)[:, :heads]
    scale = 1 + normal(heads * width) / 4 if "norm" in parts else None
    of = {"shared": (), "of one row": (1, 1), "of rows": (batch, 1)}[positions]
    angles = normal(*of, length, width // 2)
    return x, scale, *((angles.cos(), angles.sin()) if "rotation" in parts else (None, None))


def by_modules(x, scale, cos, sin, keep_normed):
    """What the two modules give, one after the other."""
    normed = x
    if scale is not None:
        normed = functional_call(QueryKeyNorm(x.shape[1], x.shape[3]), {"scale": scale}, (x,))
    rotated = None if cos is None else apply_rotation(normed, Rotation(cos, sin))
    return normed if scale is not None and (keep_normed or cos is None) else None, rotated


def by_programs(x, scale, cos, sin, keep_normed):
    return rotated_heads(x, scale, cos, sin, keep_normed=keep_normed, backend="triton")


def outputs_and_gradients(x, scale, cos, sin, compute=by_programs, *, keep_normed=True, wanted=BOTH):
    """Normed and rotated heads, as far as there are any, and gradients of x and scale from those that are wanted."""
    leaves = [None if one is None else one.detach().requires_grad_() for one in (x, scale)]  # a copy would be dense
    made = dict(zip(BOTH, compute(*leaves, cos, sin, keep_normed), strict=True))
    outputs = {name: one for name, one in made.items() if one is not None}
    generator = torch.Generator().manual_seed(7)
    cotangents = {
        name: torch.randn(one.shape, generator=generator).to(x.dtype).to(one) for name, one in outputs.items()
    }
    given = [name for name in outputs if name in wanted]
    leaves = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad([outputs[name] for name in given], leaves, [cotangents[name] for name in given])
    return [*(output.detach() for output in outputs.values()), *gradients]


def relative_errors(given, dtype=torch.float32, **options):
    """Of outputs and gradients, the programs' in `dtype` against the modules in float64."""
    x, scale, *turn = given
    rounded = [None if one is None else one.to(dtype) for one in (x, scale)]
    found = outputs_and_gradients(*rounded, *turn, **options)
    exact = [None if one is None else one.double() for one in rounded]
    expected = outputs_and_gradients(*exact, *turn, by_modules, **options)
    assert {a.dtype for a in found} == {dtype}
    # max() would pass over what is not a number
    return [((a - b).norm() / b.norm()).nan_to_num(math.inf).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize(
    ("parts", "positions", "keep_normed"),
    pairs_always(
        {
            "parts": ["norm and rotation", "norm", "rotation"],
            "positions": ["shared", "of rows", "of one row"],
            "keep_normed": [True, False],
        }
    ),
)
@pytest.mark.usefixtures("small_blocks")
def test_outputs_and_gradients_are_those_of_the_two_modules(parts, positions, keep_normed):
    given = case((2, 3, 9, 20), parts=parts, positions=positions)
    errors = relative_errors(given, keep_normed=keep_normed)
    outputs = 2 if parts == "norm and rotation" and keep_normed else 1
    assert len(errors) == outputs + (1 if parts == "rotation" else 2)
    assert max(errors) < 1e-6


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("wanted", [("normed",), ("rotated",), BOTH])
def test_either_gradient_may_be_missing(wanted, launched):
    assert max(relative_errors(case(), wanted=wanted)) < 1e-6
    assert launched == list(PROGRAMS)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("heads", "width", "tokens"),
    first_always([(5, 34, 33), (1, 2, 1), (4, 64, 16), (3, 130, 5), (2, 256, 3), (2, 6, 40)], 3, several=True),
)
def test_of_any_even_width_and_number_of_heads_and_tokens(heads, width, tokens):
    assert max(relative_errors(case((2, heads, tokens, width)))) < 1e-6


@pytest.mark.parametrize("width", first_always([20, 96, 200]))
def test_the_shipped_configurations_agree_with_the_modules(width):
    assert max(relative_errors(case((1, 6, 37, width)))) < 1e-6


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("parts", ["norm and rotation", "rotation"])
def test_half_precision_differs_by_its_rounding(parts):
    assert max(relative_errors(case(parts=parts), torch.float16)) < 1e-3


@pytest.mark.usefixtures("small_blocks")
def test_what_is_rotated_are_the_normed_heads_as_they_are_rounded():
    x, scale, cos, sin = case()
    normed, rotated = by_programs(x.half(), scale, cos, sin, True)
    exact = apply_rotation(normed.double(), Rotation(cos, sin)).half()
    assert (rotated == exact).double().mean() > 0.999
    unrounded = apply_rotation(by_modules(x.half().double(), scale, None, None, True)[0], Rotation(cos, sin)).half()
    assert (rotated == unrounded).double().mean() < 0.9


@pytest.mark.usefixtures("small_blocks")
def test_factors_may_be_of_another_dtype_than_heads():
    """As under autocast; their gradient has theirs."""
    x, scale, *turn = case()
    found = outputs_and_gradients(x.half(), scale, *turn)
    expected = outputs_and_gradients(x.half().double(), scale.double(), *turn, by_modules)
    assert [one.dtype for one in found] == [torch.float16] * 3 + [torch.float32]
    assert max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)) < 1e-3


@pytest.mark.usefixtures("small_blocks")
def test_any_strides_give_the_same_and_the_gradient_lies_as_a_projection_does():
    x, *others = case((2, 3, 5, 12))
    plain = outputs_and_gradients(x.contiguous(), *others)
    inside = x.transpose(1, 3).contiguous().transpose(1, 3)
    part = torch.cat([x, x], 2)[:, :, :5]
    for one in (x, inside, part):
        assert not one.is_contiguous()
        found = outputs_and_gradients(one, *others)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert all(one.is_contiguous() for one in plain[:2])
    assert plain[2].transpose(1, 2).is_contiguous()


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
def test_the_same_call_gives_the_same_bits():
    given = case((1, 3, 50, 20))
    first, second = (outputs_and_gradients(*given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("small_blocks")
def test_no_tokens_have_no_heads_and_a_gradient_of_zero():
    found = outputs_and_gradients(*case((2, 3, 0, 20)))
    assert [one.shape for one in found] == [(2, 3, 0, 20)] * 3 + [(60,)]
    assert not found[3].any()


@pytest.mark.usefixtures("small_blocks")
def test_a_token_that_is_no_number_reaches_no_other():
    x, *others = case()
    before = outputs_and_gradients(x, *others)[:3]
    x[0, 1, 7] = torch.nan
    for found, intact in zip(outputs_and_gradients(x, *others)[:3], before, strict=True):
        assert found[0, 1, 7].isnan().all()
        found[0, 1, 7] = intact[0, 1, 7]
        assert torch.equal(found, intact)


@pytest.mark.usefixtures("small_blocks")
def test_vectors_of_zeros_stay_zeros_and_have_the_gradient_of_the_modules():
    x, *others = case()
    x[0, :, 3] = 0
    found, expected = outputs_and_gradients(x, *others), outputs_and_gradients(x, *others, by_modules)
    assert not found[1][0, :, 3].any()
    torch.testing.assert_close(found[2][0, :, 3], expected[2][0, :, 3])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("parts", ["norm and rotation", "rotation"])
def test_of_heads_nothing_but_the_input_of_a_norm_is_kept_for_backward(parts):
    x, scale, cos, sin = case(parts=parts)
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda tensor: tensor):
        by_programs(x.requires_grad_(), scale, cos, sin, True)
    expected = [cos, sin] if scale is None else [x, scale, cos, sin]
    assert kept == [one.data_ptr() for one in expected]


@pytest.mark.parametrize("keep_normed", first_always([False, True]))
@pytest.mark.usefixtures("small_blocks")
def test_the_operator_passes_opcheck(keep_normed):
    x, scale, cos, sin = case((1, 3, 9, 6))
    given = x.requires_grad_(), scale.requires_grad_(), cos, sin, 1e-5, keep_normed
    torch.library.opcheck(torch.ops.polysketch.rotated_heads.default, given)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, scale, cos, sin: (x.bfloat16(), scale, cos, sin), "no bfloat16 products"),
        (lambda x, scale, cos, sin: (x.double(), scale, cos, sin), r"got torch\.float64"),
        (lambda x, scale, cos, sin: (x, None, None, None), "got neither"),
        (lambda x, scale, cos, sin: (x[..., :19], scale, None, None), r"even number.*got \(1, 3, 19, 19\)"),
        (lambda x, scale, cos, sin: (torch.ones(1, 1, 4, 258), torch.ones(258), None, None), "up to 256"),
        (lambda x, scale, cos, sin: (x, scale.long(), None, None), r"factor.*torch\.int64"),
        (lambda x, scale, cos, sin: (x, scale[:20], None, None), r"factor.*got \(20,\)"),
        (lambda x, scale, cos, sin: (x, None, cos.half(), sin), r"float32 angles.*torch\.float16"),
        (lambda x, scale, cos, sin: (x, None, cos, sin[:4]), r"float32 angles.*and \(4, 10\)"),
        (lambda x, scale, cos, sin: (x, None, cos, None), "and none"),
        (lambda x, scale, cos, sin: (x[:1, :1, :1].expand(1, 2**10, 2**21, 20), None, cos, sin), "fewer than 2"),
    ],
)
def test_what_the_programs_cannot_take_is_refused_with_the_reason(change, reason):
    with pytest.raises(RuntimeError, match=reason):
        rotated_heads_backend(*change(*case()), backend="triton")


def test_a_cpu_is_no_device_of_the_programs_for_auto():
    given = case()
    assert rotated_heads_backend(*given, "triton") == "triton"
    assert rotated_heads_backend(*given) == "reference"
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        rotated_heads_backend(*given, "cuda")


@pytest.mark.filterwarnings("ignore:`torch.jit.script. is deprecated:DeprecationWarning")
def test_a_tensor_with_a_tangent_is_refused_where_a_program_runs():
    x, scale, cos, sin = case()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        by_programs(forward_ad.make_dual(x, x), scale, cos, sin, True)


@pytest.mark.parametrize("parts", ["norm and rotation", "norm", "rotation"])
@pytest.mark.parametrize("keep_normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_is_the_two_modules(parts, keep_normed, dtype):
    x, scale, *turn = case(parts=parts)
    given = x.to(dtype), None if scale is None else scale.to(dtype), *turn
    found = rotated_heads(*given, keep_normed=keep_normed, backend="reference")
    for one, other in zip(found, by_modules(*given, keep_normed), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def layer(mechanism: str) -> SelfAttention:
    torch.manual_seed(0)
    made = build_mixer(mechanism, {}, hidden_size=24, num_heads=4, head_dim=6, query_key_norm=True)
    torch.nn.init.normal_(made.query_key_norm.scale, 1.0, 0.2)
    return made


def of_layer(made: SelfAttention, hidden: torch.Tensor, rotation: Rotation) -> list[torch.Tensor]:
    """What a layer gives, and gradients of its input and all its weights."""
    output = made(hidden, rotation)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    return [output.detach(), *torch.autograd.grad(output, [hidden, *made.parameters()], cotangent)]


@pytest.mark.usefixtures("programs_on_a_cpu")
@pytest.mark.parametrize(("mechanism", "positions"), [("polysketch", "shared"), ("softmax", "of rows")])
def test_a_layer_gives_the_same_by_the_programs_as_without(mechanism, positions, monkeypatch, launched):
    made = layer(mechanism)
    assert made.mechanism.reads_unrotated == (mechanism == "polysketch")
    hidden = torch.randn(2, 21, 24).requires_grad_()
    at = torch.arange(21)
    rotation = rotation_at(at if positions == "shared" else torch.stack([at, at + 5]), 6)
    found = of_layer(made, hidden, rotation)
    assert [launched.count(name) for name in PROGRAMS] == [2, 2]  # one of each to compare them with the definition
    monkeypatch.setattr(api, "AUTO_DEVICES", set())
    launched.clear()
    expected = of_layer(made, hidden, rotation)
    assert not set(PROGRAMS) & set(launched)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()  # some weights get no gradient before they have learnt
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.no_grad()
@pytest.mark.usefixtures("programs_on_a_cpu")
def test_tokens_decoded_one_by_one_by_the_programs_give_what_the_whole_gives(launched):
    made, hidden = layer("softmax"), torch.randn(2, 5, 24)
    whole = made(hidden, rotation_at(torch.arange(5), 6))
    state, steps = made.init_state(2), []
    for at in range(5):
        step, state = made.extend(hidden[:, at : at + 1], state, rotation_at(torch.tensor([[at], [at]]), 6))
        steps.append(step)
    assert launched.count("rotated_heads") == 7  # the first compared before
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("programs_on_a_cpu")
def test_programs_that_disagree_are_named_and_the_layer_goes_on_without(monkeypatch):
    made, hidden, rotation = layer("softmax"), torch.randn(1, 9, 24), rotation_at(torch.arange(9), 6)
    monkeypatch.setattr(api, "AUTO_DEVICES", set())
    expected = made(hidden, rotation)
    monkeypatch.setattr(api, "AUTO_DEVICES", {"cpu"})
    monkeypatch.setattr(forward, "load_factors", of_ones)
    with pytest.warns(UserWarning, match="disagree with plain PyTorch.*rotated_heads"):
        found = made(hidden, rotation)
    assert torch.equal(found, expected)


@pytest.mark.full
@pytest.mark.usefixtures("programs_on_a_cpu")
def test_a_compiler_and_an_exported_graph_have_pytorchs_operations(launched):
    made, hidden, rotation = layer("softmax").eval(), torch.randn(1, 9, 24), rotation_at(torch.arange(9), 6)
    exported = torch.export.export(made, (hidden, rotation)).graph_module
    operations = " ".join(str(part.graph) for part in exported.modules() if isinstance(part, torch.fx.GraphModule))
    assert "rotated_heads" not in operations
    assert "rms_norm" in operations
    torch.compiler.reset()
    taken = torch.compile(lambda x: programs_take(x, None, *rotation), fullgraph=True, backend="eager")
    assert programs_take(hidden.view(1, 4, 9, 6), None, *rotation)
    assert not taken(hidden.view(1, 4, 9, 6))


@compiler.jit
def of_ones(pointer, HALF: tl.constexpr, LANES: tl.constexpr):
    return tl.full((LANES,), 1.0, tl.float32), tl.full((LANES,), 1.0, tl.float32)


@compiler.jit
def turned_back(cos, sin, row, seen, HALF: tl.constexpr, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    cosine = forward.load_rows(cos, row, HALF, lanes, seen, HALF)
    return cosine, -forward.load_rows(sin, row, HALF, lanes, seen, HALF)


@compiler.jit
def nothing_along(first, second, standard_first, standard_second, WIDTH: tl.constexpr):
    return tl.sum(first, 1) * 0.0


@compiler.jit
def without_the_second(sums, of_first, of_second, HALF: tl.constexpr, LANES: tl.constexpr):
    add_own(sums, of_first, of_first, HALF, LANES)


@pytest.mark.full
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("module", "name", "broken", "wrong"),
    [
        (forward, "load_factors", of_ones, [True, True, False, False]),
        (forward, "load_angles", turned_back, [False, True, False, False]),
        (backward, "load_factors", of_ones, [False, False, True, False]),
        (backward, "load_angles", turned_back, [False, False, True, True]),
        (backward, "mean_product", nothing_along, [False, False, True, False]),
        (backward, "add_up", without_the_second, [False, False, False, True]),
    ],
)
def test_a_broken_part_makes_the_comparison_fail_for_what_it_is_part_of(module, name, broken, wrong, monkeypatch):
    given = case()
    monkeypatch.setattr(module, name, broken)
    assert [error > 1e-2 for error in relative_errors(given)] == wrong


@pytest.mark.usefixtures("programs_on_a_cpu")
def test_lengths_within_polysketch_are_those_of_the_formulas(launched, monkeypatch):
    """Queries and keys of one length, times a factor a head, and sketches of unit length; with gradients."""
    torch.manual_seed(0)
    scales = unit_scale.UnitScale(2)
    torch.nn.init.normal_(scales.log_scale)
    drawn = torch.randn(1, 4, 19, 20, dtype=torch.float64)

    def found(dtype, halves_of_unit_length):
        x = drawn.to(dtype).requires_grad_()
        query, key = scales(x, x[:, :2], dtype)
        features = halves_of_unit_length(x)
        total = sum((one**3).sum() for one in (query, key, features))
        return [query, key, features, *torch.autograd.grad(total, (x, scales.log_scale))]

    monkeypatch.setattr(unit_scale, "AUTO_DEVICES", {"cpu"})
    by_programs = found(torch.float32, sketch_products._unit_halves_by_program)
    assert launched.count("rotated_heads") >= 3
    monkeypatch.setattr(unit_scale, "AUTO_DEVICES", set())
    formulas = found(torch.float64, lambda x: F.normalize(x.unflatten(-1, (2, -1)), dim=-1).flatten(-2))
    for one, other in zip(by_programs, formulas, strict=True):
        assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < 1e-5
