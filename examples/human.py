"""A human answers a question in the middle of a text: the stream reports the question, a POST request answers it, and
the text continues.

    bridle serve demo
    python examples/human.py

The script below runs in the server. The script calls a tool that the request declares as a tool of the client. The text
and its KV wait until this program has sent the answer that the user typed.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

SCRIPT = """
await $`Once upon a time there was a girl named `
const name = await tool("ask", { question: "What is her name?" }, { timeout: 600_000 }).text()
await $`${name}.`
await gen({ maxTokens: 40, stopAt: "." })
"""
RUN = {"controller": "jsctrl", "controller_arg": SCRIPT, "client_tools": ["ask"], "max_tokens": 200}


def post(url: str, body: object) -> BinaryIO:
    """Send an object as JSON; return the stream of the answer. While the server compiles its script interpreter, it
    refuses the request and names the time for the next attempt."""
    while True:
        try:
            return urlopen(Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}))
        except HTTPError as error:
            if error.code != 429:
                raise
            time.sleep(float(error.headers.get("Retry-After", 1)))


def items(stream: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events."""
    for line in stream:
        if line.startswith(b"data: {"):
            yield json.loads(line[len("data: ") :])


def main(server: str = "http://127.0.0.1:8080", ask: Callable[[str], str] = input) -> None:
    """Print the text of the stream, and pass each question on to `ask`."""
    with post(f"{server}/v1/run", RUN) as stream:
        for item in items(stream):
            for fork in item.get("forks", ()):
                print(fork["text"], end="", flush=True)
                for write in fork.get("storage", ()):
                    tell(server, write["WriteVar"], ask)
    print()


def tell(server: str, variable: dict[str, Any], ask: Callable[[str], str]) -> None:
    """Answer the tool call that a variable of the stream contains."""
    kind, _, call_id = variable["name"].partition(":")
    if kind == "tool_call":
        call = json.loads(bytes.fromhex(variable["value"]))
        answer = ask(f"\n{call['arguments']['question']} ")
        post(f"{server}/v1/tool_results/{call_id}", {"result": answer}).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
