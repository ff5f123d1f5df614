"""Shortens help pages: `--help` of a command with many flags shows only the most common flags, `--help-all` shows all.

Hidden flags can be used as usual, and `bridle help WORD` also finds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from cyclopts import Argument, Parameter

from bridle.cli.variables import EnvironmentDefaults

ALL = "--help-all"

_STEERING = ("--regex", "--schema", "--choice", "--grammar", "--ctrl", "--ctrl-arg")
_LOADING = ("--dtype", "--device", "--quantization", "--max-model-len")
_ALONE = (
    *("--image", "--stats", "--adapter", "--trace", "--show"),
    *("--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--stop"),
    *(*_STEERING, *_LOADING, "--backend"),
)
#: The flags on the short help page of a command. A command that is missing here has one page with all flags.
ESSENTIAL: dict[str, frozenset[str]] = {
    "serve": frozenset(
        {
            *("--host", "--port", "--served-name", "--log-format", "--log-level", "--policies"),
            *("--keys", "--cors-origin", "--ssl-certfile", "--ssl-keyfile"),
            *("--tools", "--adapter", "--isolate-model", "--shards", "--models-dir", "--allow-hub"),
            *(*_LOADING, "--kv-memory", "--draft-model", "--max-num-seqs", "--speculate", "--default-max-tokens"),
        }
    ),
    "serve-model": frozenset(
        {
            *("--host", "--port", "--transport", "--cuda", "--dtype", "--batch-size", "--silent", "--verbose"),
            *("--log-format", "--keys", "--ssl-certfile", "--ssl-keyfile", "--policies", "--tools", "--adapter"),
            *("--models-dir", "--allow-hub", "--model-alias"),
        }
    ),
    "generate": frozenset({"--chat", "--json", *_ALONE}),
    "chat": frozenset({"--system", *_ALONE}),
    "run-batch": frozenset(
        {"--model", "--output", "--max-in-flight", "--policies", "--tools", "--trace", *_STEERING, *_LOADING}
    ),
}
_shows_all: ContextVar[bool] = ContextVar("shows_all", default=False)


def epilogue(command: str) -> str:
    """Return the last paragraph of a command's help page, which mentions `--help-all` and `bridle help`."""
    text = "Flags may also be environment variables or entries of a settings file; `bridle --help` says how."
    more = f"`bridle {command} {ALL}` shows the other flags, too. " if command in ESSENTIAL else ""
    return more + text


@contextmanager
def asked_for(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield `words` with `--help-all` replaced by `--help`. If `words` had the flag `--help-all`, help pages show every
    flag inside the block. Words after `--` stay unchanged."""
    end = words.index("--") if "--" in words else len(words)
    token = _shows_all.set(ALL in words[:end])
    try:
        yield ["--help" if word == ALL and place < end else word for place, word in enumerate(words)]
    finally:
        _shows_all.reset(token)


class PageDefaults(EnvironmentDefaults):
    """Reads defaults of flags from the environment, and hides flags from short help pages."""

    def _convert_argument(self, commands: tuple[str, ...], argument: Argument) -> str:
        essential = ESSENTIAL.get(" ".join(commands))
        names = {name for name in argument.names if name.startswith("--")}
        if essential is not None and names and not names & essential and not _shows_all.get():
            argument.parameter = Parameter.combine(argument.parameter, Parameter(show=False))
        return super()._convert_argument(commands, argument)
