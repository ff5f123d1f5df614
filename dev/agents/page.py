"""Prints the configuration of each agent for `docs/agents.md`: `python -m dev.agents.page`."""

from __future__ import annotations

import shlex

from dev.agents.clients import CLIENTS, Client

_WORDS = {"url": "http://127.0.0.1:8080", "model": "coder", "home": "/home/me", "bin": "", "task": "Fix the bug"}


def configuration(client: Client) -> str:
    """Return the client's configuration files, variables and command as blocks of Markdown."""
    blocks = []
    for name, content in client.files.items():
        text = content.format(**_WORDS).strip()
        kind = name.rpartition(".")[2]
        blocks.append(f"`{name.format(**_WORDS)}`:\n\n```{kind}\n{text}\n```")
    variables = [f"export {name}={value.format(**_WORDS)}" for name, value in client.variables.items()]
    command = shlex.join(each.format(**_WORDS).removeprefix("/") for each in client.command)
    return "\n\n".join([*blocks, "```sh\n" + "\n".join([*variables, command]) + "\n```"])


def main() -> None:
    for client in CLIENTS:
        print(f"### {client.name}\n\n{configuration(client)}\n")


if __name__ == "__main__":
    main()
