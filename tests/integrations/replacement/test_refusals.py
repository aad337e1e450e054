"""What a mechanism cannot honour is refused, and says why; nothing is dropped in silence."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    WhisperConfig,
    WhisperForAudioClassification,
)

import polysketch
from integrations.replacement.models import LAYERS, WINDOW, generate, load, logits, text
from polysketch import replace_attention, restore_attention

SMALL = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
MOSHI = {"vocab_size": 31, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def llama(folder):
    """An unmodified Llama."""
    return load(folder, "llama")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (-LAYERS - 1, f"the model has {LAYERS}"),
        (0, "neither a number of last layers nor a list"),
        (2, r"\[2\] means layer 2 alone"),
        ([], "at least one layer"),
        ([0, -LAYERS], "none twice"),
        ([LAYERS], "does not exist"),
        ("some", '"all"'),
    ],
)
def test_layers_that_do_not_exist_are_refused(llama, layers, message):
    """Before anything is changed."""
    with pytest.raises(ValueError, match=message):
        replace_attention(llama, "softmax", layers=layers)
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layers", [True, [1.0]])
def test_layers_of_another_type_are_refused(llama, layers):
    """True is not layer 1."""
    with pytest.raises(TypeError, match="layer"):
        replace_attention(llama, "softmax", layers=layers)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("flash", {}, "known mechanisms"),
        ("nystrom", {}, "cannot be causal, .*; mechanisms that can: softmax, .*polysketch, "),
        ("polysketch-paper", {"sketch": 3}, "no option 'sketch'"),
        ("softmax", {"sliding_window": "drop"}, "refuse"),
    ],
)
def test_mechanisms_and_options_that_do_not_fit_are_refused(llama, name, options, message):
    """By name."""
    with pytest.raises(ValueError, match=message):
        replace_attention(llama, name, **options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL)), "attn_logit_softcapping"),
        (lambda: GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2)), "sinks"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, reorder_and_upcast_attn=True)), "upcast"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, add_cross_attention=True)), "cross"),
    ],
    ids=["gemma2", "gpt-oss", "gpt2-upcast", "gpt2-cross"],
)
@pytest.mark.filterwarnings("ignore")  # what these architectures say of their own tiny configurations
def test_architectures_that_cannot_be_served_are_refused(build, message):
    """Softcapping, sinks, cross-attention: by what they have."""
    with pytest.raises(ValueError, match=message):
        replace_attention(build(), "softmax")


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
import polysketch
polysketch.replace_attention
"""


def test_layers_that_attend_twice_do_not_decode():
    """DiffLlama's two halves of the values: a state would be given every token twice."""
    model = replace_attention(
        DiffLlamaForCausalLM(DiffLlamaConfig(**{**SMALL, "num_key_value_heads": 2})), "softmax"
    ).eval()
    assert logits(model, text() % 31, use_cache=False).isfinite().all()
    with pytest.raises(ValueError, match="DiffLlamaAttention attends more than once"):
        generate(model, text() % 31)


@pytest.mark.parametrize("build", [lambda: MoshiForCausalLM(MoshiConfig(**MOSHI)), lambda: normed_behind_rotation()])
def test_positions_that_cannot_be_undone_are_refused(build):
    """Rotations inside the layer, and norms behind them. The model stays as it was."""
    model = build().eval()
    ids = text() % 31
    own = logits(model, ids)
    with pytest.raises(ValueError, match=r"layer 0 of .* tells positions in a way that cannot be undone"):
        replace_attention(model, "polysketch")
    assert torch.equal(logits(model, ids), own)
    assert not any(module._forward_pre_hooks for module in model.modules())


def normed_behind_rotation() -> HunYuanDenseV1ForCausalLM:
    """With norms that do not weigh all numbers of a vector alike."""
    model = HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**SMALL))
    for layer in model.model.layers:
        nn.init.uniform_(layer.self_attn.query_layernorm.weight, 0.5, 1.5)
    return model


