"""A small Llama and text for it, made once: words that come again and again, so that a look one word back tells all."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from once import made_once
from pictures import no_pixels, pixels  # noqa: F401  (fixtures)
from polysketch.conversion import ConversionConfig, ConversionResult, convert
from polysketch.data import PreparedData, prepare

CONTEXT = 64


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Bytes: every text is a random word of six letters, again and again; six is more than a chunk of four."""
    folder = tmp_path_factory.mktemp("conversion")
    generator = np.random.default_rng(0)
    for split, number in (("train", 200), ("validation", 20)):
        (folder / "text" / split).mkdir(parents=True)
        for index in range(number):
            word = "".join(generator.permutation(list("abcdefghijklmnopqrst"))[:6])
            (folder / "text" / split / f"{index}.txt").write_text(word * 60)
    return prepare([folder / "text"], "bytes", folder / "data", test_share=0, progress=False)


@pytest.fixture(scope="session")
def softmax_model(data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama trained on that text until it looks a word back, by the first process that needs it."""
    return made_once(tmp_path_factory, "softmax-model", partial(train_llama, data))


def train_llama(data: PreparedData, folder: Path) -> None:
    """Train the Llama of these tests, and save it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from polysketch.data import TrainingWindows
    from polysketch.integrations.language_model import HuggingFaceLM
    from polysketch.training.options import StepOptions
    from polysketch.training.step import Updater

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=data.tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).train()
    options = StepOptions(steps=120, warmup=12, learning_rate=1e-2, weight_decay=0.1)
    updater = Updater(HuggingFaceLM(model), options, torch.float32)
    windows = TrainingWindows(data.split("train").tokens, CONTEXT, 0)
    for step in range(120):
        updater.compute_gradient(windows.batch(step, 16))
        updater.apply(step)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def options(data: PreparedData, softmax_model: Path) -> dict:
    """What all conversions of the tests have in common."""
    return {
        "model": softmax_model,
        "data": data.folder,
        "attention": "polysketch-paper",
        "attention_options": {"local_chunk": 4, "sketch_size": 16},
        "context": CONTEXT,
        "batch_size": 4,
        "transfer_steps": 16,
        "tuning_steps": 8,
        "learning_rate": 3e-3,
        "transfer_learning_rate": 1e-2,
        "log_every": 5,
        "save_every": 6,
        "eval_tokens": 1280,
    }


@pytest.fixture(scope="session")
def converted(options: dict, tmp_path_factory: pytest.TempPathFactory) -> ConversionResult:
    """A conversion that nothing interrupted."""
    out = tmp_path_factory.mktemp("converted") / "out"
    return convert(ConversionConfig(**options, out=out), progress=False)


@pytest.fixture(scope="session")
def three_stages(options: dict) -> dict:
    """Of a conversion with distillation between transfer and tuning."""
    steps = {"transfer_steps": 4, "distillation_steps": 8, "tuning_steps": 4, "save_every": 3}
    return {**options, **steps, "learning_rate": 1e-3, "distillation_learning_rate": 3e-3, "eval_tokens": 640}


@pytest.fixture(scope="session")
def distilled(three_stages: dict, tmp_path_factory: pytest.TempPathFactory) -> ConversionResult:
    """A conversion of three stages that nothing interrupted."""
    out = tmp_path_factory.mktemp("distilled") / "out"
    return convert(ConversionConfig(**three_stages, out=out), progress=False)
