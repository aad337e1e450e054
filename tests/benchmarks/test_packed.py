"""The benchmark of packed rows with tiny sizes."""

import json

import torch

from benchmarks import packed


def test_every_mechanism_and_direction_is_written_with_its_padding(tmp_path):
    out, threads = tmp_path / "packed.json", torch.get_num_threads()
    sizes = ["--documents", "4", "--length", "32", "--repeats", "1", "--mechanisms", "softmax", "sliding-window"]
    assert packed.main([*sizes, "--threads", str(threads), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert sum(report["mixed"]["lengths"]) == 4 * 32
    assert 0 <= report["mixed"]["padding"] <= 1 / 8
    found = {(one["mechanism"], one["direction"]) for one in report["measurements"]}
    directions = ("forward", "forward+backward", "training step of tiny")
    assert found == {(name, direction) for name in ("softmax", "sliding-window") for direction in directions}
    assert all(one["packed_rate_of_rows"] > 0 and one["mixed_rate_of_rows"] > 0 for one in report["measurements"])
