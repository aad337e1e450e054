"""The executor of PTX itself, on kernels written by hand; expected values come from the tables of the PTX ISA.

Fragments are laid out here entry by entry, as the ISA's formulas say, and layouts in shared memory chunk by chunk.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ptx.parsing import Fault, parse
from ptx.writing import bits, copied_into_shared, kernel, own, run


def normal(*shape: int) -> Tensor:
    """bfloat16 numbers, small enough that sums of their products are exact in float32."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 9, shape, generator=generator).div(4).bfloat16()


def each_thread(instructions: str, given: Tensor, results: int = 1) -> Tensor:
    """(32, results) numbers of 32 bits in %r10 and on, after instructions that have `given` (32, n) in %r1 and on."""
    found = torch.zeros(32, results, dtype=torch.int32)
    loads = "\n".join(f"ld.global.b32 %r{1 + i}, [%rd8+{4 * i}];" for i in range(given.shape[1]))
    stores = "\n".join(f"st.global.b32 [%rd9+{4 * i}], %r{10 + i};" for i in range(results))
    addresses = f"{own('%rd8', 0, 4 * given.shape[1])}\n{own('%rd9', 1, 4 * results)}"
    run(f"{addresses}\n{loads}\n{instructions}\n{stores}", given.contiguous(), found)
    return found


def same_for_all(*values: int) -> Tensor:
    """(32, n) numbers of 32 bits."""
    return bits(*values).repeat(32, 1)


# Numbers.


