"""No program's machine code reads a register that nothing wrote, which ptxas of CUDA 12.8 lets happen."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs

from ops.linear_cases import Case, make, run
from polysketch.ops.triton import ahead_of_time
from polysketch.ops.triton.ahead_of_time import Compiled, compile_call, complaints
from polysketch.ops.triton.machine_code import Listing

HOPPER = (9, 0)
# Rows of 20 and 40 features: no multiple of 16, and wider than one.
CASE = Case(power=1, local_chunk=0, features=20, dtype=torch.bfloat16)
OTHERS = [replace(CASE, power=2), replace(CASE, features=40), replace(CASE, power=2, features=40)]


def compiled(case: Case) -> list[Compiled]:
    """The programs of a call's forward and backward pass, for the H100."""
    tensors = make(case).map(lambda x: x.to("meta").requires_grad_())

    def passes() -> None:
        output = run(case, tensors, backend="triton").output
        torch.autograd.grad(output.float().sum(), list(tensors.leaves().values()))

    return compile_call(passes, HOPPER)


@pytest.mark.full  # tests/ptx compiles every program too, and executes it
@pytest.mark.parametrize("case", [CASE, *(pytest.param(one, marks=pytest.mark.full) for one in OTHERS)], ids=str)
def test_every_register_is_written_before_it_is_read(case):
    found = compiled(case)
    assert {"linear_outputs", "linear_inner_key_gradient"} <= {program.name for program in found}
    assert [complaint for program in found for complaint in complaints(program, HOPPER)] == []


@pytest.mark.full
def test_ptxas_of_cuda_12_8_makes_reads_of_registers_that_nothing_wrote(monkeypatch, tmp_path):
    old = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if knobs.NvidiaTool.from_path(str(old)).version != "12.8":
        pytest.skip("this Triton does not bring ptxas of CUDA 12.8")
    texts = {}
    read = ahead_of_time._read
    monkeypatch.setattr(
        ahead_of_time,
        "_read",
        lambda name, constants, made: texts.update({name: made.asm["ptx"]}) or read(name, constants, made),
    )
    compiled(CASE)
    source, binary = tmp_path / "program.ptx", tmp_path / "program.cubin"
    # As Triton would write it for that ptxas, which is a version of the language behind.
    source.write_text(re.sub(r"\.version \S+", ".version 8.7", texts["linear_outputs"]))
    subprocess.run(
        [str(old), "-v", "--gpu-name=sm_90a", str(source), "-o", str(binary)], check=True, capture_output=True
    )
    listing = Listing(ahead_of_time._cuobjdump("-sass", binary))
    assert listing.unset_reads


LISTING = """
        /*0000*/                   UMOV UR4, 0x400 ;
        /*0010*/               @P0 BRA 0x40 ;
        /*0020*/                   UIADD3 UR5, UP0, UR4, 0x20, URZ ;
        /*0030*/                   UMOV UR6, URZ ;
        /*0040*/                   UMOV UR7, 0xc0000010 ;
        /*0050*/                   HGMMA.64x16x16.F32.BF16 R56, R24, gdesc[UR4].tnspB, R56, gsb0 ;
        /*0060*/               @P1 BRA 0x20 ;
        /*0070*/                   LDG.E R4, desc[UR8][R2.64+UR4] ;
        /*0080*/                   EXIT ;
        /*0090*/                   UIADD3 UR9, UR10, 0x1, URZ ;
"""


def test_a_register_is_unset_where_one_way_to_its_reader_goes_round_its_writer():
    places = [said.split()[0] + " " + said.split()[4] for said in Listing(LISTING).unset_reads]
    # The first branch skips UR6. Of the product's four the first two are not looked at. The end is never reached.
    assert places == ["UR6 0x50", "UR8 0x70", "UR9 0x70"]


def test_pairs_are_read_and_written_as_pairs():
    listing = Listing(
        """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   UIMAD.WIDE.U32 UR6, UR4, UR5, UR4 ;
        /*0020*/                   UIADD3.64 UR8, UR4, UR6, URZ ;
        /*0030*/                   STS.64 [R8+UR9+0x400], R2 ;
        /*0040*/                   EXIT ;
        """
    )
    assert listing.unset_reads == []
    assert [one.written for one in listing.instructions] == [{4, 5}, {6, 7}, {8, 9}, set(), set()]


def test_loads_of_several_registers_and_descriptors_of_the_tensor_memory_are_read_as_such():
    """Of devices of compute capability 10."""
    listing = Listing(
        """
        /*0000*/                   LDCU UR4, c[0x0][0x358] ;
        /*0010*/                   LDCU.64 UR6, c[0x0][0x360] ;
        /*0020*/                   LDCU.128 UR8, c[0x0][0x370] ;
        /*0030*/                   UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4], tmem[UR6], idesc[UR11], UPT ;
        /*0040*/                   UTCHMMA gdesc[UR10], gdesc[UR12], tmem[UR4], tmem[UR6], idesc[UR11], UPT ;
        /*0050*/                   EXIT ;
        """
    )
    assert [one.written for one in listing.instructions[:3]] == [{4}, {6, 7}, {8, 9, 10, 11}]
    assert [said.split()[0] for said in listing.unset_reads] == ["UR12", "UR13"]
