"""`polysketch generate RUN --prompt TEXT`: continue text with a trained model, as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polysketch.cli.chat_template import require_template
from polysketch.cli.next_command import next_command
from polysketch.cli.state_dtype import StateDtype, keep_states_in
from polysketch.cli.terminal import write_visible
from polysketch.cli.ways_to_generate import Way, check_way, generated
from polysketch.progress import Progress

if TYPE_CHECKING:
    from polysketch.data import TokenizerLike
    from polysketch.generation import GenerationResult
    from polysketch.integrations.chat import Chat
    from polysketch.models import TransformerLM

__all__ = ["GenerateFlags", "run"]


@dataclass(frozen=True)
class GenerateFlags:
    """Continue one or several prompts with a trained model.

    One prompt is continued on the screen as the tokens come. Several are continued together, and printed one after the
    other. A continuation ends at the end of a text, at a --stop, or after --max-new-tokens. Text goes to standard
    output, all else to standard error.

    Examples:
      polysketch generate runs/own --prompt "def attention("
      polysketch generate runs/own --interactive --stop "\\n\\n"
      polysketch generate runs/own --prompts prompts.jsonl --out continued.jsonl
      polysketch generate exported --prompt "Once upon a time" --beams 4
      polysketch generate converted/model --chat --prompt "Which animals bark?"
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a training run, or of a causal model of transformers: exported, converted or any other."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; `-` reads it from standard input. Give it several times for several texts. Without it a new
    text is begun."""
    prompts: Path | None = None
    """File of prompts, a line of JSON each: a string, or an object with a field "prompt". Their continuations go to
    --out. The same command goes on where it was stopped."""
    out: Path | None = None
    """File of the continuations of --prompts, a line of JSON each."""
    batch_size: int = 8
    """Prompts of --prompts that are continued together."""
    interactive: bool = False
    """Reply to lines that you type, after --prompt if there is one. The model remembers the conversation."""
    chat: bool = False
    """Prompts and lines are messages of a chat, written as the tokenizer's chat template says. Answers alone are
    printed. --interactive answers --prompt first, if there is one."""
    chat_template: Path | None = None
    """File with a Jinja template that makes a prompt of a chat, in place of the tokenizer's own. It asks for --chat."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends a continuation, and is not part of it. May be given several times."""
    num_samples: int = 1
    """Continuations of each --prompt. With --beams the best of them."""
    beams: int | None = None
    """Search for the most probable text with so many candidates. Nothing is drawn."""
    lookup: int | None = None
    """Guess that the text repeats itself, so many tokens at a time. The text stays the same, and may come faster."""
    assistant: Path | None = None
    """A smaller model with the same tokenizer, that guesses tokens. The text stays the same, and may come faster."""
    max_new_tokens: int = 256
    """Stop after so many tokens."""
    temperature: float = 0.8
    """0 takes the most probable token each time. 1 samples the model's own distribution. More is wilder."""
    top_k: int | None = None
    """Draw among so many most probable tokens only. Default: all."""
    top_p: float | None = None
    """Draw among the most probable tokens that together have this probability. Default: all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that the text has already are chosen less often: 1.2, for instance. With --interactive the text
    is that of a turn."""
    seed: int = 0
    """Seed of the draws. The same one gives the same continuation."""
    checkpoint: str = "latest"
    """Which checkpoint of the run: latest, best (the least validation loss), or a name such as
    step-00000100."""
    device: str = "auto"
    """Where to compute: cpu, cuda, ...; auto takes a GPU if there is one."""
    state_dtype: StateDtype | None = None
    """Keep what the model remembers of the text in float16 or bfloat16, in half the memory. Default: as the model has
    it, sums in float32."""
    json: bool = False
    """Print everything as one JSON object on the last line."""


def run(flags: GenerateFlags) -> int:
    """Generate as the flags say, print text and speed, and return the exit status."""
    from polysketch.integrations.transformers_folder import is_transformers_folder

    _check(flags)
    of_transformers = is_transformers_folder(flags.run)
    if of_transformers and flags.checkpoint != "latest":
        raise ValueError(f"--checkpoint: expected a run, found a model of transformers in {flags.run}, which has none")
    model, tokenizer, prompts = (_open_transformers if of_transformers else _open_run)(flags)
    _require_settings(flags)
    keep_states_in(model, flags.state_dtype)
    chat = _chat(flags, tokenizer)
    if flags.interactive:
        _converse(flags, model, tokenizer, chat, prompts[0])
        if not of_transformers:
            _say(next_command("export", flags.run, flags.run.with_name(f"{flags.run.name}-exported")))
    elif flags.prompts is not None:
        _continue_file(flags, model, tokenizer, chat, prompts)
    else:
        _continue_on_screen(flags, model, tokenizer, chat, prompts)
    return 0


