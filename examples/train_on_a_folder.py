"""Train a language model on a folder of text, measure it on held-out text, and let it write: the library's functions.

    python examples/train_on_a_folder.py FOLDER [--out folder-model] [--steps 30] [--context 256]

FOLDER holds text files, source code, .jsonl or .parquet. OUT is made, with the tokens in OUT/data and the run in
OUT/run; it must not be there yet. With the default sizes it takes some twenty seconds on a CPU, and the model learns
little; give it more steps for more. The same as commands: docs/training.md.
"""

import argparse
from pathlib import Path

from polysketch.data import PreparedData, ReadOptions, prepare
from polysketch.evaluation import evaluate
from polysketch.generation import generate
from polysketch.training import TrainingConfig, load_model, train

DOCUMENT_BYTES = 4_000  # long files are cut, so that every split gets some of them


def main() -> None:
    """Prepare, train, evaluate and generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="text to train on")
    parser.add_argument("--out", type=Path, default=Path("folder-model"), help="folder to make")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--context", type=int, default=256, help="tokens of a training window")
    options = parser.parse_args()
    data = prepare(options.folder, "bytes", options.out / "data", options=ReadOptions(cut_text=DOCUMENT_BYTES))
    train(
        TrainingConfig(
            data=data.folder,
            out=options.out / "run",
            preset="tiny",
            attention="polysketch",
            attention_options={"sketch_size": 16, "window": 64},
            context=options.context,
            batch_size=2,
            steps=options.steps,
            eval_every=0,
        )
    )
    report(options.out / "run", data)


def report(run: Path, data: PreparedData) -> None:
    """Bits per byte on held-out text at two contexts, and a continuation of it."""
    model, description = load_model(run)
    tokens = data.split("test").tokens
    for context in (description.context_length, 8 * description.context_length):
        found = evaluate(
            model, tokens, context_length=context, max_tokens=8192, token_bytes=data.tokenizer.token_bytes()
        )
        print(f"context {context:>6,}: {found.bits_per_byte:.3f} bits per byte of held-out text")
    prompt = tokens[:64].tolist()
    written = generate(model, [prompt], max_new_tokens=64, temperature=0.7, seed=0)
    print(f"{data.tokenizer.decode(prompt)!r} goes on\n{data.tokenizer.decode(written.tokens[0])!r}")


if __name__ == "__main__":
    main()
