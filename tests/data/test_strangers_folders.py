"""A prepared folder from a stranger: the names in it lead to files of its own alone."""

import json

import pytest

from polysketch.data import PreparedData, load_tokenizer, prepare

SHARES = {"validation_share": 0.2, "test_share": 0.2, "progress": False}
OUTSIDE = ["../secret.json", "/etc/passwd", "deep/../../secret.json", "..", "", "tokenizer\n.json", 7]


@pytest.fixture
def folder(corpus_folder, tmp_path):
    prepare(corpus_folder, "bpe:300", tmp_path / "out", **SHARES)
    return tmp_path / "out"


def change(folder, place: tuple[str, ...], value) -> None:
    path = folder / "description.json"
    described = json.loads(path.read_bytes())
    del described["sha256"]  # as those of earlier versions; a stranger can make a right one as well
    inner = described
    for name in place[:-1]:
        inner = inner[name]
    assert place[-1] in inner
    inner[place[-1]] = value
    path.write_text(json.dumps(described))


@pytest.mark.parametrize("place", [("tokenizer", "file"), ("splits", "train", "file")], ids=["tokenizer", "split"])
@pytest.mark.parametrize("name", OUTSIDE, ids=str)
def test_a_name_that_leaves_the_folder_is_refused(folder, tmp_path, place, name):
    (tmp_path / "secret.json").write_bytes((folder / "tokenizer.json").read_bytes())
    change(folder, place, name)
    with pytest.raises(ValueError, match="expected the plain name of a file beside"):
        PreparedData.open(folder)


def test_a_tokenizers_file_has_the_name_of_its_kind(folder):
    (folder / "train.json").write_bytes((folder / "tokenizer.json").read_bytes())
    change(folder, ("tokenizer", "file"), "train.json")
    with pytest.raises(ValueError, match=r"expected tokenizer\.json as the tokenizer's file of kind bpe"):
        load_tokenizer(folder)


def test_a_copy_of_the_tokenizer_replaces_a_planted_link_and_is_whole(folder, tmp_path):
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "copy").mkdir()
    for name in ("description.json", "tokenizer.json"):
        (tmp_path / "copy" / name).symlink_to(tmp_path / "secret")
    PreparedData.open(folder).copy_tokenizer(tmp_path / "copy")
    assert (tmp_path / "secret").read_text() == "mine"
    for name in ("description.json", "tokenizer.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (folder / name).read_bytes()
