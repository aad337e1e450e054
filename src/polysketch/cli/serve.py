"""`polysketch serve RUN`: a model behind OpenAI's interface, and on a page to chat on."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from polysketch.cli.chat_template import require_template
from polysketch.cli.state_dtype import StateDtype, keep_states_in

if TYPE_CHECKING:
    from polysketch.serving.served_model import ServedModel

__all__ = ["ServeFlags", "run"]

_TOKEN = "POLYSKETCH_TOKEN"
_MEGABYTE = 2**20


@dataclass(frozen=True)
class ServeFlags:
    """Serve a model over HTTP: OpenAI's /v1/completions and /v1/chat/completions, and a page to chat on.

    Many people are answered at once. The memory for each is the same at any length of text, but for layers that keep
    keys and values (softmax): a request with such layers begins when its longest text fits. Ctrl+C or SIGTERM lets
    running requests finish. Where POLYSKETCH_TOKEN is set in the environment, clients must send it as bearer token.

    Examples:
      polysketch serve runs/books
      polysketch serve runs/books --host 0.0.0.0 --port 80 --concurrent 64
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a training run, or one that polysketch export wrote."""
    engine: Literal["auto", "builtin", "vllm"] = "auto"
    """What computes: builtin, or vllm, which must be installed and serves exported folders (a run is exported first).
    auto takes vllm where it is installed and the folder is an exported one."""
    host: str = "127.0.0.1"
    """Address to listen at. The default is reached from this machine alone; 0.0.0.0 from everywhere."""
    port: int = 8000
    """Port to listen at; 0 for any that is free."""
    name: str | None = None
    """Name of the model for clients. Default: that of the folder."""
    checkpoint: str = "latest"
    """Which checkpoint of the run: latest, best (the least validation loss), or a name such as
    step-00000100."""
    device: str = "auto"
    """Where to compute: cpu, cuda, ...; auto takes a GPU if there is one."""
    chat_template: Path | None = None
    """File with a Jinja template that makes a prompt of a chat. Default: that of the exported tokenizer, if any."""
    concurrent: int = 32
    """Requests that are continued at the same time, at most."""
    state_memory: int = 1024
    """Megabytes for the states of these requests. Where it holds fewer states, fewer requests run at once. A request
    that alone would need more is refused."""
    state_dtype: StateDtype | None = None
    """Keep states in float16 or bfloat16, so that twice as many fit. Default: as the model has it, sums in float32."""
    snapshot_memory: int = 256
    """Megabytes for states after beginnings of prompts, so that a conversation is not read again at each turn."""
    queue: int = 64
    """Requests that may wait for a slot; further ones are told to come again."""
    max_prompt_tokens: int = 1_000_000
    """Longest prompt."""
    max_new_tokens: int = 4096
    """Most tokens that a request may ask for."""
    max_body: int = 16
    """Megabytes of the largest request."""
    chunk: int = 128
    """Tokens of waiting prompts that are read between two steps of the others: more reads prompts faster, and makes the
    others wait longer for their next token."""
    grace: float = 60.0
    """Seconds that running requests are given to finish when the server is stopped."""


def run(flags: ServeFlags) -> int:
    """Serve until a signal, and return the exit status."""
    from polysketch.integrations.transformers_folder import is_transformers_folder

    exported = is_transformers_folder(flags.model)
    _require_model(flags, exported)  # before PyTorch is loaded
    if flags.engine == "vllm" or (flags.engine == "auto" and exported and _has_vllm()):
        return _serve_by_vllm(flags, exported)
    return _serve(flags)


def _require_model(flags: ServeFlags, exported: bool) -> None:
    """Refuse what is no model of ours, a port or a template that cannot be."""
    if exported:
        from polysketch.integrations.transformers_folder import require_model, require_ours

        require_model(flags.model)
        require_ours(flags.model)
    else:
        from polysketch.training.run_folder import find_run, require_text

        require_text(flags.model, find_run(flags.model, flags.checkpoint)[0])
    if not 0 <= flags.port < 2**16:
        raise ValueError(f"--port: expected a number from 0 to {2**16 - 1}, found {flags.port}")
    require_template(flags.chat_template)


def _has_vllm() -> bool:
    from polysketch.serving import vllm

    return vllm.is_installed()


def _serve_by_vllm(flags: ServeFlags, exported: bool) -> int:
    from polysketch.integrations.transformers_folder import require_unchanged
    from polysketch.serving import vllm
    from polysketch.serving.running import address_at, how_to_ask

    if flags.state_dtype is not None:
        raise ValueError("--state-dtype: the builtin engine alone has it: --engine builtin")
    if not vllm.is_installed():
        raise ImportError("--engine vllm: vLLM is not installed: pip install vllm, or --engine builtin")
    folder = flags.model if exported else _export(flags)
    require_unchanged(folder)  # which vLLM does not
    name = flags.name or flags.model.resolve().name
    token, megabytes = os.environ.get(_TOKEN) or None, None if _has_gpu() else flags.state_memory
    line = vllm.command(
        folder,
        name=name,
        host=flags.host,
        port=flags.port,
        chat_template=flags.chat_template,
        state_megabytes=megabytes,
    )
    address = address_at(flags.host, flags.port)
    print(f"serving {name} at {address} by vLLM, once it has loaded")
    print(vllm.about_states(folder, megabytes=megabytes))
    print(how_to_ask(address, token=token is not None))
    print(" ".join(line), flush=True)
    return vllm.serve(line, token=token)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _export(flags: ServeFlags) -> Path:
    """The run as an exported folder inside it, made at the first time."""
    from polysketch.training.run_folder import find_run

    checkpoint = find_run(flags.model, flags.checkpoint)[1].name
    folder = flags.model / f"exported-{checkpoint}"
    if not folder.exists():
        from polysketch.integrations.huggingface import export_run, quiet

        with quiet():
            export_run(flags.model, folder, checkpoint=checkpoint)
        print(f"exported to {folder}")
    return folder


def _serve(flags: ServeFlags) -> int:
    from polysketch.extras import require

    for package in ("starlette", "uvicorn"):
        require(package)
    from polysketch.generation import Engine, Snapshots, bytes_of_request
    from polysketch.serving.app import build_app
    from polysketch.serving.limits import Limits
    from polysketch.serving.running import address_of, how_to_ask, is_local, listen, run_app
    from polysketch.serving.served_model import load_served
    from polysketch.serving.worker import Worker
    from polysketch.training.environment import resolve_device

    limits = Limits(flags.max_prompt_tokens, flags.max_new_tokens, flags.queue, flags.max_body * _MEGABYTE)
    with listen(flags.host, flags.port) as listening:
        served = load_served(
            flags.model,
            device=resolve_device(flags.device),
            checkpoint=flags.checkpoint,
            name=flags.name,
            chat_template=flags.chat_template,
        )
        keep_states_in(served.model, flags.state_dtype)
        size = bytes_of_request(served.model, 0)
        token_size = bytes_of_request(served.model, 1) - size
        slots = _slots(size + token_size, flags)
        engine = Engine(
            served.model,
            slots=slots,
            chunk=flags.chunk,
            snapshots=Snapshots(flags.snapshot_memory * _MEGABYTE),
            state_bytes=flags.state_memory * _MEGABYTE,
        )
        worker = Worker(engine, limits.queue)
        token, local = os.environ.get(_TOKEN) or None, is_local(flags.host)
        app = build_app(served, worker, limits, token=token, local=local)

        def tell() -> None:
            address = address_of(listening)
            print(f"serving {served.name} at {address}")
            print(_about_states(size, token_size, slots, flags))
            print(how_to_ask(address, token=token is not None))
            print(_about_the_page(served, address), flush=True)

        if token is None and not local:
            print(f"polysketch: everybody who reaches {flags.host} may ask: set {_TOKEN}", file=sys.stderr)
        run_app(app, listening, grace=flags.grace, ready=tell)
    print("stopped")
    return 0


def _slots(size: int, flags: ServeFlags) -> int:
    """How many requests run at once."""
    if flags.concurrent < 1:
        raise ValueError(f"--concurrent: expected at least 1 request, found {flags.concurrent}")
    fitting = flags.state_memory * _MEGABYTE // size
    if fitting < 1:
        raise ValueError(
            f"--state-memory: expected at least {-(-size // _MEGABYTE)} megabytes, the state of one request, found "
            f"{flags.state_memory}"
        )
    return min(flags.concurrent, fitting)


def _about_states(size: int, token_size: int, slots: int, flags: ServeFlags) -> str:
    if token_size:
        return (
            f"a request's state takes {size:,} bytes and {token_size:,} for each token; {slots} run at once, as far as "
            f"their longest texts fit in {flags.state_memory:,} MB"
        )
    fitting = flags.state_memory * _MEGABYTE // size
    return (
        f"a request's state takes {size:,} bytes at any length; {slots} run at once "
        f"({fitting:,} fit in {flags.state_memory:,} MB)"
    )


def _about_the_page(served: ServedModel, address: str) -> str:
    kind = "chat" if served.render is not None else "write (there is no chat template, so texts are continued)"
    return f"in a browser: {address}/ to {kind}"
