"""A server shuts down while an output waits for a tool: the tool's result is still accepted until the grace period
ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import httpx

from bridle.controller_tools import ToolExecutor
from bridle.http import HttpSettings, ServeSettings, create_app
from bridle.http.server.listening import bind
from bridle.http.server.run import DrainingServer, uvicorn_config
from bridle.serving import ModelRegistry
from tests.http.harness import scripted_model
from tests.http.tool_calls import Says, told
from tests.waiting import PATIENCE, until

ASKING = {"prompt": "x", "max_tokens": 8, "stream": True, "controller": "class:Says", "controller_arg": "ask"}


class Draining:
    """A server in a thread, and a function that ends it."""

    def __init__(self, grace: float) -> None:
        self.desk = ToolExecutor()
        registry = ModelRegistry([scripted_model(tools=self.desk)])
        app = create_app(registry, HttpSettings(controller_classes={"Says": Says}))
        listener, settings, is_up = bind("127.0.0.1", 0), ServeSettings(), threading.Event()
        self.server = DrainingServer(uvicorn_config(app, settings, None), app.state.http, grace, is_up.set)
        self.http, self.url = app.state.http, f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self._run, args=(listener, registry), daemon=True)
        self.thread.start()
        assert is_up.wait(PATIENCE)

    def _run(self, listener: object, registry: ModelRegistry) -> None:
        with closing(registry):
            self.server.run(sockets=[listener])  # type: ignore[list-item]

    def end(self) -> None:
        """Send the first termination signal."""
        self.server.handle_exit(15, None)
        until(lambda: self.server._drain_task is not None)


@contextmanager
def asking(grace: float) -> Iterator[tuple[Draining, Iterator[str], str]]:
    """Yield a server with a stream that waits for a tool result from its client, the stream's content, and the reported
    call."""
    server = Draining(grace)
    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=ASKING | {"client_tools": ["ask"]}, timeout=PATIENCE
        ) as stream:
            lines = stream.iter_lines()
            call_id, _ = told(lines)
            yield server, lines, call_id
    finally:
        server.server.force_exit = server.server.should_exit = True
        server.thread.join(PATIENCE)
        server.desk.close()


def test_a_drain_waits_for_the_answer() -> None:
    with asking(PATIENCE) as (server, lines, call_id):
        server.end()
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE)
        assert refused.status_code == 503
        answered = httpx.post(f"{server.url}/v1/tool_results/{call_id}", json={"result": "yes"}, timeout=PATIENCE)
        assert answered.status_code == 204
        text = "".join(lines)
        assert "yes" in text and "[DONE]" in text
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive()


def test_the_end_of_the_grace_ends_the_wait() -> None:
    with asking(0.05) as (server, lines, _):
        server.end()
        assert "error" in "".join(lines)
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive()
        until(lambda: all(not counts.num_running for counts in server.desk.counts().values()))
