"""Tests of coding agents that are installed: each starts, streams, calls a tool, sends the result and ends its turn.
The model is a script that knows the names of each client's tools.

`BRIDLE_AGENTS` names the folder that `python -m dev.agents.run MODEL --prefix FOLDER --install` has filled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dev.agents.clients import CLIENTS, Client
from dev.agents.page import configuration
from dev.agents.recorder import Exchange
from dev.agents.run import TEXT, Seen, is_installed, run
from tests.http.harness import scripted_model, served, tokenizer

CONTEXT = 1 << 17
PREFIX = Path(os.environ.get("BRIDLE_AGENTS", "/nowhere"))
SECONDS = 400.0


def after_results(client: Client) -> Callable[[Any], int]:
    """Return a model that first writes the client's tool call, and that it is done once the file's content is in the
    prompt."""
    text = tokenizer()
    end = text.eos_token_ids[0]
    first, last = (text.encode(each, add_special_tokens=False) for each in (client.says, "All is done."))
    known: dict[int, tuple[int, list[int]]] = {}  # by the length of the prompt: what is being said

    def next_token(prefix: Any) -> int:
        size = len(prefix)
        begun = next((length for length in range(size, max(size - 400, 0), -1) if length in known), None)
        if begun is None or list(prefix[begun:]) != known[begun][1][: size - begun]:
            has_result = TEXT.split()[-1] in text.decode(list(prefix)) and client.has_tools
            begun, known[size] = size, (size, last if has_result else first)
        said = known[begun][1]
        return said[size - begun] if size - begun < len(said) else end

    return next_token


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("client", CLIENTS, ids=[each.name for each in CLIENTS])
def test_an_agent_does_its_task(client: Client, tmp_path: Path) -> None:
    if not is_installed(client, PREFIX):
        pytest.skip(f"{client.name} is not installed below BRIDLE_AGENTS ({PREFIX})")
    (tmp_path / client.name).symlink_to(PREFIX / client.name)
    model = scripted_model(
        next_token=after_results(client), max_model_len=CONTEXT, num_blocks=CONTEXT // 8, name="coder"
    )
    with served(model) as url:
        seen = run(client, int(url.rpartition(":")[2]), tmp_path, SECONDS)
    told = f"{seen.row()}\n{seen.output[-3000:]}\n{[_line(each) for each in seen.exchanges]}"
    assert seen.status == 0, told
    assert not seen.faults, told
    assert seen.has_round_trip == client.has_tools, told


def _line(exchange: Exchange) -> tuple[Any, ...]:
    return exchange.method, exchange.path, exchange.status, len(exchange.request), exchange.answer[-300:]


def test_faults_are_told() -> None:
    good = Exchange("POST", "/v1/messages", b'{"type":"tool_result"}', 200, b"event: ping\ndata: {}\n\n", True)
    cut = Exchange("POST", "/v1/messages", b"{}", 200)
    refused = Exchange("GET", "/v1/models", b"", 404, b"{}", True)
    seen = Seen(CLIENTS[0], 0, 2.0, "", (good, cut, refused))
    assert seen.faults == ["GET /v1/models: 404", "POST /v1/messages was cut"]
    assert seen.has_round_trip and "3 (1 streamed)" in seen.row()
    assert Seen(CLIENTS[0], None, 2.0, "", ()).faults == ["no request came"]


@pytest.mark.parametrize("client", CLIENTS, ids=[each.name for each in CLIENTS])
def test_the_page_has_the_configuration_that_is_tested(client: Client) -> None:
    assert configuration(client) in Path("docs/agents.md").read_text()


def test_each_client_is_described() -> None:
    words = {"url": "u", "model": "m", "home": "h", "bin": "b", "task": "t"}
    for client in CLIENTS:
        for text in (*client.command, *client.files, *client.files.values(), *client.variables.values()):
            text.format(**words)
        assert client.command[0].startswith("{bin}/") and client.packages and client.says
