"""A server with a KV store that tests start and stop several times, and chats with it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.command_server import Command

SYSTEM = "You answer questions about the weather. " * 12


@contextmanager
def served(tmp_path: Path, *flags: str, end: int = signal.SIGTERM) -> Iterator[str]:
    """Start `bridle serve` with the default KV store, and yield its address. A signal ends the server."""
    with started(tmp_path, *flags, end=end) as (url, _):
        yield url


@contextmanager
def started(tmp_path: Path, *flags: str, end: int = signal.SIGTERM) -> Iterator[tuple[str, int]]:
    """Do as `served`. Returns the address and the server's process, which is not a child of this process."""
    variables = {name: value for name, value in os.environ.items() if name != "BRIDLE_KV_STORE"}
    variables["BRIDLE_CACHE"] = str(tmp_path / "cache")
    reader, writer = os.pipe()
    server = Command(["serve", "demo", "--port", "0", "--control", "off", *flags], variables, writer)
    os.close(writer)
    try:
        with open(reader, encoding="utf-8") as said:
            urls = (found.group() for line in said if (found := re.search(r"http://[\d.:]+", line)))
            yield next(urls), server.pid
            server.send_signal(end)
            server.wait()
    finally:
        server.send_signal(signal.SIGKILL)


def turn(url: str, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """Request an answer in a chat, and append it to the chat. Returns the usage."""
    body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    usage: dict[str, Any] = answer["usage"]
    return usage
