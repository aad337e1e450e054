"""The programs of HyperAttention against the plain backend in float64, under Triton's interpreter."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attention.covering import first_always
from polysketch import ops
from polysketch.ops import triton
from polysketch.ops.hyper import backends, definition
from polysketch.ops.hyper import self_check as hyper_check
from polysketch.ops.hyper.approximate import Options
from polysketch.ops.hyper.calls import who_meets_whom
from polysketch.ops.hyper.meetings import Meetings
from polysketch.ops.hyper.triton import launcher
from polysketch.ops.hyper.triton.lists import lists_of_keys, runs_of_tiles
from polysketch.ops.hyper.types import Given
from polysketch.ops.triton import self_check
from polysketch.ops.triton.launch import launching

PRODUCTS = [
    f"hyper_{part}_{program}" for part in ("block", "tile") for program in ("forward", "grad_query", "grad_key_value")
]
PROGRAMS = [*PRODUCTS, "hyper_sum_by_key"]
SIZES = {"min_length": 20, "chunk_size": 12, "sample_size": 20}


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    """More than one block of everything; what a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    blocks = {"ROWS": 16, "KEYS": 16, "num_warps": 4, "num_stages": 2}
    with triton.forced(**dict.fromkeys(PRODUCTS, blocks), hyper_sum_by_key={"TOKENS": 16, "num_warps": 4}):
        yield
    torch.use_deterministic_algorithms(False)


def tensors(length=70, keys=None, batch=1, heads=2, key_heads=1, head_dim=20, value_dim=13) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    keys = keys or length
    shapes = [(heads, length, head_dim), (key_heads, keys, head_dim), (key_heads, keys, value_dim)]
    return [torch.randn(batch, *shape, generator=generator) for shape in shapes]


