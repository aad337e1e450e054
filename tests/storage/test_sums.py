"""Files against their SHA256SUMS."""

import pytest

from polysketch.storage import sums


def test_weights_of_any_size_are_compared_and_other_files_are_bounded(tmp_path, monkeypatch):
    """Weights of a graph may be many gigabytes; a description of that size was never written."""
    for name in ("graph.onnx.data", "config.json"):
        (tmp_path / name).write_bytes(b"0123456789")
    sums.write_sums(tmp_path)
    sums.require_sums(tmp_path)
    monkeypatch.setattr(sums, "LARGEST", 9)
    sums.require_sums(tmp_path, lambda name: name.endswith(".data"))
    with pytest.raises(ValueError, match=r"config.json: .* found a file of another size"):
        sums.require_sums(tmp_path)
