"""Blocks of a page, and the check that a block prints the `output` block after it. In an `output` block, `...` matches
any text within a line, and a line of `...` matches any number of lines."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from tests.waiting import PATIENCE

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"`([\w-]+\.\w+)`[^`\n]*:\n\n$")
_PROGRESS = re.compile(r"Loading [\w-]+[,:].* s so far$")
_MARK = "-- block {} is done --"


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    text: str
    output: str | None  # of the block `output` behind it
    file: str | None  # as which the line above says to save it

    def check(self, printed: str) -> None:
        if self.output is not None:
            assert shows(self.output, printed), f"the page shows\n{self.output}\nand it printed\n{printed}"


def blocks_of(text: str) -> list[Block]:
    found = list(_BLOCK.finditer(text))
    return [
        Block(each[1], each[2], _output_after(text, each.end()), _name_before(text[: each.start()]))
        for each in found
        if each[1] != "output"
    ]


def _output_after(text: str, end: int) -> str | None:
    behind = _BLOCK.match(text, end + 1)  # an empty line stands between
    return behind[2] if behind and behind[1] == "output" else None


def _name_before(text: str) -> str | None:
    named = _NAMED.search(text)
    return named[1] if named else None


def shows(output: str, printed: str) -> bool:
    """Return whether `printed` matches a page's output. Spaces at line ends are ignored, and so is the progress of
    loading a model."""
    lines = (r"(.*\n)*?" if line == "..." else _pattern(line) + r"\n" for line in output.strip("\n").split("\n"))
    told = "\n".join(line.rstrip() for line in printed.strip("\n").split("\n") if not _PROGRESS.match(line)) + "\n"
    return re.fullmatch("".join(lines), told) is not None


def _pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.rstrip().split("..."))


def log_elsewhere() -> None:
    """Send the log of a server in this process to standard error until the test ends, and not to the output."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def run_programs(blocks: Iterable[Block], page: str, names: dict[str, object], without: tuple[str, ...] = ()) -> str:
    """Run Python programs from top to bottom, and compare their output with the page. Returns the whole output."""
    everything = ""
    for block in blocks:
        if block.language != "python" or any(word in block.text for word in without):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block.text, page, "exec", dont_inherit=True), names)
        block.check(out.getvalue())
        everything += out.getvalue()
    return everything


def run_commands(blocks: list[Block], folder: Path, path: str, server: str) -> None:
    """Run blocks of commands in one shell, like a reader with the server `server`, and check their output."""
    for block in blocks:
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    commands = [block for block in blocks if block.language in ("sh", "console")]
    script = "set -e\n" + "".join(f"{block.text}\necho '{_MARK.format(n)}'\n" for n, block in enumerate(commands))
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    env |= {"PATH": path, "AICI_API_BASE": f"{server}/v1/", "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, timeout=PATIENCE, check=False, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    rest = done.stdout
    for n, block in enumerate(commands):
        printed, _, rest = rest.partition(_MARK.format(n) + "\n")
        block.check(printed)


def path_without_this_python() -> str:
    """Return the shell's path without the folder of this Python."""
    own = Path(sys.executable).parent
    return os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != own)
