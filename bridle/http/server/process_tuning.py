"""Tunes the server's process: allows more open files, reduces garbage collections, and shortens the thread switch
interval."""

from __future__ import annotations

import gc
import sys

import structlog

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.serve")
_SPARE_FILES = 256  # files in addition to connections: models, logs, pipes
#: Seconds for which a thread may keep the interpreter while others wait. The engine's thread releases the interpreter
#: at each call into the device's library, and should get it back at once. The default of 5 ms is a whole step of a
#: small model.
SWITCH_INTERVAL = 0.0005
#: The interpreter's default thresholds for collections. They are set here, because the start of a server uses higher
#: ones.
_GARBAGE = (700, 10, 10)


def tune_process(max_connections: int) -> None:
    """Prepare the process to serve. Call this once all long-lived objects exist. Garbage collections then skip the
    long-lived objects, because checking some hundred thousand objects would delay every stream. Garbage is not
    collected first, because a collection would delay the start and free only a few hundred objects."""
    _allow_files(max_connections + _SPARE_FILES)
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()
    gc.set_threshold(*_GARBAGE)


def _allow_files(wanted: int) -> None:
    """Raise the soft limit of open files. On most systems the soft limit is 1,024, and the hard limit is much
    higher."""
    try:
        import resource
    except ImportError:  # the system is not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning(
            "the limit of open files is low", limit=allowed, wanted=wanted, see="ulimit -Hn, --max-connections"
        )
