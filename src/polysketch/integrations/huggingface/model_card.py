"""README.md of an exported model: what it is, what was measured, and how to use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import transformers

import polysketch
from polysketch.models import ModelConfig

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [{tags}]
---

# {name}

A language model, trained and exported by polysketch.

{table}

Figures are those of the run the weights come from; what was not measured there is not here.

## Use

The import makes transformers know this kind of model; no code comes with the weights.

```python
import polysketch.integrations.huggingface  # pip install 'polysketch[hf]'
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

folder = "{name}"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer("The ", return_tensors="pt")
streamer = TextStreamer(tokenizer)
model.generate(**inputs, max_new_tokens=200, do_sample=True, temperature=0.8, streamer=streamer)
```

Batches are padded on the left. `polysketch import {name} RUN` makes a run folder of it again.
"""


def model_card(name: str, config: ModelConfig, facts: Mapping[str, Any]) -> str:
    """The card as Markdown.

    Args:
        name: of the exported folder.
        config: of the model.
        facts: as `facts.run_facts` gives them.
    """
    tags = dict.fromkeys(["polysketch", *(layer for layer, _ in config.layers())])
    rows = [*_model_rows(config, facts), *_training_rows(facts), *_measured_rows(facts)]
    table = "\n".join(["| | |", "|---|---|", *(f"| {title} | {value} |" for title, value in rows)])
    return _CARD.format(name=name, tags=", ".join(tags), table=table)


def _model_rows(config: ModelConfig, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{facts['parameters']:,}"
    yield (
        "size",
        f"{config.num_layers} layers, {config.num_heads} heads of {config.head_dim}, width {config.hidden_size}",
    )
    names = [config.attention] if isinstance(config.attention, str) else config.attention
    yield "attention", ", ".join(names)
    if config.attention_options:
        yield "options of attention", f"`{config.to_dict()['attention_options']}`"
    around = [f"convolution of {config.projection_convolution} taps"] if config.projection_convolution else []
    around += [name.replace("_", " ") for name in ("query_key_norm", "head_gate") if getattr(config, name)]
    if around:
        yield "around attention", ", ".join(around)
    grows = "grows with every token"
    state = facts["state_bytes"]
    yield "state of a sequence", grows if state is None else f"{state:,} bytes in float32, whatever its length"
    yield "tokenizer", f"{facts['tokenizer']['name']}, {facts['tokenizer']['vocab_size']:,} ids"


def _training_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    training, data, environment = facts["training"], facts["data"], facts["environment"]
    yield "data", f"{data['name']}: {', '.join(data['sources']) or 'sources not recorded'}"
    for name, split in data["splits"].items():
        yield f"{name} split", f"{split['tokens']:,} tokens, {split['documents']:,} documents, {split['bytes']:,} bytes"
    yield "context", f"{training['context']:,} tokens"
    tokens = facts["step"] * training.get("batch_size", 0) * training["context"]
    yield "trained for", f"{facts['step']:,} steps" + (f", {tokens:,} tokens" if tokens else "")
    if "learning_rate" in training:
        yield "learning rate, seed", f"{training['learning_rate']}, {training['seed']}"
    yield "trained with", ", ".join(f"{name} {value}" for name, value in environment.items())
    yield "exported with", f"polysketch {polysketch.__version__}, transformers {transformers.__version__}"


def _measured_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    train, evaluation = (facts["metrics"].get(kind) for kind in ("train", "evaluation"))
    if train and train.get("loss") is not None:
        yield f"training loss at step {train['step']:,}", f"{train['loss']:.4f} nats per token"
    if evaluation and evaluation.get("loss") is not None:
        measured = f"{evaluation['loss']:.4f} nats per token on {evaluation['tokens']:,} tokens"
        yield f"validation loss at step {evaluation['step']:,}", measured
        yield "validation perplexity", f"{evaluation['perplexity']:.3f} per token"
        if evaluation.get("bits_per_byte") is not None:
            yield "validation bits per byte", f"{evaluation['bits_per_byte']:.4f}"
