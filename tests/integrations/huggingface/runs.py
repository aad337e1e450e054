"""Short runs with every kind of tokenizer, for what reads run folders."""

from pathlib import Path

from polysketch.data import prepare
from polysketch.training import TrainingConfig, train

TEXT = "It was the best of times, it was the worst of times; naïve façades, 12 € — 日本語 🙂.\n" * 12
TOKENIZERS = {"bytes": "bytes", "bpe": "bpe:290", "sentencepiece": "sentencepiece:330"}


def make_run_in(folder: Path, kind: str) -> tuple[Path, Path]:
    """A run of four steps in `folder`, and the data it was trained on."""
    for split in ("train", "validation", "test"):
        (folder / "text" / split).mkdir(parents=True)
        (folder / "text" / split / "times.txt").write_text(f"{split}\n{TEXT}", encoding="utf-8")
    prepare([folder / "text"], TOKENIZERS[kind], folder / "data", progress=False)
    config = TrainingConfig(
        data=folder / "data",
        out=folder / "run",
        layers=1,
        attention_options={"sketch_size": 4, "window": 16},
        context=64,
        batch_size=2,
        steps=4,
        eval_every=4,
        eval_tokens=200,
        save_every=2,
        device="cpu",
        tensorboard=False,
    )
    train(config, progress=False)
    return folder / "run", folder / "data"
