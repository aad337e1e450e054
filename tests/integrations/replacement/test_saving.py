"""Saved and loaded, bit for bit; and loaded as what it is not, loudly refused."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from integrations.replacement.models import load, logits, sketch, text
from polysketch import load_replaced, replace_attention, save_replaced
from polysketch.integrations.replacement import replaced_mechanisms


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_loaded_model_computes_what_the_saved_one_did(folder, tmp_path, name):
    """Mechanisms of several kinds in chosen layers, trained weights, random buffers."""
    model = sketch(load(folder, name), layers=[0, 2])
    replace_attention(model, "hyper", layers=[1], chunk_size=4, sample_size=4, min_length=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    save_replaced(model, tmp_path)
    other = load_replaced(tmp_path)
    assert torch.equal(logits(other, text()), logits(model, text()))
    assert other.state_dict().keys() == model.state_dict().keys()
    assert {i: repr(each) for i, each in replaced_mechanisms(other).items()} == {
        i: repr(each) for i, each in replaced_mechanisms(model).items()
    }


def test_bfloat16_and_pieces_are_kept(folder, tmp_path):
    """As transformers keeps them; and what save_pretrained wrote loads too."""
    model = sketch(load(folder, "llama", dtype=torch.bfloat16))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    other = load_replaced(tmp_path)
    assert next(other.parameters()).dtype == torch.bfloat16
    assert torch.equal(logits(other, text()), logits(model, text()))


@pytest.mark.parametrize(
    ("then", "now", "options"),
    [
        ("polysketch", "polysketch-paper", {"local_chunk": 8, "sketch_size": 8}),
        ("polysketch-delta", "polysketch", {"window": 8, "sketch_size": 4}),
    ],
)
def test_a_folder_of_an_earlier_format_computes_what_it_did(folder, tmp_path, then, now, options):
    """When these mechanisms had other names."""
    model = replace_attention(load(folder, "llama"), now, **options)
    save_replaced(model, tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    del saved["polysketch_attention"]["format"]
    saved["polysketch_attention"]["replaced"][0]["name"] = then
    file.write_text(json.dumps(saved))
    assert torch.equal(logits(load_replaced(tmp_path), text()), logits(model, text()))


def test_options_that_suit_softmax_are_not_given_to_a_folder_that_was_written_without_them(folder, tmp_path):
    then = {"normed": True, "sketched": "unrotated"}
    model = replace_attention(load(folder, "llama"), "polysketch", window=8, sketch_size=4, **then)
    save_replaced(model, tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    options = saved["polysketch_attention"]["replaced"][0]["options"]
    assert {name: options.pop(name) for name in then} == then
    file.write_text(json.dumps(saved))
    assert torch.equal(logits(load_replaced(tmp_path), text()), logits(model, text()))


def test_plain_transformers_refuses_the_folder(folder, tmp_path):
    """It would compute softmax attention; the configuration it reads."""
    save_replaced(sketch(load(folder, "llama")), tmp_path)
    for reader in (AutoModelForCausalLM, LlamaForCausalLM):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            reader.from_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).polysketch_attention["replaced"][0]["name"] == "polysketch-paper"


def test_what_does_not_fit_is_refused(folder, tmp_path):
    """A model that was not replaced, a folder of one, none at all, and weights of another replacement."""
    model = load(folder, "llama")
    with pytest.raises(ValueError, match="no attention was replaced"):
        save_replaced(model, tmp_path)
    with pytest.raises(ValueError, match="does not say that attention was replaced"):
        load_replaced(folder / "llama")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_replaced(tmp_path)
    save_replaced(replace_attention(model, "hedgehog"), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["polysketch_attention"]["replaced"][0]["layers"] = [0, 1]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.polysketch"):
        load_replaced(tmp_path)
    config["polysketch_attention"]["replaced"][0].pop("options")
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must hold 'replaced'"):
        load_replaced(tmp_path)


def test_adapters_are_merged_before_a_model_is_saved(folder, tmp_path):
    """Under a wrapper and without one; nothing is written before."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(replace_attention(load(folder, "llama"), "hedgehog"), config)
    for model in (wrapped, wrapped.get_base_model()):
        with pytest.raises(ValueError, match=r"without adapters, found those of PEFT .*merge_and_unload\(\)"):
            save_replaced(model, tmp_path)
    assert list(tmp_path.iterdir()) == []
    merged = wrapped.merge_and_unload()
    save_replaced(merged, tmp_path)
    assert torch.equal(logits(load_replaced(tmp_path), text()), logits(merged.eval(), text()))


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_a_folder_with_other_weights_is_refused(folder, tmp_path, name):
    """Transformers would go on to load these, and compute softmax attention."""
    model = sketch(load(folder, "llama"))
    (tmp_path / name).write_bytes(b"earlier")
    with pytest.raises(FileExistsError, match="Choose another folder"):
        save_replaced(model, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    (tmp_path / name).unlink()
    save_replaced(model, tmp_path)
    save_replaced(model, tmp_path)  # its own weights may be written again
    assert torch.equal(logits(load_replaced(tmp_path), text()), logits(model, text()))
