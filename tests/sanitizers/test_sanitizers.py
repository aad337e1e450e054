"""AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer find nothing in the programs, and what is planted.

make test-sanitizers
"""

import shutil

import pytest

from ops.test_parallel import INTERRUPTED
from polysketch.ops.native import build
from sanitizers.sanitized import CAUGHT, FLAGS, compiled, run, why_none

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(why_none() is not None, reason=str(why_none())),
]

TESTS = [
    f"tests/ops/{name}.py"
    for name in (
        "test_native",
        "test_window_native",
        "test_hyper_native",
        "test_low_rank_sketch",
        "test_random_features",
        "test_delta",
        "test_state_rows",
        "test_parallel",
        "test_native_threads",
    )
]
"""Forward, backward and decoding of every program, by one thread and several; callers at once, interrupts, errors."""


@pytest.mark.parametrize("sanitizer", FLAGS)
def test_nothing_is_found(sanitizer):
    compiled(sanitizer)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not full", "--timeout=3600", "-k", "not interrupt"]
    found = run(sanitizer, "-m", "pytest", *options, *TESTS)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-5000:]
    assert "passed" in found.stdout


@pytest.mark.parametrize("sanitizer", FLAGS)
def test_nothing_is_found_where_calls_are_interrupted(sanitizer):
    """The same program in `test_parallel`, with fewer and smaller calls: each waits several times for its workers."""
    program = INTERRUPTED
    for old, new in (("2048", "256"), ("range(20)", "range(10)")):
        assert old in program
        program = program.replace(old, new)
    compiled(sanitizer)
    found = run(sanitizer, "-c", program)
    assert (found.returncode, found.stdout.split()) == (0, ["10"]), found.stderr[-5000:]


FORWARD = """
import ctypes, sys, torch
from polysketch.ops.linear import native
from polysketch.ops import linear_attention
torch.set_num_threads(2)
programs = ctypes.CDLL(sys.argv[1])
native.library = lambda: programs
query, key, value = (torch.rand(1, 4, 100, 8) for _ in range(3))
for _ in range(50):
    linear_attention(query, key, value, power=2, causal=True, backend="native")
print("done")
"""
WRITE, LOOP = "i < call.value_width; i++) target[i] =", "unit++) Forward("
FAULTS = {
    "a write beyond a tensor": ("address", WRITE, WRITE.replace("<", "<="), "heap-buffer-overflow"),
    "a shift": ("address", LOOP, "unit++) if ((1 << (32 + int(unit))) != 77) Forward(", "shift exponent"),
    "a race": ("thread", LOOP, "unit++) if (static int64_t calls = 0; ++calls) Forward(", "data race"),
    "none, for addresses": ("address", LOOP, LOOP, ""),
    "none, for threads": ("thread", LOOP, LOOP, ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path):
    sanitizer, old, new, message = FAULTS[fault]
    source = tmp_path / "source"
    source.mkdir()
    for path in (*build._SOURCE.glob("*.h"), build._SOURCE / "linear_attention.cpp"):
        shutil.copy(path, source)
    text = (source / "linear_attention.cpp").read_text()
    assert text.count(old) == 1
    (source / "linear_attention.cpp").write_text(text.replace(old, new))
    compiled(sanitizer)
    found = run(sanitizer, "-c", FORWARD, str(compiled(sanitizer, source, tmp_path)))
    assert message in found.stderr
    assert found.returncode == (CAUGHT if message else 0), found.stderr[-5000:]
    assert ("done" in found.stdout) == (sanitizer == "thread" or not message)