def padding(length: int) -> Tensor:
    """A row with padding before, in the middle and behind, and one without any."""
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :9] = mask[0, length // 2 : length // 2 + 5] = mask[0, -7:] = False
    return mask


def attend(inputs: list[Tensor], backend: str = "triton", **options) -> list[Tensor]:
    """Output, and the gradients of query, key and value of a sum that weighs every entry otherwise."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    planes = torch.randn(inputs[0].shape[3], 4, generator=torch.Generator().manual_seed(5)).to(inputs[0].dtype)
    output = ops.hyper_attention(*inputs, hyperplanes=planes, backend=backend, **{**SIZES, **options})
    weights = torch.arange(output.numel(), dtype=torch.float64).sin().view_as(output).to(output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def assert_exact(inputs: list[Tensor], tolerance: float = 1e-5, **options) -> None:
    """Within rounding of the plain backend in float64, of the same meetings."""
    found = attend(inputs, **options)
    assert all(x.dtype == inputs[0].dtype for x in found)
    expected = attend([x.double() for x in inputs], "plain", **options)
    for name, one, other in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert (one - other).norm() < tolerance * other.norm(), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", first_always([21, 45, 70], 2))
def test_output_and_gradients_are_those_of_the_plain_backend_in_float64(causal, length):
    assert_exact(tensors(length), causal=causal)


@pytest.mark.parametrize("causal", first_always([True, False]))
def test_rows_and_heads_of_their_own(causal):
    assert_exact(tensors(24, batch=2, heads=4, key_heads=2), causal=causal)


@pytest.mark.parametrize("causal", first_always([True, False]))
def test_with_padding(causal):
    assert_exact(tensors(40, batch=2), causal=causal, key_mask=padding(40))


def test_a_short_row_beside_a_long_one_is_exact():
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, 15:] = False
    assert_exact(tensors(30, batch=2), key_mask=mask)


@pytest.mark.parametrize("keys", first_always([33, 80]))
def test_queries_of_another_number_than_keys(keys):
    assert_exact(tensors(50, keys))


@pytest.mark.parametrize("causal", first_always([True, False]))
def test_a_given_mask_of_large_entries(causal):
    heavy = torch.rand(1, 2, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.3
    assert_exact(tensors(60), causal=causal, heavy_mask=heavy, min_length=24)


@pytest.mark.parametrize(
    "sizes", first_always([{"chunk_size": 3}, {"sample_size": 1}, {"chunk_size": 50, "sample_size": 50}])
)
def test_chunks_and_samples_of_any_size(sizes):
    assert_exact(tensors(30), causal=True, **sizes)


@pytest.mark.parametrize(("head_dim", "value_dim"), first_always([(3, 40), (1, 1), (64, 16)], several=True))
def test_heads_of_any_width_and_strides(head_dim, value_dim):
    query, key, value = tensors(45, head_dim=head_dim, value_dim=value_dim)
    key = key.mT.contiguous().mT  # tokens side by side
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert_exact([query, key, value], causal=True)


def test_sums_are_exact_where_scores_are_far_from_zero():
    """Weights of e^200 and e^-200: the largest score of all tiles is what they are relative to."""
    query, key, value = tensors(25)
    for shift in (-200.0, 200.0):
        queries = torch.cat([query, torch.full_like(query[..., :1], shift)], -1)
        keys = torch.cat([key, torch.ones_like(key[..., :1])], -1)
        assert_exact([queries, keys, value], causal=True, scale=1.0)


@pytest.mark.parametrize("causal", first_always([True, False]))
def test_half_precision_errs_by_its_own_rounding(causal):
    """Hashes see the rounded inputs: the definition is that of the same ones."""
    assert_exact([x.half() for x in tensors(30)], 1e-3, causal=causal)


def test_inputs_of_several_dtypes_meet_in_the_wider_one():
    query, key, value = tensors(40)
    planes = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
    options = {"hyperplanes": planes, "causal": True, "backend": "triton", **SIZES}
    expected = ops.hyper_attention(query, key, value.half().float(), **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ops.hyper_attention(query, key, value.half(), **options)
    assert torch.equal(found, expected.half())


@pytest.mark.full
def test_the_same_call_gives_the_same_bits():
    one, other = (attend(tensors(30), causal=True) for _ in range(2))
    assert all(map(torch.equal, one, other))


@pytest.mark.full
@pytest.mark.parametrize(("numbers", "expected"), first_always([(1, [8, 1] * 3), (25_000, [9, 9])], several=True))
def test_gradients_of_keys_come_piece_by_piece_where_memory_is_bounded(numbers, expected, monkeypatch):
    """Of nine tiles of three rows, one run of tiles of a row at once; and all tiles of two rows, then of the other."""
    monkeypatch.setattr(launcher, "_PARTIAL", numbers)
    pieces, add = [], launcher._add_through
    monkeypatch.setattr(launcher, "_add_through", lambda *x: (pieces.append(len(x[1])), add(*x)))
    assert_exact(tensors(45, batch=3), causal=True)
    assert pieces == expected


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_a_row_of_numbers_that_are_none_reaches_no_other():
    """NaN at one query and at one later key: not tokens of blocks before the key's, nor other heads.

    The query goes to another tile, where rows have other numbers: the interpreter's products round by these.
    """
    query, key, value = tensors(70, heads=4, key_heads=2)
    planes = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
    options = {"hyperplanes": planes, "causal": True, "backend": "triton", **SIZES}
    before = ops.hyper_attention(query, key, value, **options)
    query[0, 1, 25], key[0, 0, 65], value[0, 0, 65] = torch.nan, torch.nan, torch.nan
    after = ops.hyper_attention(query, key, value, **options)
    assert after[0, 1, 25].isnan().all()
    assert after[0, :2, 65].isnan().all()
    after[0, 1, 25] = before[0, 1, 25]
    torch.testing.assert_close(after[0, :2, :60], before[0, :2, :60], rtol=1e-6, atol=1e-6)
    assert torch.equal(after[0, 2:], before[0, 2:])


@pytest.mark.parametrize("program", first_always(PROGRAMS))
def test_without_half_of_a_program_the_comparison_fails(program):
    with breaking(program), pytest.raises(AssertionError):
        assert_exact(tensors(41), causal=True)


def breaking(program: str):
    """Within this, what the later half of the instances of a program would write stays as it is."""

    def launch(kernel, programs, arguments, options):
        count = programs // 2 if kernel.__name__ == program else programs
        if count:
            kernel[(count,)](*arguments, **options)

    return launching(launch)


def given(length=50, causal=True) -> Given:
    query, key, value = (x.double() for x in tensors(length))
    planes = torch.randn(20, 4, generator=torch.Generator().manual_seed(5)).double()
    options = Options(planes, SIZES["chunk_size"], SIZES["sample_size"], "uniform", 0, 0.3)
    met = who_meets_whom(query, key, None, causal, SIZES["min_length"], options)
    return Given(query, key, value, None, met, SIZES["min_length"] * causal, 0.3)


@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_of_what_programs_compute_is_the_plain_backend(causal):
    """What the check at the first call compares programs with."""
    call = given(causal=causal)
    planes = torch.randn(20, 4, generator=torch.Generator().manual_seed(5)).double()
    expected = ops.hyper_attention(*call[:3], hyperplanes=planes, causal=causal, scale=0.3, backend="plain", **SIZES)
    torch.testing.assert_close(definition.attend(call), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_no_query_is_in_two_tiles_of_a_part(causal):
    """Else two programs of a launch would write to one place."""
    met = given(90, causal).met
    assert sum(met.parts) == met.query.shape[2]
    for part in met.query.split(list(met.parts), 2):
        places = part[part >= 0]
        assert places.numel() == places.unique().numel() > 0


def test_lists_name_every_key_of_every_run_once_in_order():
    """By hand: a block of columns is two; the third tile has no queries, and the fifth begins a run by its number."""
    key = torch.tensor([[4, 7, 9], [4, 7, 9], [4, 7, 9], [4, 7, 2], [4, 7, 2]], dtype=torch.int32)
    weights = torch.zeros(5, 3)
    weights[:, 1] = weights[0, 0] = -torch.inf
    query = torch.tensor([[3, -1], [1, 0], [-1, -1], [2, -1], [0, 4]], dtype=torch.int32)
    met = Meetings(query[None, None], key[None, None], weights[None, None], (5,))
    runs = runs_of_tiles(met, 2, 4)
    assert runs[0, 0].tolist() == [[4, 2], [0, 0], [0, 0], [0, 1], [1, 1]]
    order, edges = lists_of_keys(met, runs, 2, 10)
    lists = [order[0, a:b].tolist() for a, b in zip(edges[0], edges[0, 1:], strict=False)]
    assert lists == [[], [], [11, 14], [], [0, 12], [], [], [], [], [2]]


@pytest.mark.full  # the same operator passes opcheck in tests/ops
def test_the_operators_pass_opcheck():
    call = given(25)
    query, key, value = (x.float().requires_grad_() for x in call[:3])
    arguments = (query, key, value, None, *call.met[:2], call.met[2].float(), call.met.parts, call.block, 0.3, "triton")
    torch.library.opcheck(torch.ops.polysketch.hyper_attention.default, arguments)
    halves = [x.detach().half() for x in (query, key, value)]
    shapes = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.polysketch.hyper_attention.default, (*halves, *arguments[3:]), test_utils=shapes)


@pytest.fixture
def asked_anew(tmp_path, monkeypatch) -> None:
    """An empty cache folder, and a CPU that "auto" takes for a device of the programs; the check is a smaller one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_answers", {})
    monkeypatch.setattr(backends, "AUTO_DEVICES", {"cpu"})
    monkeypatch.setattr(hyper_check, "_LENGTH", 40)
    monkeypatch.setattr(backends.native, "why_not", lambda *_: "would be compiled anew in the empty folder")


@pytest.mark.usefixtures("asked_anew")
def test_auto_takes_the_programs_of_a_device_once_they_agree():
    inputs = tensors(25)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert all(map(torch.equal, attend(inputs, "auto", causal=True), attend(inputs, causal=True)))
    assert max(max(errors.values()) for errors in self_check._kept(torch.device("cpu")).values()) < 0.1


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("broken", "named"),
    first_always([("hyper_sum_by_key", "gradient of key"), ("hyper_tile_forward", "output")], several=True),
)
def test_auto_takes_no_program_that_disagrees_and_names_it(broken, named):
    inputs = tensors(25)
    with breaking(broken), pytest.warns(UserWarning, match=f"disagree with plain PyTorch.*hyper_attention.*{named}"):
        found = attend(inputs, "auto")
    expected = attend(inputs, "plain")
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(found, expected, strict=True))


def test_what_the_programs_cannot_take_is_refused_with_the_reason():
    query, key, value = tensors(40)
    options = {"hyperplanes": torch.randn(20, 4), "backend": "triton", **SIZES}
    with pytest.raises(RuntimeError, match="takes uniform sampling without capping, got sampling='norm'"):
        ops.hyper_attention(query, key, value, sampling="norm", **options)
    with pytest.raises(RuntimeError, match=r"got sampling='uniform' and capping=\(1\.0, 2\.0\)"):
        ops.hyper_attention(query, key, value, capping=(1.0, 2.0), **options)
    with pytest.raises(RuntimeError, match=r"got torch\.float64"):
        ops.hyper_attention(query.double(), key.double(), value.double(), **options)
    with pytest.raises(RuntimeError, match="vectors of 1 to 128, got 20 and 129"):
        ops.hyper_attention(query, key, value[..., :1].expand(-1, -1, -1, 129), **options)
    with pytest.raises(ValueError, match="unknown backend 'cuda'; expected 'auto', 'plain', 'native', 'triton'"):
        ops.hyper_attention(query, key, value, **{**options, "backend": "cuda"})
