"""Measurements: `python -m benchmarks` on a CPU, `python benchmarks/gpu_check.py check` and `bench` on a GPU.

They run from a clone as it is: where polysketch is not installed, its source next to this folder is used.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

if importlib.util.find_spec("polysketch") is None:
    sys.path.insert(0, str(ROOT / "src"))
