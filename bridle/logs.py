"""Logs in structlog's formats: readable lines on a terminal, JSON elsewhere.

On a terminal, the log line of a request has only five fields; the formats `full` and `json` have all fields.

A process passes its log format to its child processes in environment variables (`log_variables`). So all lines of a
server have the same format, including those of its control runtime, shards and replicas.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from bridle.deprecated_names import LOG_FIELDS

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

LogFormat = Literal["auto", "console", "full", "json"]

_FORMAT, _LEVEL = "BRIDLE_LOG_FORMAT", "BRIDLE_LOG_LEVEL"
_LEVELS = ("debug", "info", "warning", "error")
#: Environment variables for child processes; empty until this process has set up its own logs.
shown: dict[str, str] = {}


def hide_variables() -> None:
    """Leave local variables of functions out of tracebacks, unless the program has configured structlog itself. Local
    variables contain prompts and answers, and structlog takes seconds to print them."""
    import structlog

    if not structlog.is_configured():
        *others, _ = structlog.get_config()["processors"]
        plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        structlog.configure(processors=[*others, plain])


def configure_logs(log_format: LogFormat = "auto", level: str = "info") -> None:
    """Set up logging for a whole process: for bridle, and for the libraries that it uses."""
    import structlog

    shared = _shared_processors(_configure_handler(log_format, level))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _configure_handler(log_format: LogFormat, level: str) -> bool:
    """Set up the handler of all log lines, and the log levels. Returns True if the lines are for people, not JSON."""
    is_console = sys.stderr.isatty() if log_format == "auto" else log_format != "json"
    shown.update({_FORMAT: ("full" if log_format == "full" else "console") if is_console else "json", _LEVEL: level})
    handler = _ToStandardError()
    handler.setFormatter(_LateFormatter(partial(_make_formatter, is_console, is_full=log_format == "full")))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Other libraries' notices add little to bridle's own lines, but their warnings are shown.
    root.setLevel("DEBUG" if level == "debug" else max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("bridle").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")
    logging.getLogger("uvicorn.error").addFilter(_is_failure)
    return is_console


class _LateFormatter(logging.Formatter):
    """Creates the real formatter at the first line. structlog takes 0.1 s to import, and some processes log nothing."""

    def __init__(self, make: Callable[[], logging.Formatter]) -> None:
        super().__init__()
        self._make = make

    @cached_property
    def _formatter(self) -> logging.Formatter:
        return self._make()

    def format(self, record: logging.LogRecord) -> str:
        return self._formatter.format(record)


def _shared_processors(is_console: bool) -> list[Processor]:
    import structlog

    return [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_console else "iso", utc=not is_console),
    ]


def _make_formatter(is_console: bool, *, is_full: bool) -> logging.Formatter:
    import structlog

    render: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                sort_keys=False,
                # other formatters show variables, which may contain clients' texts, and are slow
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
        if is_console
        else [_add_old_names, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    if is_console and not is_full:
        render.insert(0, _shorten_request)
    drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    shared = _shared_processors(is_console)
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[drop, *render])


def _shorten_request(logger: Any, method: str, line: EventDict) -> EventDict:
    """Reduce the log line of a request to route, status, model, tokens (prompt + output), seconds, and the error if
    there is one. A request over a WebSocket has a finish reason instead of a status."""
    if line.get("event") != "request" or "route" not in line:
        return line
    kept = {name: line[name] for name in ("timestamp", "level", "event", "route") if name in line}
    if (status := line.get("status", line.get("finish"))) is not None:
        kept["status"] = status
    if "model" in line:
        kept["model"] = line["model"]
    if "completion" in line:
        kept["tokens"] = f"{line.get('prompt', 0)}+{line['completion']}"
    if "ms" in line:
        kept["seconds"] = round(line["ms"] / 1000, 3)
    return kept | ({"error": line["error"]} if "error" in line else {})


def _add_old_names(logger: Any, method: str, line: EventDict) -> EventDict:
    """Add the fields of a request's log line under the names that they had in the last release."""
    if line.get("event") == "request":
        line.update({old: line[new] for old, new in LOG_FIELDS.items() if new in line})
    return line


def configure_logs_as_told(default: LogFormat = "auto") -> None:
    """Set up logging as the parent process requested, or with `default` if it did not request a format. The process
    uses the loggers of Python, not those of structlog, which is imported when the first line is logged."""
    log_format, level = os.environ.get(_FORMAT), os.environ.get(_LEVEL)
    _configure_handler(
        # the value is one of the formats
        log_format if log_format in get_args(LogFormat) else default,  # type: ignore[arg-type]
        level if level in _LEVELS else "info",
    )


def log_variables() -> dict[str, str]:
    """Return the environment variables that make a child process log in the same format as this process."""
    return dict(shown)


def log_failures() -> None:
    """Log uncaught exceptions and warnings instead of printing them. This function is only for processes that belong to
    bridle. In readable logs, a traceback has Python's own format."""

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if shown.get(_FORMAT) != "json" or issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            _log.critical("uncaught exception", exc_info=(kind, error, trace))

    def failed_in_thread(args: Any) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            failed(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = failed
    threading.excepthook = failed_in_thread
    sys.unraisablehook = failed_in_thread
    logging.captureWarnings(True)


_log = logging.getLogger("bridle")


class _ToStandardError(logging.StreamHandler[TextIO]):
    """Writes to the stream that `sys.stderr` names at the time of the write. While a progress bar moves, lines are
    printed above the bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        raise AttributeError("the stream is always standard error and cannot be set")


def _is_failure(record: logging.LogRecord) -> bool:
    """Return False for a log record that only reports a request which was cancelled because the server ended."""
    from asyncio import CancelledError

    return record.exc_info is None or not isinstance(record.exc_info[1], CancelledError)