@pytest.mark.parametrize(
    ("instruction", "given", "expected"),
    [
        ("add.s32 %r10, %r1, %r2;", (0x7FFF_FFFF, 1), 0x8000_0000),
        ("sub.s32 %r10, %r1, %r2;", (0, 1), 0xFFFF_FFFF),
        ("mul.lo.s32 %r10, %r1, %r2;", (0x1_0001, 0x1_0001), 0x2_0001),
        ("mul.hi.u32 %r10, %r1, %r2;", (0xFFFF_FFFF, 0xFFFF_FFFF), 0xFFFF_FFFE),
        ("mul.hi.s32 %r10, %r1, %r2;", (0xFFFF_FFFF, 5), 0xFFFF_FFFF),
        ("mad.lo.s32 %r10, %r1, %r2, 7;", (3, 4), 19),
        ("div.s32 %r10, %r1, %r2;", (-7 & 0xFFFF_FFFF, 2), -3 & 0xFFFF_FFFF),
        ("rem.s32 %r10, %r1, %r2;", (-7 & 0xFFFF_FFFF, 2), -1 & 0xFFFF_FFFF),
        ("shl.b32 %r10, %r1, %r2;", (1, 32), 0),
        ("shr.s32 %r10, %r1, %r2;", (0x8000_0000, 40), 0xFFFF_FFFF),
        ("shr.u32 %r10, %r1, %r2;", (0x8000_0000, 31), 1),
        ("bfe.u32 %r10, %r1, 4, 8;", (0x0000_0FF0,), 0xFF),
        ("bfe.s32 %r10, %r1, 4, 8;", (0x0000_0FF0,), 0xFFFF_FFFF),
        ("bfi.b32 %r10, %r1, %r2, 8, 4;", (0x5, 0xFFFF_FFFF), 0xFFFF_F5FF),
        ("prmt.b32 %r10, %r1, %r2, 0x7531;", (0x3322_1100, 0x7766_5544), 0x7755_3311),
        ("prmt.b32 %r10, %r1, %r2, 0x7632U;", (0x3322_1100, 0x7766_5544), 0x7766_3322),
        ("prmt.b32 %r10, %r1, %r2, 0x9999;", (0x0000_8000, 0), 0xFFFF_FFFF),
        ("min.s32 %r10, %r1, %r2;", (0xFFFF_FFFF, 1), 0xFFFF_FFFF),
        ("max.u32 %r10, %r1, %r2;", (0xFFFF_FFFF, 1), 0xFFFF_FFFF),
        ("add.s16x2 %r10, %r1, %r2;", (0x0001_FFFF, 0x0001_0001), 0x0002_0000),
        ("mul.bf16x2 %r10, %r1, %r2;", (0x4000_4040, 0x4040_3F80), 0x40C0_4040),  # 2 * 3 and 3 * 1
        ("fma.rn.bf16x2 %r10, %r1, %r2, %r1;", (0x4000_3F80, 0x3F80_4000), 0x4080_4040),  # 2 * 1 + 2 and 1 * 2 + 1
        ("max.f32 %r10, %r1, %r2;", (0x7FC0_0000, 0x3F80_0000), 0x3F80_0000),  # a number beside NaN
        ("neg.f32 %r10, %r1;", (0x3F80_0000,), 0xBF80_0000),
        ("ex2.approx.f32 %r10, %r1;", (0x4040_0000,), 0x4100_0000),
        ("mov.b32 {%rs1, %rs2}, %r1;\nmov.b32 %r10, {%rs2, %rs1};", (0x1234_5678,), 0x5678_1234),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_arithmetic_is_that_of_the_isa(instruction, given, expected):
    assert torch.equal(each_thread(instruction, same_for_all(*given)), same_for_all(expected))


def test_wide_products_have_64_bits():
    instructions = "mul.wide.s32 %rd1, %r1, %r2;\nmov.b64 {%r10, %r11}, %rd1;"
    found = each_thread(instructions, same_for_all(-3 & 0xFFFF_FFFF, 0x4000_0000), 2)
    assert torch.equal(found, same_for_all(0x4000_0000, 0xFFFF_FFFF))


def test_conversions_round_as_pytorch_does():
    values = torch.cat([torch.randn(60), torch.tensor([math.inf, -0.0, 1.00390625, 1e-40])]).reshape(32, 2)
    found = each_thread("cvt.rn.bf16x2.f32 %r10, %r2, %r1;", values.view(torch.int32))
    assert torch.equal(found.view(torch.bfloat16), values.bfloat16())
    wide = each_thread("mov.b32 {%rs1, %rs2}, %r1;\ncvt.f32.bf16 %r10, %rs1;", found)
    assert torch.equal(wide.view(torch.float32)[:, 0], values[:, 0].bfloat16().float())


@pytest.mark.parametrize(
    ("instruction", "given", "expected"),
    [
        ("cvt.rna.tf32.f32 %r10, %r1;", 0x3F80_1000, 0x3F80_2000),  # ties away from zero
        ("cvt.rn.f32.s32 %r10, %r1;", 0xFFFF_FFFE, 0xC000_0000),
        ("cvt.rzi.s32.f32 %r10, %r1;", 0xBFC0_0000, 0xFFFF_FFFF),  # -1.5 toward zero
        ("cvt.u16.u32 %rs1, %r1;\ncvt.s32.s16 %r10, %rs1;", 0x0001_8000, 0xFFFF_8000),
        ("cvt.s64.s32 %rd1, %r1;\nmov.b64 {%r11, %r10}, %rd1;", 0x8000_0000, 0xFFFF_FFFF),
    ],
)
def test_conversions_are_those_of_the_isa(instruction, given, expected):
    assert torch.equal(each_thread(instruction, same_for_all(given)), same_for_all(expected))


def test_comparisons_with_nan_are_false_but_for_unordered_ones():
    nan, one = 0x7FC0_0000, 0x3F80_0000
    words = {"lt": 0, "ne": 0, "equ": 1, "neu": 1, "num": 0, "nan": 1}
    steps = [f"setp.{word}.f32 %p1, %r1, %r2;\nselp.b32 %r{10 + i}, 1, 0, %p1;" for i, word in enumerate(words)]
    found = each_thread("\n".join(steps), same_for_all(nan, one), len(words))
    assert torch.equal(found, same_for_all(*words.values()))


def test_only_threads_whose_predicate_holds_do_what_it_guards():
    instructions = "mov.b32 %r10, 5;\nsetp.lt.u32 %p1, %r0, 3;\n@%p1 mov.b32 %r10, 6;\n@!%p1 add.s32 %r10, %r10, 2;"
    found = each_thread(instructions, same_for_all(0))
    assert torch.equal(found[:, 0], torch.where(torch.arange(32) < 3, 6, 7).int())


def test_blocks_may_part_at_a_branch():
    """Each adds its number plus one times."""
    found = torch.zeros(5, dtype=torch.int32)
    body = """
        mov.u32 %r1, %ctaid.x;
        mov.b32 %r2, 0;
        mov.b32 %r3, 100;
    $again:
        add.s32 %r3, %r3, 1;
        add.s32 %r2, %r2, 1;
        setp.le.u32 %p1, %r2, %r1;
        @%p1 bra $again;
        mad.wide.u32 %rd1, %r1, 4, %rd0;
        setp.eq.u32 %p2, %r0, 0;
        @%p2 st.global.b32 [%rd1], %r3;
    """
    run(body, found, blocks=5)
    assert found.tolist() == [101, 102, 103, 104, 105]


def test_blocks_may_part_while_copies_and_products_are_under_way():
    """The second of three blocks goes another way, and all find what they copied and multiplied."""
    given, found = torch.ones(2048, dtype=torch.bfloat16), torch.zeros(3, 128)
    body = f"""
        {FILLED}{ZEROS}{PROXY}{BARRIER}{FENCE}{MULTIPLY}
        mov.u32 %r20, %ctaid.x;
        mad.lo.s32 %r21, %r20, 128, %r0;
        shl.b32 %r22, %r0, 4;
        {own("%rd8", 0, 16)}
        cp.async.cg.shared.global [%r22+4096], [%rd8], 16;
        cp.async.commit_group;
        setp.eq.u32 %p1, %r20, 1;
        @%p1 bra $other;
        {WAIT}
        bra.uni $both;
    $other:
        {WAIT}
        add.f32 %r10, %r10, %r10;
    $both:
        cp.async.wait_group 0;
        ld.shared.b32 %r23, [%r22+4096];
        setp.ne.u32 %p2, %r23, 0x3F803F80U;
        @%p2 mov.b32 %r10, 0;
        mad.wide.u32 %rd9, %r21, 4, %rd1;
        st.global.b32 [%rd9], %r10;
    """
    run(body, given, found, threads=128, blocks=3, shared=8192)
    assert torch.equal(found, torch.tensor([16.0, 32.0, 16.0])[:, None].expand(3, 128))


# Between threads.


@pytest.mark.parametrize(
    ("mode", "operand", "other"),
    [
        ("bfly", 5, lambda lane: lane ^ 5),
        ("idx", 7, lambda lane: torch.full_like(lane, 7)),
        ("down", 3, lambda lane: torch.where(lane + 3 < 32, lane + 3, lane)),
        ("up", 3, lambda lane: torch.where(lane >= 3, lane - 3, lane)),
    ],
)
def test_shuffles_bring_the_value_of_another_lane(mode, operand, other):
    values = torch.arange(32, dtype=torch.int32)[:, None] * 10
    clamp = 0 if mode == "up" else 31
    found = each_thread(f"shfl.sync.{mode}.b32 %r10, %r1, {operand}, {clamp}, -1;", values)
    assert torch.equal(found[:, 0], other(torch.arange(32, dtype=torch.int32)) * 10)


@pytest.mark.parametrize(("word", "expected"), [("add", 16 * 31 - 96), ("min", -3), ("max", 28)])
def test_a_reduction_gives_every_lane_what_its_warp_has(word, expected):
    values = torch.arange(32, dtype=torch.int32)[:, None] - 3
    found = each_thread(f"redux.sync.{word}.s32 %r10, %r1, -1;", values)
    assert found[:, 0].tolist() == [expected] * 32
    with pytest.raises(Fault, match="whole warp"):
        each_thread(f"redux.sync.{word}.s32 %r10, %r1, 255;", values)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_deals_out_8_by_8_matrices_and_stmatrix_puts_them_back(transposed):
    matrices, found, image = normal(4, 8, 8), torch.zeros(32, 4, dtype=torch.int32), normal(4, 8, 8) * 0
    word = ".trans" if transposed else ""
    body = f"""
        {copied_into_shared(0, 512, 32)}
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4{word}.shared.b16 {{%r1, %r2, %r3, %r4}}, [%r90];
        {own("%rd8", 1, 16)}
        st.global.v4.b32 [%rd8], {{%r1, %r2, %r3, %r4}};
        stmatrix.sync.aligned.m8n8.x4{word}.shared.b16 [%r90+512], {{%r1, %r2, %r3, %r4}};
        bar.sync 0;
        ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r90+512];
        {own("%rd9", 2, 16)}
        st.global.v4.b32 [%rd9], {{%r1, %r2, %r3, %r4}};
    """
    run(body, matrices, found, image, shared=1024)
    rows = matrices.mT if transposed else matrices
    pairs = found.view(torch.bfloat16).reshape(32, 4, 2)
    for lane in range(32):
        place = 2 * (lane % 4)
        assert torch.equal(pairs[lane], rows[:, lane // 4, place : place + 2])
    assert torch.equal(image, matrices)


# Products of a warp.


def packed(entry, count: int, threads: int = 32) -> Tensor:
    """(threads, count) registers of two bfloat16 each, of entry(thread, number of the bfloat16)."""
    numbers = [[entry(thread, number) for number in range(2 * count)] for thread in range(threads)]
    return torch.tensor(numbers, dtype=torch.bfloat16).view(torch.int32)


def test_mma_of_bfloat16_multiplies_its_fragments():
    a, b, c = normal(16, 16), normal(16, 8), normal(16, 8).float()
    rows = lambda lane, i: lane // 4 + 8 * (i // 2 % 2)  # noqa: E731
    of_a = packed(lambda lane, i: a[rows(lane, i), 2 * (lane % 4) + i % 2 + 8 * (i // 4)], 4)
    of_b = packed(lambda lane, i: b[2 * (lane % 4) + i % 2 + 8 * (i // 2), lane // 4], 2)
    own_places = [[(lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2) for i in range(4)] for lane in range(32)]
    of_c = torch.tensor([[c[place] for place in places] for places in own_places]).view(torch.int32)
    instruction = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23}, {%r1, %r2, %r3, %r4},"
        " {%r5, %r6}, {%r7, %r8, %r9, %r30};"
    )
    moves = "mov.b32 %r30, %r10;\n" + instruction + "".join(f"\nmov.b32 %r{10 + i}, %r{20 + i};" for i in range(4))
    found = each_thread(moves, torch.cat([of_a, of_b, of_c], 1), 4).view(torch.float32)
    expected = a.float() @ b.float() + c
    assert torch.equal(found, torch.tensor([[expected[place] for place in places] for places in own_places]))


def test_mma_of_tf32_multiplies_its_fragments_and_does_not_see_the_lower_bits():
    a, b = normal(16, 8).float(), normal(8, 8).float()
    seen = lambda x: x.view(torch.int32) | 0x1FFF  # noqa: E731
    lanes = range(32)
    of_a = torch.stack([torch.stack([a[l // 4 + 8 * (i % 2), l % 4 + 4 * (i // 2)] for i in range(4)]) for l in lanes])  # noqa: E741
    of_b = torch.stack([torch.stack([b[l % 4 + 4 * i, l // 4] for i in range(2)]) for l in lanes])  # noqa: E741
    instruction = (
        "mov.b32 %r9, 0;\nmma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r10, %r11, %r12, %r13},"
        " {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r9, %r9, %r9, %r9};"
    )
    found = each_thread(instruction, torch.cat([seen(of_a), seen(of_b)], 1), 4).view(torch.float32)
    expected = a @ b
    wanted = [[expected[l // 4 + 8 * (i // 2), 2 * (l % 4) + i % 2] for i in range(4)] for l in lanes]  # noqa: E741
    assert torch.equal(found, torch.tensor(wanted))


# Products of a warpgroup. Operands are (rows, depth), a row for every row of A or column of B.

COLUMNS, DEPTH = 16, 16
TURNS = {32: 4, 64: 2, 128: 1}
"""After how many lines of a swizzled matrix the exclusive or of its chunks changes."""


def image_of(matrix: Tensor, swizzle: int, by_rows: bool) -> tuple[Tensor, int]:
    """Bytes of shared memory, and the descriptor of the matrix at their beginning.

    Lines are rows, or columns where `by_rows`; chunks of 16 bytes of a line. Without a swizzle a core matrix is a chunk
    of eight lines, one behind the other; else it is eight lines of `swizzle` bytes, with chunks exchanged.
    """
    lines = (matrix.mT if by_rows else matrix).contiguous().view(torch.uint8)
    chunks = lines.reshape(lines.shape[0], -1, 16)
    wide = max(swizzle, 16) // 16
    across, down = -(-chunks.shape[1] // wide), chunks.shape[0] // 8
    core = 8 * 16 * wide
    image = torch.full((across * down * core,), 0x7F, dtype=torch.uint8)
    for line in range(chunks.shape[0]):
        for chunk in range(chunks.shape[1]):
            exchanged = chunk % wide ^ (line % 8 // TURNS[swizzle] if swizzle else 0)
            start = (chunk // wide * down + line // 8) * core + line % 8 * 16 * wide + 16 * exchanged
            image[start : start + 16] = chunks[line, chunk]
    to_next_across, to_next_down = down * core, core
    leading, stride = to_next_across, to_next_down
    if by_rows and not swizzle:
        leading, stride = stride, leading
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return image, leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def product(a: str, image: Tensor, descriptor: int, *more: Tensor, flags: str, before: str = "", kind="bf16") -> Tensor:
    """(64, 16) of a wgmma whose first operand is written as `a`; the second lies at 8192 of shared memory."""
    found = torch.zeros(128, COLUMNS // 2)
    accumulators = [f"%r{10 + i}" for i in range(COLUMNS // 2)]
    size = -(-len(image) // 2048) * 2048
    padded = torch.cat([image, torch.zeros(size - len(image), dtype=torch.uint8)])
    depth = {"bf16": 16, "tf32": 8}[kind]
    multiply = f"wgmma.mma_async.sync.aligned.m64n16k{depth}.f32.{kind}.{kind} {{{', '.join(accumulators)}}}"
    body = f"""
        {copied_into_shared(1, size, 128, at=8192)}
        {before}
        {"".join(f"mov.b32 {register}, 0f3F800000;" + chr(10) for register in accumulators)}
        mov.b64 %rd21, {descriptor | 8192 >> 4};
        fence.proxy.async.shared::cta;
        bar.sync 0;
        wgmma.fence.sync.aligned;
        mov.pred %p1, -1;
        {multiply}, {a}, %rd21, %p1, {flags};
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        {own("%rd9", 0, 4 * len(accumulators))}
        {"".join(f"st.global.b32 [%rd9+{4 * i}], {register};" + chr(10) for i, register in enumerate(accumulators))}
    """
    run(body, found, padded, *more, threads=128, shared=8192 + size)
    whole = torch.zeros(64, COLUMNS)
    for thread in range(128):
        for i in range(len(accumulators)):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
            whole[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2] = found[thread, i]
    return whole


@pytest.mark.parametrize("second_by_rows", [False, True])
@pytest.mark.parametrize("first_by_rows", [False, True])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_wgmma_reads_matrices_in_every_layout(swizzle, first_by_rows, second_by_rows):
    a, b = normal(64, DEPTH), normal(COLUMNS, DEPTH)
    first, descriptor = image_of(a, swizzle, first_by_rows)
    second, other = image_of(b, 32 if second_by_rows and swizzle > 2 * COLUMNS else swizzle, second_by_rows)
    size = -(-len(first) // 2048) * 2048
    first = torch.cat([first, torch.zeros(size - len(first), dtype=torch.uint8)])
    before = f"{copied_into_shared(2, size, 128)}\nmov.b64 %rd20, {descriptor};"
    flags = f"1, 1, {int(first_by_rows)}, {int(second_by_rows)}"
    found = product("%rd20", second, other, first, flags=flags, before=before)
    assert torch.equal(found, a.float() @ b.float().T + 1)


def test_wgmma_takes_its_first_operand_from_registers():
    a, b = normal(64, DEPTH), normal(COLUMNS, DEPTH)

    def entry(thread: int, i: int) -> Tensor:
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
        return a[row, 2 * (thread % 4) + i % 2 + 8 * (i // 4)]

    before = f"{own('%rd8', 2, 16)}\nld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd8];"
    operand, fragments = "{%r1, %r2, %r3, %r4}", packed(entry, 4, 128)
    found = product(operand, *image_of(b, 32, False), fragments, flags="-1, 1, 0", before=before)
    assert torch.equal(found, 1 - a.float() @ b.float().T)


@pytest.mark.parametrize("swizzle", [0, 32, 128])
def test_wgmma_multiplies_tf32(swizzle):
    a, b = normal(64, 8).float(), normal(COLUMNS, 8).float()
    first, descriptor = image_of(a, swizzle, False)
    second, other = image_of(b, swizzle, False)
    size = -(-len(first) // 2048) * 2048
    first = torch.cat([first, torch.zeros(size - len(first), dtype=torch.uint8)])
    before = f"{copied_into_shared(2, size, 128)}\nmov.b64 %rd20, {descriptor};"
    found = product("%rd20", second, other, first, flags="1, 1", before=before, kind="tf32")
    assert torch.equal(found, a @ b.T + 1)


# Faults.

STORE = "shl.b32 %r1, %r0, 2;\nst.shared.b32 [%r1], %r0;"
REVERSED = "sub.s32 %r2, 124, %r1;"
COPY = "shl.b32 %r1, %r0, 2;\nmad.wide.u32 %rd8, %r0, 4, %rd0;\ncp.async.ca.shared.global [%r1], [%rd8], 4;\n"
FILLED = f"{copied_into_shared(0, 4096, 128)}\nmov.b64 %rd2, {2 << 16 | 16 << 32 | 3 << 62};\nmov.b64 %rd3, %rd2;\n"
SUMS = "{%r10, %r11, %r12, %r13}"
ZEROS = "".join(f"mov.b32 %r{i}, 0;\n" for i in range(10, 14))
PROXY, BARRIER, FENCE = "fence.proxy.async.shared::cta;\n", "bar.sync 0;\n", "wgmma.fence.sync.aligned;\n"
MULTIPLY = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {SUMS}, %rd2, %rd3, 0, 1, 1, 0, 0;\n"
    "wgmma.commit_group.sync.aligned;\n"
)
WAIT = "wgmma.wait_group.sync.aligned 0;\n"
READ = f"{own('%rd9', 0, 4)}\nst.global.b32 [%rd9], %r10;"
AGAIN = "st.shared.b32 [%r90], %r0;"

WARP = {
    "a race of threads": (f"{STORE}\n{REVERSED}\nld.shared.b32 %r3, [%r2];", "race"),
    "a race of writes": (f"{STORE}\n{REVERSED}\nst.shared.b32 [%r2], %r0;", "race"),
    "a write over what is read": (
        f"{STORE}\nbar.sync 0;\n{REVERSED}\nld.shared.b32 %r3, [%r2];\nst.shared.b32 [%r1], %r0;",
        "race: write over what another thread reads",
    ),
    "different values at one place": ("mov.b32 %r1, 0;\nst.shared.b32 [%r1], %r0;", "different values"),
    "shared memory that nobody wrote": ("mov.b32 %r1, 0;\nld.shared.b32 %r2, [%r1];", "nobody wrote"),
    "past shared memory": ("mov.b32 %r1, 4096;\nst.shared.b32 [%r1], %r0;", "4096 of 4096"),
    "before shared memory": ("mov.b32 %r1, 0;\nst.shared.b32 [%r1+-4], %r0;", "at -4"),
    "a misaligned address": ("mov.b32 %r1, 2;\nld.shared.b32 %r2, [%r1];", "misaligned"),
    "past a tensor": ("ld.global.b32 %r1, [%rd0+4096];", "illegal load"),
    "before every tensor": ("mov.b64 %rd1, 0;\nst.global.b32 [%rd1], %r0;", "illegal store"),
    "a register that nobody wrote": ("add.s32 %r1, %r2, 1;", "%r2, which nobody wrote"),
    "an address by threads that were left out": (
        "setp.eq.u32 %p1, %r0, 0;\n@%p1 mov.b64 %rd1, %rd0;\nld.global.b32 %r1, [%rd1];",
        "load",
    ),
    "threads that part": ("setp.lt.u32 %p1, %r0, 3;\n@%p1 bra $end;\n$end:", "threads of a block part"),
    "a barrier for some": ("setp.lt.u32 %p1, %r0, 3;\n@%p1 bar.sync 0;", "not all threads"),
    "an opcode that is unknown": ("vote.sync.any.pred %p1, %p2, -1;", "does not know vote"),
    "a word that is unknown": ("add.sat.s32 %r1, %r0, %r0;", "does not know sat of add"),
    "a copy that is not waited for": (f"{COPY}cp.async.commit_group;\nld.shared.b32 %r2, [%r1];", "wait_group"),
    "too few copies waited for": (
        f"{COPY}cp.async.commit_group;\ncp.async.wait_group 1;\nld.shared.b32 %r2, [%r1];",
        "wait_group",
    ),
    "a copy that other threads do not see": (
        f"{COPY}cp.async.commit_group;\ncp.async.wait_group 0;\n{REVERSED}\nld.shared.b32 %r3, [%r2];",
        "race",
    ),
    "a loop without end": ("$again:\nbra.uni $again;", "more than"),
}
WARPGROUP = {
    "no fence between proxies": (f"{FILLED}{ZEROS}{BARRIER}{FENCE}{MULTIPLY}", "fence.proxy.async"),
    "no barrier before a product": (f"{FILLED}{ZEROS}{PROXY}{FENCE}{MULTIPLY}", "without a barrier"),
    "no fence of registers": (
        f"{FILLED}{ZEROS}{PROXY}{BARRIER}{MULTIPLY}",
        "%r10 was written since the last wgmma.fence",
    ),
    "no fence of the next product": (
        f"{FILLED}{ZEROS}{PROXY}{BARRIER}{FENCE}{MULTIPLY}{WAIT}{ZEROS}{MULTIPLY}",
        "%r10 was written since the last wgmma.fence",
    ),
    "sums that are not waited for": (f"{FILLED}{ZEROS}{PROXY}{BARRIER}{FENCE}{MULTIPLY}{READ}", "accumulator %r10"),
    "a write to sums under way": (f"{FILLED}{ZEROS}{PROXY}{BARRIER}{FENCE}{MULTIPLY}{ZEROS}", "product under way"),
    "a write to what is multiplied": (
        f"{FILLED}{ZEROS}{PROXY}{BARRIER}{FENCE}{MULTIPLY}{AGAIN}",
        "write to what a product still reads",
    ),
    "a write behind a product without a barrier": (
        f"{FILLED}{ZEROS}{PROXY}{BARRIER}{FENCE}{MULTIPLY}{WAIT}{AGAIN}",
        "race: write over what another thread reads",
    ),
    "a descriptor past shared memory": (
        f"{FILLED}mov.b64 %rd3, {255 | 2 << 16 | 16 << 32 | 3 << 62};\n{ZEROS}{PROXY}{BARRIER}{FENCE}{MULTIPLY}",
        "of 4096 bytes",
    ),
}


@pytest.mark.parametrize("name", WARP)
def test_faults_of_a_warp_are_found(name):
    body, message = WARP[name]
    with pytest.raises(Fault, match=message):
        run(body, torch.zeros(1024, dtype=torch.int32), shared=4096)


@pytest.mark.parametrize("name", WARPGROUP)
def test_faults_of_a_warpgroup_are_found(name):
    body, message = WARPGROUP[name]
    with pytest.raises(Fault, match=message):
        run(body, torch.zeros(1024, dtype=torch.int32), threads=128, shared=4096)


def test_without_a_fault_these_kernels_run():
    """What the faults are planted into."""
    zeros = torch.zeros(1024, dtype=torch.int32)
    run(f"{STORE}\nbar.sync 0;\n{REVERSED}\nld.shared.b32 %r3, [%r2];", zeros, shared=4096)
    run(f"{STORE}\nbar.warp.sync -1;\n{REVERSED}\nld.shared.b32 %r3, [%r2];", zeros, shared=4096)
    waited = f"{COPY}cp.async.commit_group;\ncp.async.wait_group 0;\nld.shared.b32 %r2, [%r1];"
    run(waited, zeros, shared=4096)
    body = f"{FILLED}{ZEROS}{PROXY}{BARRIER}{FENCE}{MULTIPLY}{WAIT}{READ}\n{BARRIER}{AGAIN}"
    run(body, zeros, threads=128, shared=4096)


def test_warps_need_a_barrier_of_the_block_between_them():
    body = "shl.b32 %r1, %r0, 2;\nst.shared.b32 [%r1], %r0;\nbar.warp.sync -1;\nxor.b32 %r2, %r1, 128;\n"
    with pytest.raises(Fault, match="race"):
        run(f"{body}ld.shared.b32 %r3, [%r2];", torch.zeros(1), threads=64, shared=256)
    run(f"{body}bar.sync 0;\nld.shared.b32 %r3, [%r2];", torch.zeros(1), threads=64, shared=256)


def test_a_copy_of_no_bytes_is_zeros():
    found = torch.ones(32, dtype=torch.int32)
    body = f"""
        shl.b32 %r1, %r0, 2;
        setp.lt.u32 %p1, %r0, 16;
        selp.b32 %r2, 4, 0, %p1;
        {own("%rd8", 0, 4)}
        cp.async.ca.shared.global [ %r1 + 0 ], [ %rd8 + 0 ], 0x4, %r2;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.b32 %r3, [%r1];
        st.global.b32 [%rd8], %r3;
    """
    run(body, found, shared=128)
    assert found.tolist() == [1] * 16 + [0] * 16


def test_a_fault_names_the_kernel_the_line_and_the_instruction():
    with pytest.raises(Fault, match=r"kernel, line \d+: ld.global.b32 %r1, \[%rd0\+64\]"):
        run("ld.global.b32 %r1, [%rd0+64];", torch.zeros(4))


def test_statements_keep_their_lines_and_labels_their_places():
    program = parse(
        kernel("{ add.s32 %r1, %r0, %r0; }\n$here: // a comment; with a semicolon\n.loc 1 2 3\nmov.b32 %r2, 1;", 1)
    )
    text = kernel("{ add.s32 %r1, %r0, %r0; }\n$here: // a comment; with a semicolon\n.loc 1 2 3\nmov.b32 %r2, 1;", 1)
    names = [step.name for step in program.instructions]
    assert names == ["ld", "mov", "add", "mov", "ret"]
    assert program.labels == {"$here": 3}
    for step in program.instructions:
        assert step.text in text.split("\n")[step.line - 1]
    assert np.array_equal(list(program.parameters.values()), ["u64"])
