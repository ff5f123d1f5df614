"""Runs agents against a server, and prints the results as a table.

    python -m dev.agents.run MODEL --prefix /tmp/agents --install          # all of them
    python -m dev.agents.run MODEL --prefix /tmp/agents claude-code pi

MODEL is any model of `bridle serve`. Each client gets its own home and its own folder with one file. Requests pass
through a proxy, which stores them under `PREFIX/runs/CLIENT/notes`.
"""

from __future__ import annotations

import argparse
import http.client
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dev.agents.clients import CLIENTS, Client
from dev.agents.recorder import Exchange, recording

MODEL, TEXT = "coder", "The password is violet-42.\n"
_START_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of a run. `status` is the client's exit status; None if the client ran out of time."""

    client: Client
    status: int | None
    seconds: float
    output: str
    exchanges: tuple[Exchange, ...]

    @property
    def faults(self) -> list[str]:
        """Return the failed and incomplete exchanges between client and server."""
        found = [f"{each.method} {each.path}: {each.status}" for each in self.exchanges if each.status >= 400]
        found += [f"{each.method} {each.path} was cut" for each in self.exchanges if not each.is_whole]
        return found if self.exchanges else ["no request came"]

    @property
    def has_round_trip(self) -> bool:
        """Return whether the client called a tool and sent the tool's result to the server."""
        return any(each.has_results for each in self.exchanges)

    def row(self) -> str:
        """Return the row of the table for this run."""
        ended = "out of time" if self.status is None else f"status {self.status}"
        trip = "yes" if self.has_round_trip else "no" if self.client.has_tools else "has no tools"
        streams = sum(each.is_stream for each in self.exchanges)
        cells = (self.client.name, ", ".join(self.client.packages), f"{len(self.exchanges)} ({streams} streamed)", trip)
        return f"| {' | '.join(cells)} | {ended}, {self.seconds:.0f} s | {'; '.join(self.faults) or 'none'} |"


HEAD = "| Client | Packages | Requests | Tool round trip | End | Faults |\n| --- | --- | --- | --- | --- | --- |"


def folder_of(client: Client, prefix: Path) -> Path:
    """Return the folder of the client's programs."""
    return prefix / client.name / ("bin" if client.is_python else "node_modules/.bin")


def is_installed(client: Client, prefix: Path) -> bool:
    return (folder_of(client, prefix) / client.program).exists()


def install(client: Client, prefix: Path) -> None:
    """Install the client's packages into a separate folder."""
    place = prefix / client.name
    if client.is_python:
        _do(sys.executable, "-m", "venv", place)
        _do(place / "bin" / "pip", "install", "--quiet", *client.packages)
    else:
        npm = shutil.which("npm") or "npm"
        _do(npm, "install", "--no-audit", "--no-fund", "--foreground-scripts", "--prefix", place, *client.packages)


def _do(*command: str | Path) -> None:
    subprocess.run(command, check=True)  # noqa: S603  (the table's own)


def run(client: Client, port: int, prefix: Path, seconds: float, model: str = MODEL) -> Seen:
    """Run the client on its task against the server at `port`."""
    place = prefix / "runs" / client.name
    shutil.rmtree(place, ignore_errors=True)
    home, work = place / "home", place / "work"
    for folder in (home, work):
        folder.mkdir(parents=True)
    (work / "hello.txt").write_text(TEXT)
    with recording(port, place / "notes") as (own_port, exchanges):
        words = {"url": f"http://127.0.0.1:{own_port}", "model": model, "home": str(home), "task": client.task}
        words["bin"] = str(folder_of(client, prefix))
        for name, content in client.files.items():
            file = Path(name.format(**words))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content.format(**words))
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        variables = kept | {"HOME": str(home)} | {n: value.format(**words) for n, value in client.variables.items()}
        command = [part.format(**words) for part in client.command]
        began = time.monotonic()
        status, output = _wait(command, work, variables, seconds)
        return Seen(client, status, time.monotonic() - began, output, tuple(exchanges))


def _wait(command: Sequence[str], work: Path, variables: dict[str, str], seconds: float) -> tuple[int | None, str]:
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=work, env=variables, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as late:
        return None, (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else ""
    return done.returncode, done.stdout + done.stderr


@contextmanager
def serving(model: str, port: int, options: Sequence[str]) -> Iterator[None]:
    """Run a server with the model; the block begins when the server is ready."""
    named = ("--port", str(port), "--served-name", MODEL, "--default-max-tokens", "600", "--max-model-len", "32k")
    command = [sys.executable, "-m", "bridle", "serve", model, *named, *options]
    server = subprocess.Popen(command)  # noqa: S603
    try:
        until = time.monotonic() + _START_SECONDS
        while not _is_ready(port):
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit("the server did not start")
            time.sleep(1)
        yield
    finally:
        server.terminate()
        server.wait()


def _is_ready(port: int) -> bool:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        link.request("GET", "/health/ready")
        return link.getresponse().status == 200
    except OSError:
        return False
    finally:
        link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("clients", nargs="*", help=", ".join(each.name for each in CLIENTS))
    parser.add_argument("--prefix", type=Path, required=True, help="folder of the clients' packages and runs")
    parser.add_argument("--install", action="store_true", help="install what is missing, from npm and PyPI")
    parser.add_argument("--seconds", type=float, default=1800, help="time that each client has")
    parser.add_argument("--port", type=int, default=18477)
    parser.add_argument("--serve", default="", help="further options of `bridle serve`")
    given = parser.parse_args()
    chosen = [each for each in CLIENTS if not given.clients or each.name in given.clients]
    for client in chosen:
        if given.install and not is_installed(client, given.prefix):
            install(client, given.prefix)
    print(HEAD, flush=True)
    for client in chosen:
        if not is_installed(client, given.prefix):
            print(f"| {client.name} | {', '.join(client.packages)} | not installed | | | |", flush=True)
            continue
        with serving(given.model, given.port, given.serve.split()):  # a fresh one: nobody finds another's prompt
            print(run(client, given.port, given.prefix, given.seconds).row(), flush=True)


if __name__ == "__main__":
    main()
