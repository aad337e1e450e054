"""README.md of an exported model: what it is, what was measured, and how to use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import transformers

import polysketch
from polysketch.models import ModelConfig
from polysketch.models.answering import AnsweringConfig

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
    between = f" in one of {config.attention_every} layers, windows in the others" * (config.attention_every > 1)
    yield "attention", ", ".join(names) + between
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


_TASK_CARD = """---
library_name: transformers
tags: [{tags}]
---

# {name}

A model of the task {task}, trained and exported by polysketch.

{table}

Figures are those of the run the weights come from; what was not measured there is not here.

## Use

The import makes transformers know this kind of model; no code comes with the weights.

```python
import polysketch.integrations.huggingface  # pip install 'polysketch[hf]'
{lines}
```
"""
_PIPELINE = """from transformers import pipeline

classify = pipeline("text-classification", "{name}")
print(classify("a text", truncation=True))"""
_IDS = """import torch
from transformers import {auto}

model = {auto}.from_pretrained("{name}")
ids = torch.randint({vocabulary}, (1, {length}))
print({call})"""


def task_card(name: str, auto: str, sizes: AnsweringConfig, facts: Mapping[str, Any], *, has_tokenizer: bool) -> str:
    """The card of the model of a task, as Markdown.

    Args:
        name: of the exported folder.
        auto: the class of transformers that loads it.
        sizes: of the model.
        facts: as `facts.task_facts` gives them.
        has_tokenizer: whether the folder has one.
    """
    sides = [sizes.sizes] if isinstance(sizes.sizes, ModelConfig) else [sizes.sizes.encoder, sizes.sizes.decoder]
    tags = dict.fromkeys(["polysketch", *(layer for side in sides for layer, _ in side.layers())])
    rows = "\n".join(f"| {title} | {value} |" for title, value in _task_rows(sides, sizes, facts))
    if sizes.asks == "class" and has_tokenizer:
        lines = _PIPELINE.format(name=name)
    else:
        call = "model.generate(ids)" if sizes.asks == "written" else "model(ids).logits"
        length = min(8, facts["training"]["context"])
        lines = _IDS.format(name=name, auto=auto, vocabulary=sizes.vocab_size, length=length, call=call)
    return _TASK_CARD.format(
        name=name, tags=", ".join(tags), task=facts["data"]["task"], table=f"| | |\n|---|---|\n{rows}", lines=lines
    )


def _task_rows(sides: list[ModelConfig], sizes: AnsweringConfig, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{facts['parameters']:,}"
    for name, side in zip(("reads", "writes") if len(sides) > 1 else ("size",), sides, strict=True):
        attention = ", ".join(dict.fromkeys(layer for layer, _ in side.layers()))
        width = f"{side.num_heads} heads of {side.head_dim}, width {side.hidden_size}"
        yield name, f"{side.num_layers} layers of {attention}, {width}"
    yield "longest row", f"{facts['training']['context']:,} tokens of {sizes.vocab_size:,} ids"
    yield "trained for", f"{facts['step']:,} steps of {facts['training'].get('batch_size', 0):,} rows"
    yield "learning rate, seed", f"{facts['training'].get('learning_rate')}, {facts['training'].get('seed')}"
    yield "trained with", ", ".join(f"{name} {value}" for name, value in facts["environment"].items())
    yield "exported with", f"polysketch {polysketch.__version__}, transformers {transformers.__version__}"
    measured = facts["metrics"].get("evaluation")
    if measured and measured.get("accuracy") is not None:
        step, rows = measured["step"], measured["rows"]
        yield f"validation loss at step {step:,}", f"{measured['loss']:.4f} nats per answer of {rows:,} rows"
        yield "validation accuracy", f"{measured['accuracy']:.2%} of {measured['answers']:,} answers"