@pytest.mark.full
def test_without_transformers_the_pip_command_is_said():
    """Where the first function is asked for; other names are missing as in any module."""
    found = subprocess.run([sys.executable, "-c", WITHOUT_TRANSFORMERS], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "polysketch.replace_attention: the package 'transformers' is needed here" in found.stderr
    assert "pip install 'polysketch[hf]'" in found.stderr
    with pytest.raises(AttributeError, match="has no attribute 'replace_atention'"):
        _ = polysketch.replace_atention


def test_layers_that_compute_attention_themselves_are_refused():
    """GPT-J's ask no registry."""
    sizes = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4}
    config = GPTJConfig(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    with pytest.raises(ValueError, match="GPTJAttention does not look its attention function up"):
        replace_attention(GPTJForCausalLM(config), "softmax")


def test_other_objects_are_refused():
    """A module that is no transformers model."""
    with pytest.raises(TypeError, match="expected a transformers model"):
        replace_attention(nn.Linear(2, 2), "softmax")


def test_a_sequence_longer_than_the_layers_window_is_refused(folder):
    """In one pass and while decoding; unless it was said that the window may be ignored."""
    model = replace_attention(load(folder, "mistral"), "polysketch-paper", local_chunk=8, sketch_size=8)
    assert logits(model, text(1, WINDOW)).shape[1] == WINDOW
    with pytest.raises(ValueError, match=f"last {WINDOW} tokens"):
        logits(model, text(1, WINDOW + 1))
    with pytest.raises(ValueError, match=f"last {WINDOW} tokens"):
        generate(model, text(1, WINDOW - 2), tokens=6)
    replace_attention(model, "polysketch-paper", local_chunk=8, sketch_size=8, sliding_window="ignore")
    assert generate(model, text(1, WINDOW - 2), tokens=6).sequences.shape[1] == WINDOW + 4


def test_windows_are_each_layers_own():
    """A Qwen3 whose first layer has none."""
    config = Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    model, ids = Qwen3ForCausalLM(config).eval(), text(1, 12) % 31
    own = logits(model, ids)
    torch.testing.assert_close(logits(replace_attention(model, "softmax", layers=[0]), ids), own)
    with pytest.raises(ValueError, match="layer 1 attends to the last 8 tokens"):
        logits(replace_attention(model, "softmax"), ids)
    torch.testing.assert_close(logits(replace_attention(model, "sliding-window", layers=[1], window=8), ids), own)


@pytest.mark.parametrize(
    ("positions", "options", "message"),
    [
        (torch.arange(20).repeat(2)[None], {"use_cache": True}, "pass use_cache=False"),
        (torch.arange(20).repeat(2)[None].repeat(2, 1), {}, "packed sequences, in 2 rows"),
        (torch.arange(1, 21).repeat(2)[None], {}, "restart at 0 with the next"),
        (torch.arange(40).flip(0)[None], {}, "must go on by one within a document"),
        (torch.arange(40)[None], {"cu_seq_lens_q": torch.tensor([0, 20, 40], dtype=torch.int32)}, "where they say"),
        (
            torch.arange(20).repeat(2)[None],
            {"cu_seq_lens_q": torch.tensor([0, 10, 40], dtype=torch.int32)},
            r"got documents of \[10, 30\] and \[20, 20\] tokens",
        ),
        (
            torch.arange(20).repeat(2)[None],
            {"cu_seq_lens_q": torch.tensor([0, 20, 40], dtype=torch.int32), "attention_mask": torch.ones(1, 40)},
            "neither a cache nor an attention_mask",
        ),
        (torch.arange(20).repeat(2)[None], {"cu_seq_lens_k": torch.tensor([0, 20, 40])}, "must be an int32 tensor"),
    ],
)
def test_packed_sequences_that_are_not_understood_are_refused(llama, positions, options, message):
    replace_attention(llama, "softmax")
    with pytest.raises((ValueError, TypeError), match=message):
        llama(text(positions.shape[0], 40), position_ids=positions, **{"use_cache": False, **options})


def test_masks_of_all_pairs_are_refused(llama):
    """Of which a mechanism could honour the padding alone."""
    replace_attention(llama, "softmax", layers=[1])
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="mask of all pairs"):
        llama(text(1, 20), attention_mask=mask)
    with pytest.raises(ValueError, match="cover all tokens so far"):
        llama(text(1, 20), attention_mask=torch.ones(1, 12, dtype=torch.int64))


def test_attention_dropout_in_training_is_refused(folder):
    """GPT-2 has it; it can be ignored on purpose."""
    model = replace_attention(load(folder, "gpt2"), "softmax").train()
    with pytest.raises(ValueError, match=r"attention dropout of 0\.1"):
        model(text())
    assert model.eval()(text()).logits.isfinite().all()
    assert replace_attention(model, "softmax", dropout="ignore").train()(text()).logits.isfinite().all()


def test_training_with_a_cache_is_refused(llama):
    """No gradient flows through a state."""
    replace_attention(llama, "hedgehog").train()
    with pytest.raises(ValueError, match="no gradient flows"):
        llama(text(), past_key_values=DynamicCache())
    assert llama.generate(text(), max_new_tokens=2, do_sample=False).shape[1] == text().shape[1] + 2


def test_setting_the_implementation_of_a_replaced_model_is_refused(llama):
    """It would take the masks away; restoring works nevertheless, and gives the model what it had."""
    own = logits(llama, text())
    replace_attention(llama, "softmax", layers=[1])
    llama.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="set to 'eager' after replace_attention"):
        llama(text())
    assert torch.equal(logits(restore_attention(llama), text()), own)


def test_a_model_loaded_by_the_registered_name_alone_is_refused(folder):
    """attn_implementation="polysketch" says nothing of mechanisms."""
    model = load(folder, "llama")
    model.set_attn_implementation("polysketch")
    with pytest.raises(ValueError, match=r"polysketch\.replace_attention"):
        model(text())


def test_an_encoder_that_is_called_an_encoder_and_decoder_is_refused_by_what_it_lacks():
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(vocab_size=9, d_model=8, num_mel_bins=8, max_source_positions=20, **sizes, **ids)
    with pytest.raises(ValueError, match="or has no decoder though its configuration says is_encoder_decoder"):
        replace_attention(WhisperForAudioClassification(config), "softmax")
