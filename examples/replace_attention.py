"""Replace the attention of a Hugging Face model, generate with a state that does not grow, and put it back.

    python examples/replace_attention.py [--model FOLDER] [--attention polysketch] [--layers all]

FOLDER is a Llama, Qwen3, GPT-2 or Mistral model as transformers saves it; without one, a small Llama with random
weights is made, so that nothing is downloaded. LAYERS is all, or a number n for the last n. It needs the extra hf, and
takes some ten seconds.

Attention that was never trained with the model's weights does not write sense: `polysketch convert` trains it.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from polysketch import replace_attention, restore_attention

OPTIONS = {"polysketch": {"sketch_size": 16, "window": 64}}
PROMPT_LENGTHS = (100, 1000)


def main() -> None:
    """Compare the caches of the model before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; default: a small Llama with random weights")
    parser.add_argument("--attention", default="polysketch", help="name of the mechanism")
    parser.add_argument("--layers", default="all", help="all, or n for the last n")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = (small_llama() if options.model is None else AutoModelForCausalLM.from_pretrained(options.model)).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, max(PROMPT_LENGTHS)))
    before = model(ids).logits
    print("before:", {length: cache_bytes(generated(model, ids[:, :length])) for length in PROMPT_LENGTHS})

    layers = "all" if options.layers == "all" else -int(options.layers)
    replace_attention(model, options.attention, layers=layers, **OPTIONS.get(options.attention, {}))
    print("after: ", {length: cache_bytes(generated(model, ids[:, :length])) for length in PROMPT_LENGTHS})

    restore_attention(model)
    assert torch.equal(model(ids).logits, before)
    print("restored: the same logits as before, bit for bit")


def small_llama() -> LlamaForCausalLM:
    """Two layers, four heads of 64 that share two key heads."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def generated(model, ids: torch.Tensor):
    """The cache after twenty new tokens."""
    new = 20
    kept = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return kept.past_key_values


def cache_bytes(cache) -> int:
    """Bytes that a cache holds: keys and values that grow, or states that do not."""
    total = 0
    for layer in cache.layers:
        tensors = (layer.keys, layer.values) if getattr(layer, "keys", None) is not None else ()
        total += layer.nbytes if hasattr(layer, "nbytes") else sum(each.nbytes for each in tensors)
    return total


if __name__ == "__main__":
    main()
