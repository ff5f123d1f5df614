"""Runs a command line and returns an exit code.

A user's mistake prints one line on stderr and gives exit code 2. A failure that is neither a mistake nor a bug prints
one line and gives code 1. A bug of bridle prints its traceback. Ctrl-C prints one line and gives 130, as shells expect.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.cli import signals, terminal
from bridle.distribution import install_hint
from bridle.errors import BridleError, InternalError, InvalidRequest, UnsupportedModel
from bridle.logs import log_failures

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

MISUSE = 2
FAILURE = 1

#: The extra of the package that installs a module.
_EXTRAS = {
    "grpc": "cluster",
    "google": "cluster",
    "opentelemetry": "cluster",
    "posix_ipc": "aici",
    "wasmtime": "aici",
    "ray": "ray",
    "matplotlib": "bench",
    "peft": "bench",
    "gguf": "gguf",
    "llama_cpp": "llamacpp",
}

#: Thresholds of the garbage collector. With the default thresholds, the collector walks over the objects of imported
#: libraries a hundred times, which adds a tenth to the time of the imports.
_GARBAGE = (50_000, 20, 50)
#: Commands that explain flags of other servers.
_SERVING = ("serve", "serve-model")
#: Commands with a choice of log formats.
_SERVICES = ("serve", "serve-model", "shard")
#: A hint for an unexpected additional word of a command.
_WHERE_TO = {"run-batch": "; --output FILE says where the answers go"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of `arguments`, by default the arguments of the process, and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        signals.listen()
        log_failures()
        gc.set_threshold(*_GARBAGE)
    terminal.choose_form(is_json=bool(words) and words[0] in _SERVICES and _wants_json(words))
    with signals.ending_at_once():
        from cyclopts import CycloptsError

        from bridle.cli.app import app, show_overview
        from bridle.cli.short_help import ALL, asked_for

    try:
        if words in ([], ["--help"], ["-h"], [ALL]):
            show_overview()
            return 0
        _warn_of_variables(words)
        with settings_file(words), asked_for(words) as known:
            result = app(_in_our_words(known), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _complain(f"{_told(error, words)} (see: {_help_hint(words)})", MISUSE)
    except (InvalidRequest, UnsupportedModel) as error:
        return _complain(str(error) + _meant_elsewhere(words, str(error)), MISUSE)
    except InternalError:
        raise
    except BridleError as error:
        return _complain(str(error), FAILURE)
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has ended
        sys.stderr.close()
        return 0
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _complain(f"{error.name} is not installed: {install_hint(extra)}", FAILURE)
    except OSError as error:
        if error.filename is None:  # the error names no file
            raise
        return _complain(f"{error.filename}: {error.strerror}", FAILURE)
    except KeyboardInterrupt:
        if arguments is None:
            signals.leave()
        return signals.INTERRUPTED
    return result if isinstance(result, int) else 0


def _in_our_words(words: list[str]) -> list[str]:
    if words[:1] != ["serve"]:
        return words
    from bridle.cli.foreign_flags import in_our_words

    return in_our_words(words)


def _warn_of_variables(words: Sequence[str]) -> None:
    """Warn of misspelled environment variables that begin with BRIDLE_, because they have no effect."""
    if words and words[0] in _SERVING and any(name.startswith("BRIDLE_") for name in os.environ):
        from bridle.cli.setup_probes import variables

        for finding in variables(os.environ):
            terminal.complain(f"{finding.subject} {finding.text}; {finding.advice}", level="warning")


@contextmanager
def settings_file(words: list[str]) -> Iterator[None]:
    """Take defaults of flags from a YAML file while the block runs. The command line and the environment have
    precedence. The file is named by `--config` before the command, which is removed from `words`, or by
    BRIDLE_CONFIG."""
    from bridle.cli.app import app
    from bridle.cli.settings_file import SettingsFile

    path = os.environ.get("BRIDLE_CONFIG")
    if words and words[0].partition("=")[0] == "--config":
        flag, has_value, path = words.pop(0).partition("=")
        if not has_value:
            if not words:
                raise InvalidRequest(f"{flag} needs the name of a file", "config")
            path = words.pop(0)
    if not path:
        yield
        return
    if not Path(path).is_file():
        raise InvalidRequest(f"there is no settings file {path!r}", "config")
    usual = app.config
    app.config = (*(usual or ()), SettingsFile(path))
    try:
        yield
    finally:
        app.config = usual


def _meant_elsewhere(words: Sequence[str], message: str) -> str:
    """Return an addition to an error message about flags that mean something else in another server."""
    if words[:1] != ["serve"]:
        return ""
    from bridle.cli.foreign_flags import meant_elsewhere

    return "".join(f"; {each}" for each in meant_elsewhere(words, message))


def _complain(message: str, code: int) -> int:
    terminal.complain(" ".join(message.split()))
    return code


def _wants_json(words: Sequence[str]) -> bool:
    """Return whether flags or the environment set the JSON log format. The words are searched for the flag instead of
    parsed, because the error to report may be a parsing error."""
    given = os.environ.get("BRIDLE_LOG_FORMAT")
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.partition("=")[0] in ("--log-format", "--log_format"):
            given = word.partition("=")[2] or after
    return given == "json"


def _told(error: CycloptsError, words: Sequence[str]) -> str:
    """Return the message for a mistake on the command line. For a misplaced flag, or a flag of another server, the
    message says what to write instead."""
    from cyclopts import UnknownCommandError, UnknownOptionError, UnusedCliTokensError

    from bridle.cli.typo_suggestions import unknown_command, unknown_flag

    if isinstance(error, UnusedCliTokensError) and words:
        more = " ".join(error.unused_tokens or ())
        return f"{words[0]} takes no more words, but got {more!r}{_WHERE_TO.get(words[0], '')}"
    here, path = _command_of(words)
    if isinstance(error, UnknownCommandError):
        return unknown_command(words[len(path)], [name for name in here if not name.startswith("-")])
    if isinstance(error, UnknownOptionError):
        flag = error.token.keyword or error.token.value
        flag = flag if flag.startswith("-") else f"--{flag.strip('[]')}"  # the form in a settings file
        if flag.partition("=")[0] == "--config":
            return "--config stands before the command: bridle --config FILE COMMAND"
        from bridle.cli.foreign_flags import advice
        from bridle.cli.help_search import command_names

        known = advice(flag, command_names(words[0])) if words and words[0] in _SERVING else None
        if known is not None:
            return f"Unknown option: {flag}; {known}"
        return unknown_flag(flag, " ".join(path))
    return str(error)


def _help_hint(words: Sequence[str]) -> str:
    """Return the `bridle help` command that shows the page closest to the typed words."""
    return " ".join(["bridle", *_command_of(words)[1], "--help"])


def _command_of(words: Sequence[str]) -> tuple[App, list[str]]:
    """Return the command that the first words name, or else the whole program, and the words of its name."""
    from bridle.cli.app import app

    here: App = app
    path: list[str] = []
    for word in words:
        if word.startswith("-") or word not in here:
            break
        here = here[word]
        path.append(word)
    return here, path
