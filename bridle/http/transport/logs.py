"""Logs as structlog writes them: readable lines on a terminal, JSON elsewhere. One line per request, from
`call`."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "console", "json"]


def configure_logs(log_format: LogFormat = "auto", level: str = "info") -> None:
    """Set up logging for a whole process: bridle's own lines, and those of the libraries that it uses."""
    is_console = sys.stderr.isatty() if log_format == "auto" else log_format == "console"
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_console else "iso", utc=not is_console),
    ]
    render: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                sort_keys=False,
                exception_formatter=structlog.dev.plain_traceback,  # others show variables: texts of clients, slowly
            )
        ]
        if is_console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = _ToStandardError()
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_drop, *render]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Other libraries' notices add little to bridle's own lines, but their warnings are shown.
    root.setLevel("DEBUG" if level == "debug" else max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("bridle").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("WARNING")
    logging.getLogger("uvicorn.error").addFilter(_is_failure)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


class _ToStandardError(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the moment: while a bar moves, that is what prints lines above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        raise AttributeError("the stream is standard error")


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a record reports more than a request that was cut when the server was ended."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


_drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
