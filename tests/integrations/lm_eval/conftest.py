"""Offline; small files of every task in several layouts; a random Llama and a small tokenizer."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from polysketch.data.tokenization import BpeTokenizer
from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer

NOUNS = ["anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer", "island", "jacket"]
VERBS = ["opens", "breaks", "paints", "carries", "washes", "hides", "sells", "lifts", "burns", "finds"]


def hellaswag(index: int) -> dict[str, Any]:
    """As the authors give it; every third is a how-to article, which has no begun sentence."""
    noun, verb = NOUNS[index % 10], VERBS[index * 3 % 10]
    how_to = index % 3 == 0
    first = f"How to use the {noun} [title] Look first. It {verb}." if how_to else f"A {noun} is seen. It {verb}."
    return {
        "activity_label": f"With the {noun}",
        "ctx_a": first,
        "ctx_b": "" if how_to else "the man",
        "endings": [f"{each} the {noun} no. {index}." for each in VERBS[index % 5 : index % 5 + 4]],
        "label": str(index * 7 % 4),
    }


def piqa(index: int) -> dict[str, Any]:
    """The one layout."""
    noun = NOUNS[index % 10]
    sol1, sol2 = f"Take the {noun} and wait.", f"Put the {noun} no. {index} into  water."
    return {"goal": f"How is a {noun} no. {index} cleaned?", "sol1": sol1, "sol2": sol2, "label": index % 2}


def arc(index: int) -> dict[str, Any]:
    """As on the Hub."""
    return {
        "question": f"Which of these {VERBS[index % 10]} a {NOUNS[index * 7 % 10]} {index}?",
        "choices": {"text": [f"the {noun}" for noun in NOUNS[index % 6 : index % 6 + 4]], "label": list("ABCD")},
        "answerKey": "ABCD"[index * 5 % 4],
    }


def openbookqa(index: int) -> dict[str, Any]:
    """As on the Hub."""
    document = arc(index)
    return {"question_stem": document.pop("question"), **document}


def winogrande(index: int) -> dict[str, Any]:
    """As on the Hub; documents 2k and 2k + 1 are twins, whose right answers differ."""
    noun = NOUNS[index // 2 % 10]
    end = "was larger." if index % 2 else "was smaller."
    sentence = f"The {noun} {index // 2} did not fit into the box because the _ {end}"
    return {"sentence": sentence, "option1": noun, "option2": "box", "answer": str(1 + index % 2)}


def lambada(index: int) -> dict[str, Any]:
    """Text whose last word is asked for."""
    noun, verb = NOUNS[index % 10], VERBS[index % 10]
    return {"text": f'He {verb} the {noun}. "Why {index}?"\n\nShe looks at the {noun}'}


def boolq(index: int) -> dict[str, Any]:
    """As on the Hub."""
    noun, verb = NOUNS[index % 10], VERBS[index * 3 % 10]
    passage = f"Nobody {verb} a {noun} no. {index}. It stands there."
    return {"passage": passage, "question": f"is there a {noun}", "label": index * 5 % 2, "idx": index}


def copa(index: int) -> dict[str, Any]:
    """As on the Hub."""
    noun, verb = NOUNS[index % 10], VERBS[index * 3 % 10]
    premise = f"The man {verb} the {noun} no. {index}."
    choices = {"choice1": f"The {noun} fell.", "choice2": f"He saw the {NOUNS[index * 7 % 10]}."}
    return {"premise": premise, **choices, "question": ("cause", "effect")[index % 2], "label": index // 2 % 2}


def wsc(index: int) -> dict[str, Any]:
    """As on the Hub, where spans are in the text."""
    noun, verb = NOUNS[index % 10], VERBS[index * 3 % 10]
    text = f"Mark told Pete that {index} lies {verb} the {noun} , but he knows."
    spans = {"span1_index": 0, "span1_text": "Mark", "span2_index": 10, "span2_text": "he"}
    return {"text": text, **spans, "label": index * 5 % 2}


MAKERS = {
    "hellaswag": hellaswag,
    "piqa": piqa,
    "arc_easy": arc,
    "arc_challenge": arc,
    "openbookqa": openbookqa,
    "winogrande": winogrande,
    "lambada_openai": lambada,
    "boolq": boolq,
    "copa": copa,
    "wsc": wsc,
}
"""Documents in the layout of the Hub."""

PHYSICS = {
    "name": "physics",
    "description": "formulas",
    "metrics": ["multiple_choice_grade"],
    "examples": [
        {
            "input": f"A ball no. {index} falls for {index + 2} s. Which formula gives its speed?",
            "target_scores": {"v = a t": 1, "s = v t": 0, "F = m a": 0, f"E = {index} h f": 0},
        }
        for index in range(8)
    ],
}


def write_documents(file: Path, documents: list[dict[str, Any]]) -> Path:
    """Write one object a line, compressed where the name says so."""
    text = "".join(json.dumps(document) + "\n" for document in documents).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of every task, twelve documents each, in the layout of the Hub, and a BIG-bench task."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, make in MAKERS.items():
        write_documents(folder / f"{name}.jsonl.gz", [make(index) for index in range(12)])
    (folder / "physics.json").write_text(json.dumps(PHYSICS))
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> BpeTokenizer:
    """A few merges of the tasks' own words: answers of one token and of many."""
    texts = [json.dumps(make(index)) for make in MAKERS.values() for index in range(12)]
    return BpeTokenizer.train(texts, 400)


@pytest.fixture(scope="session")
def fast_tokenizer(tokenizer: BpeTokenizer):
    """The same for transformers."""
    return to_fast_tokenizer(tokenizer)


@pytest.fixture(scope="session")
def llama(tokenizer: BpeTokenizer):
    """Random weights, large enough that answers differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()
