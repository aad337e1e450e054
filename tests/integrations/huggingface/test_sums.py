"""A model's folder with SHA256SUMS is compared with them by every command that reads it, before anything is used."""

import shutil

import pytest

from polysketch.cli import main
from polysketch.integrations.replacement import load_replaced, replace_attention, save_replaced
from polysketch.integrations.transformers_folder import load_transformers, new_model, read_model, read_tokenizer
from polysketch.storage.sums import SUMS, require_sums, write_sums


@pytest.fixture(scope="module")
def exported(make_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums") / "exported"
    assert main(["export", str(make_run("bpe")[0]), str(folder)]) == 0
    return folder


@pytest.fixture
def damage(exported, tmp_path):
    """A function that gives the folder with one bit of a file changed; config.json asks for other rotations then."""

    def change(name: str):
        folder = shutil.copytree(exported, tmp_path / "damaged")
        content = bytearray((folder / name).read_bytes())
        content[content.index(b"10000.0") + 6 if name == "config.json" else -30] ^= 1
        (folder / name).write_bytes(content)
        return folder

    return change


COMMANDS = {
    "evaluate": ["evaluate", "FOLDER", "--data", "DATA", "--split", "test"],
    "generate": ["generate", "FOLDER", "--max-new-tokens", "1"],
    "import": ["import", "FOLDER", "NEW"],
    "serve": ["serve", "FOLDER", "--port", "0", "--engine", "builtin"],
    "prepare": ["prepare", "DATA/../text", "--tokenizer", "FOLDER", "--out", "NEW"],
}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "polysketch_tokenizer.json", "config.json"])
@pytest.mark.parametrize("command", COMMANDS)
def test_one_changed_bit_ends_every_command_with_a_line(command, name, damage, make_run, tmp_path, capsys):
    if command == "prepare" and name == "model.safetensors":
        pytest.skip("prepare reads no weights")
    folder, new = damage(name), tmp_path / "new"
    places = {"FOLDER": str(folder), "DATA": str(make_run("bpe")[1]), "NEW": str(new)}
    line = []
    for word in COMMANDS[command]:
        for place, path in places.items():
            word = word.replace(place, path)
        line.append(word)
    capsys.readouterr()
    assert main(line) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{folder / name}: expected sha256 " in said
    assert f"export again, or delete {folder / SUMS} if you changed it on purpose" in said
    assert not new.exists()


def test_what_was_changed_on_purpose_is_read_without_its_sums(damage):
    folder = damage("model.safetensors")
    with pytest.raises(ValueError, match="altered or damaged"):
        load_transformers(folder)
    (folder / SUMS).unlink()
    load_transformers(folder)


def test_a_reworded_card_is_no_damage_and_weights_are_no_matter_of_the_tokenizer(damage):
    folder = damage("README.md")
    read_model(folder)
    (folder / "model.safetensors").unlink()
    read_tokenizer(folder)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing, but SHA256SUMS lists it"):
        read_model(folder)


def test_a_hole_of_terabytes_is_not_read(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "hole")
    for name in ("model.safetensors", "tokenizer.json"):
        whole = (folder / name).read_bytes()
        with (folder / name).open("r+b") as file:
            file.truncate(2**42)
        with pytest.raises(ValueError, match="found a file of another size"):
            require_sums(folder)
        (folder / name).write_bytes(whole)
    require_sums(folder)


def test_a_replaced_model_is_compared_too_and_saving_it_again_takes_the_sums_away(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = new_model({"model_type": "llama", "vocab_size": 20, **sizes})
    replace_attention(model, "linear")
    save_replaced(model, tmp_path)
    write_sums(tmp_path)
    load_replaced(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for read in (load_replaced, read_model):
        with pytest.raises(ValueError, match="altered or damaged"):
            read(tmp_path)
    save_replaced(model, tmp_path)
    assert not (tmp_path / SUMS).exists()
    read_model(tmp_path)
