"""Triton takes an assembler that compiles the programs rightly, or the programs are not taken."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from polysketch.ops.triton import assembler

HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.fixture
def knobs(monkeypatch):
    """Triton's, as of a release that brings ptxas of CUDA 12.8 and 12.9."""
    module = ModuleType("triton")
    module.knobs = SimpleNamespace(
        nvidia=SimpleNamespace(
            ptxas=SimpleNamespace(path="/old", version="12.8"),
            ptxas_blackwell=SimpleNamespace(path="/newer", version="12.9"),
        )
    )
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.delenv(assembler.VARIABLE, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assembler._prepare.cache_clear()
    yield module.knobs.nvidia
    assembler._prepare.cache_clear()


def test_the_newer_of_the_two_is_taken_for_devices_before_blackwell(knobs):
    assert assembler.prepare(BLACKWELL) is None
    assert knobs.ptxas.path == "/old"
    assert assembler.prepare(HOPPER) is None
    assert knobs.ptxas == "/newer"


def test_one_that_is_right_stays(knobs):
    knobs.ptxas.version = "12.10"
    assert assembler.prepare(HOPPER) is None
    assert knobs.ptxas.path == "/old"


def test_one_that_the_user_named_is_refused_not_replaced(knobs, monkeypatch):
    monkeypatch.setenv(assembler.VARIABLE, "/old")
    assert "unset that, or name a ptxas of CUDA 12.9" in assembler.prepare(HOPPER)
    assert knobs.ptxas.path == "/old"
    assert os.environ[assembler.VARIABLE] == "/old"


@pytest.mark.parametrize(
    ("newer", "runtime"), [("12.8", "12.6"), ("13.1", "12.9")], ids=["too old", "too new a driver"]
)
def test_without_another_that_fits_the_programs_are_not_taken(knobs, monkeypatch, newer, runtime):
    knobs.ptxas_blackwell.version = newer
    monkeypatch.setattr(torch.version, "cuda", runtime)
    assert "ptxas of CUDA 12.8 miscompiles" in assembler.prepare(HOPPER)
    assert knobs.ptxas.path == "/old"


def test_a_triton_with_one_assembler_alone_is_told(knobs):
    del knobs.ptxas_blackwell
    assert "this Triton brings no other that fits" in assembler.prepare(HOPPER)
