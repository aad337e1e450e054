"""The demo's yardstick is right, and the demo itself runs to its end."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from count_models import CountModel  # noqa: E402 - a script's neighbour, not a package


def test_a_count_model_gives_the_probabilities_of_its_formula():
    model = CountModel(b"abababac", 1)
    # After a: 3 of 4 are b. Order 0: 3 of 8 are b, of 256 equally likely bytes before that.
    lowest = (3 + 1 / 256) / 9
    expected = (3 + lowest) / 5
    assert 2 ** -model.bits_per_byte(b"ab") == pytest.approx(expected)


def test_probabilities_of_all_bytes_sum_to_one():
    model = CountModel(b"the cat sat on the mat", 2)
    total = sum(2 ** -model.bits_per_byte(b"th" + bytes([byte])) for byte in range(256))
    assert total == pytest.approx(1)


def test_longer_contexts_compress_repetitive_text_better():
    text = b"def read(path): return path\n" * 50
    bits = [CountModel(text, order).bits_per_byte(text[:280]) for order in (0, 1, 2, 3)]
    assert bits == sorted(bits, reverse=True)


@pytest.mark.full
def test_the_demo_reaches_its_end(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(tmp_path / "demo"), "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr  # so short a training need not beat the counts
    assert "Done in" in done.stdout
    assert (tmp_path / "demo" / "forward_time.png").stat().st_size > 0
