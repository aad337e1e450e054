"""The demo's yardstick is right, and the demo itself runs to its end."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402 - scripts, not a package
from count_models import CountModel  # noqa: E402


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


@pytest.mark.parametrize("better", [True, False])
def test_the_exit_status_says_whether_the_model_beats_the_counts(monkeypatch, tmp_path, better):
    """0 or 1, as the demo's first lines promise; the steps before and after are others' tests."""
    for name in ("prepare", "train", "compare_times", "command"):
        monkeypatch.setattr(demo, name, lambda *_: None)
    monkeypatch.setattr(demo, "evaluate", lambda *_: better)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "demo")])
    assert demo.main() == (0 if better else 1)


@pytest.mark.full
def test_the_demo_reaches_its_end(tmp_path):
    """Every step is made; after five steps of training the counts are better, and that is why it fails."""
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(tmp_path / "demo"), "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert re.search(r"== Done in \d+ s, but polysketch is NOT better than", done.stdout), done.stderr
    assert done.returncode == 1
    assert "polysketch: " not in done.stderr
    rows = re.findall(
        r"^  (count model, order \d|window alone|polysketch) +([\d.]+) bits per byte", done.stdout, re.MULTILINE
    )
    bits = {name: float(value) for name, value in rows}
    assert (
        bits["count model, order 3"] < bits["count model, order 2"] < min(bits["polysketch"], bits["window alone"]) < 8
    )
    gain = re.search(r"what is beyond the window is worth (-?[\d.]+) bits per byte", done.stdout)
    assert float(gain[1]) == pytest.approx(bits["window alone"] - bits["polysketch"], abs=2e-3)
    assert (tmp_path / "demo" / "forward_time.png").stat().st_size > 0
