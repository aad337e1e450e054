"""A folder of transformers is read as what it is: ours, one with its attention replaced, or any other."""

import contextlib
import json
import os
import pickle

import pytest
import torch

from polysketch.data.tokenization import BytesTokenizer
from polysketch.integrations.huggingface import PolysketchForCausalLM
from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer
from polysketch.integrations.replacement import replace_attention, save_replaced
from polysketch.integrations.transformers_folder import (
    is_transformers_folder,
    load_transformers,
    read_model,
    read_tokenizer,
)
from polysketch.models import ModelConfig, TransformerLM

IDS = torch.arange(60).remainder(7)[None] + 97


@pytest.fixture
def llama():
    """Random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes)).eval()


@pytest.mark.parametrize("kind", ["plain", "replaced", "ours"])
def test_logits_are_those_of_the_model_that_was_saved(tmp_path, llama, kind):
    """Of a replaced one, those with its mechanism."""
    model = llama
    if kind == "ours":
        options = {"local_chunk": 16, "sketch_size": 8}
        config = ModelConfig(257, 1, 64, num_heads=1, attention="polysketch-paper", attention_options=options)
        model = PolysketchForCausalLM.from_transformer(TransformerLM(config).eval())
    if kind == "replaced":
        plain = llama(IDS).logits
        replace_attention(model, "polysketch-paper", sketch_size=8, local_chunk=16)
        save_replaced(model, tmp_path)
        assert not torch.allclose(model(IDS).logits, plain, atol=1e-3)
    else:
        model.save_pretrained(tmp_path)
    to_fast_tokenizer(BytesTokenizer()).save_pretrained(tmp_path)
    assert is_transformers_folder(tmp_path)
    found, tokenizer = load_transformers(tmp_path)
    assert not found.training
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits)
    assert tokenizer.encode("ab") == [97, 98]


@pytest.mark.parametrize("contents", [None, "{}", "[1]", "no json", '{"training": {}}'])
def test_other_folders_are_not_of_transformers(tmp_path, contents):
    """A training run among them."""
    if contents is not None:
        (tmp_path / "config.json").write_text(contents)
    assert not is_transformers_folder(tmp_path)


@pytest.mark.parametrize("layers", [22, 2**31])
def test_more_layers_than_weights_are_refused_before_they_are_built(tmp_path, llama, layers):
    llama.save_pretrained(tmp_path)  # 21 tensors
    to_fast_tokenizer(BytesTokenizer()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with pytest.raises(ValueError, match=f"expected weights of {layers:,} layers, found 21 tensors"):
        load_transformers(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 10**7), ("intermediate_size", 10**7)])
def test_a_model_of_more_numbers_than_its_files_have_bits_is_refused_before_it_is_built(tmp_path, llama, name, value):
    """transformers allocates what does not fit the files, 2.4 GB for these words, before it says so."""
    llama.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ValueError, match=r"expected weights of [\d,]+ numbers, found files of [\d,]+ bytes"):
        read_model(tmp_path)


class Sings:
    """What an unpickler calls makes a file."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return type(self.canary).touch, (self.canary,)


@pytest.mark.parametrize("kind", ["llama", "polysketch", "unheard-of"])
def test_no_code_of_a_folder_is_run(tmp_path, llama, kind):
    canary, folder = tmp_path / "canary", tmp_path / "model"
    llama.save_pretrained(folder)
    to_fast_tokenizer(BytesTokenizer()).save_pretrained(folder)
    (folder / "modeling.py").write_text(f"open({str(canary)!r}, 'w').close()\nModel = dict\n")
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    asks = {"auto_map": dict.fromkeys(names, "modeling.Model"), "trust_remote_code": True}
    for file in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / file).read_text()) | asks
        (folder / file).write_text(json.dumps(values | ({"model_type": kind} if file == "config.json" else {})))
    for read in (read_model, read_tokenizer):
        with contextlib.suppress(ValueError, OSError, RuntimeError):
            read(folder)
    assert not canary.exists()
    scope = {}
    exec((folder / "modeling.py").read_text(), scope)
    assert canary.exists()  # it would have been made


def test_pickled_weights_are_refused_and_not_unpickled(tmp_path, llama):
    canary, folder = tmp_path / "canary", tmp_path / "model"
    llama.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Sings(canary)))
    with pytest.raises(OSError, match="safetensors"):
        read_model(folder)
    assert not canary.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert canary.exists()  # it would have been made


def test_an_index_leads_to_no_file_outside_its_folder(tmp_path, llama):
    folder = tmp_path / "model"
    llama.save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(llama.state_dict(), "../x.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"expected plain names of files in .*, found '\.\./x\.safetensors'"):
        read_model(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path, llama, name):
    llama.save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="expected a file, found a pipe or a device"):
        load_transformers(tmp_path)


@pytest.mark.parametrize("value", [2**63, [0, -(2**64)]], ids=repr)
def test_numbers_that_pytorch_has_not_are_refused_before_a_model_is_read(tmp_path, llama, value):
    llama.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": value}))
    with pytest.raises(ValueError, match="expected whole numbers of at most 64 bits, found a larger pad_token_id"):
        load_transformers(tmp_path)
