"""A server with a KV store that is started and ended again, and chats with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
SYSTEM = "You answer questions about the weather. " * 12


@contextmanager
def served(tmp_path: Path, *flags: str, end: int = signal.SIGTERM) -> Iterator[str]:
    """`bridle serve` with a store as its own default, ended by a signal."""
    environment = {name: value for name, value in os.environ.items() if name != "BRIDLE_KV_STORE"}
    command = [sys.executable, "-m", "bridle", "serve", "demo", "--port", "0", "--control", "off", *flags]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "BRIDLE_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "the server ended"
            found = re.search(r"http://[\d.:]+", line)
        yield found.group()
        process.send_signal(end)
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.communicate()


def turn(url: str, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """Answer a chat and append the answer to it; returns the usage."""
    body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    usage: dict[str, Any] = answer["usage"]
    return usage