def _is_chat(flags: GenerateFlags) -> bool:
    return flags.chat or flags.chat_template is not None


def _chat(flags: GenerateFlags, tokenizer: TokenizerLike) -> Chat | None:
    """How the model takes part in a chat, where one is asked for."""
    if not _is_chat(flags):
        return None
    from polysketch.integrations.chat import load_chat

    return load_chat(flags.run, tokenizer, flags.chat_template)


def _converse(
    flags: GenerateFlags, model: TransformerLM, tokenizer: TokenizerLike, chat: Chat | None, prompt: str
) -> None:
    from polysketch.cli.interactive import ChatTurns, Conversation, TextTurns

    turns = TextTurns(tokenizer, prompt) if chat is None else ChatTurns(chat.render)
    ends = _ends(tokenizer, chat)
    conversation = Conversation(model, tokenizer, turns, flags.stop, ends, _settings(flags), flags.seed)
    conversation.hold([prompt] if chat is not None and prompt else [])


def _open_run(flags: GenerateFlags) -> tuple[Any, TokenizerLike, list[str]]:
    """The model of a run, its tokenizer, and the prompts: what is wrong with these shows before PyTorch is loaded."""
    from polysketch.training.run_folder import find_run, require_text

    require_text(flags.run, find_run(flags.run, flags.checkpoint)[0])
    prompts = _read_prompts(flags)
    from polysketch.training import load_model
    from polysketch.training.environment import resolve_device

    model, description = load_model(flags.run, device=resolve_device(flags.device), checkpoint=flags.checkpoint)
    return model, description.tokenizer, prompts


def _open_transformers(flags: GenerateFlags) -> tuple[Any, TokenizerLike, list[str]]:
    """The same of a folder of transformers."""
    prompts = _read_prompts(flags)
    from polysketch.integrations.continuing import load_to_continue
    from polysketch.training.environment import resolve_device

    return *load_to_continue(flags.run, device=resolve_device(flags.device)), prompts


def _check(flags: GenerateFlags) -> None:
    """Refuse flags that contradict each other."""
    if (flags.prompts is None) != (flags.out is None):
        raise ValueError("expected --prompts and --out together, found one of them")
    if flags.prompts is not None and (flags.prompt or flags.interactive or flags.num_samples != 1 or flags.json):
        raise ValueError("expected --prompts without --prompt, --interactive, --num-samples and --json, found both")
    if flags.interactive and (len(flags.prompt) > 1 or "-" in flags.prompt or flags.num_samples != 1 or flags.json):
        raise ValueError("expected --interactive with at most one --prompt that is a text, and without --json")
    if flags.num_samples < 1 or flags.prompt.count("-") > 1 or not all(flags.stop):
        raise ValueError("expected at least one sample, one --prompt - at most, and no empty --stop")
    if _is_chat(flags) and not (flags.prompt or flags.prompts or flags.interactive):
        raise ValueError("expected a --prompt, --prompts or --interactive with --chat, found none")
    restricted = flags.top_k is not None or flags.top_p is not None or bool(flags.stop) or flags.repetition_penalty != 1
    check_way(_way(flags), interactive=flags.interactive, restricted=restricted)
    require_template(flags.chat_template)


def _read_prompts(flags: GenerateFlags) -> list[str]:
    """The texts to continue, each as often as there are samples."""
    if flags.prompts is not None:
        from polysketch.data.prompt_files import prompts_of

        return prompts_of(flags.prompts)
    texts = [sys.stdin.read() if text == "-" else text for text in flags.prompt or ("",)]
    return [text for text in texts for _ in range(flags.num_samples)]


def _require_settings(flags: GenerateFlags) -> None:
    """Refuse settings that mean nothing before a prompt is shown; PyTorch is loaded by now."""
    from polysketch.generation import Sampler

    Sampler(flags.temperature, flags.top_k, flags.top_p, flags.repetition_penalty)


def _settings(flags: GenerateFlags) -> dict[str, Any]:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty")
    return {name: getattr(flags, name) for name in names}


def _way(flags: GenerateFlags) -> Way:
    return Way(flags.beams, flags.lookup, flags.assistant, flags.num_samples)


def _continue_on_screen(
    flags: GenerateFlags, model: TransformerLM, tokenizer: TokenizerLike, chat: Chat | None, prompts: Sequence[str]
) -> None:
    alone = len(prompts) == 1
    before = prompts if chat is None else [""] * len(prompts)
    if alone:
        write_visible(before[0])
    result, texts = _continued(flags, model, tokenizer, chat, prompts, shown=alone)
    if not alone:
        for number, (prompt, text) in enumerate(zip(before, texts, strict=True), start=1):
            write_visible(f"--- {number} ---\n{prompt}{text}\n")
    else:
        print()
    _say_figures(result)
    if flags.json:
        print(json.dumps(_as_json(prompts, texts, result)))


