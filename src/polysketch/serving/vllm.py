"""Serving by vLLM, which runs as a process of its own: `vllm serve` of an exported folder."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import FrameType

__all__ = ["command", "find", "serve"]


def find() -> str | None:
    """Where the command `vllm` is; None where it is not installed."""
    return shutil.which("vllm")


def command(
    program: str, exported: Path, *, name: str, host: str, port: int, chat_template: Path | None = None
) -> list[str]:
    """The command line that serves an exported folder."""
    line = [program, "serve", str(exported), "--served-model-name", name, "--host", host, "--port", str(port)]
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