def _continue_file(
    flags: GenerateFlags, model: TransformerLM, tokenizer: TokenizerLike, chat: Chat | None, prompts: Sequence[str]
) -> None:
    from polysketch.data.prompt_files import Continuations
    from polysketch.generation.randomness import earlier_equals

    assert flags.out is not None
    described = _described(flags, model, tokenizer, chat)
    continuations = Continuations(flags.out, prompts, described, flags.batch_size)
    samples = earlier_equals(prompts)  # in the whole file, so that equal prompts of two batches differ
    with Progress(total=len(prompts), unit="prompts", done=continuations.done) as progress:
        tokens_made = 0

        def tell() -> None:
            progress.update(continuations.done, f"{continuations.done}/{len(prompts)} prompts  {tokens_made:,} tokens")

        def count() -> None:
            nonlocal tokens_made
            tokens_made += 1
            tell()

        def continued(batch: Sequence[str]) -> list[Mapping[str, Any]]:
            ours = samples[continuations.done :][: len(batch)]
            result, texts = _continued(flags, model, tokenizer, chat, batch, shown=False, samples=ours, on_each=count)
            return [
                {"text": text, "tokens": len(tokens), "stopped": stopped}
                for text, tokens, stopped in zip(texts, result.tokens, result.stopped, strict=True)
            ]

        continuations.make(continued, lambda done: tell())
    _say(f"{len(prompts)} continuations in {flags.out}")


def _described(
    flags: GenerateFlags, model: TransformerLM, tokenizer: TokenizerLike, chat: Chat | None
) -> dict[str, Any]:
    """What a continuation depends on."""
    described = {**_settings(flags), "seed": flags.seed, "stop": flags.stop, "model": _digest(model)}
    if flags.beams is not None:
        described["beams"] = flags.beams
    if flags.state_dtype is not None:
        described["state_dtype"] = flags.state_dtype
    if chat is not None:
        described["chat"] = _encode(tokenizer, chat, "?")  # another template writes other tokens
    return described


def _digest(model: Any) -> str:
    from polysketch.models import TransformerLM
    from polysketch.models.fingerprint import model_sha256, weights_sha256

    return model_sha256(model) if isinstance(model, TransformerLM) else weights_sha256(model)


def _continued(
    flags: GenerateFlags,
    model: TransformerLM,
    tokenizer: TokenizerLike,
    chat: Chat | None,
    prompts: Sequence[str],
    *,
    shown: bool,
    samples: Sequence[int] | None = None,
    on_each: Callable[[], None] = lambda: None,
) -> tuple[GenerationResult, list[str]]:
    """Continue prompts together; the text of the only one is shown as it comes, `on_each` called for every token."""
    from polysketch.generation import TextStream

    streams = [TextStream(tokenizer.known_bytes, flags.stop) for _ in prompts]
    texts = ["" for _ in prompts]

    def on_token(row: int, token: int) -> bool:
        on_each()
        ended = streams[row].add(token)
        take(row, streams[row].take())
        return ended

    def take(row: int, text: str) -> None:
        texts[row] += text
        if shown:
            write_visible(text)

    ids = [_encode(tokenizer, chat, text) for text in prompts]
    result = generated(
        _way(flags), model, ids, _ends(tokenizer, chat), on_token, {**_settings(flags), "seed": flags.seed}, samples
    )
    for row, stream in enumerate(streams):
        take(row, stream.finish())
    return result, texts


def _ends(tokenizer: TokenizerLike, chat: Chat | None) -> set[int]:
    """Token ids that end a text, or an answer."""
    return {tokenizer.end_of_text, *(() if chat is None else chat.ends)}


def _encode(tokenizer: TokenizerLike, chat: Chat | None, text: str) -> list[int]:
    """Return the ids of a prompt; of an empty one the end-of-text id, which is what a new text follows."""
    if chat is not None:
        return chat.render([{"role": "user", "content": text}])
    return tokenizer.encode(text) or [tokenizer.end_of_text]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_figures(result: GenerationResult) -> None:
    """Tell speed and state size to a person."""
    num_tokens = sum(len(tokens) for tokens in result.tokens)
    _say(
        f"[{num_tokens} tokens, {result.tokens_per_second:.1f} tokens per second, "
        f"state of {result.state_bytes / 1024:.0f} KiB]"
    )


def _as_json(prompts: Sequence[str], texts: Sequence[str], result: GenerationResult) -> dict[str, object]:
    """Return everything for a program."""
    return {
        "prompts": list(prompts),
        "texts": list(texts),
        "tokens": result.tokens,
        "stopped": result.stopped,
        "tokens_per_second": result.tokens_per_second,
        "prefill_seconds": result.prefill_seconds,
        "state_bytes": result.state_bytes,
    }
