"""Settings of a server's own process: open files for its connections, few garbage collections, fast switching of
threads."""

from __future__ import annotations

import gc
import sys

import structlog

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.serve")
_SPARE_FILES = 256  # files in addition to connections: models, logs, pipes
#: How long a thread may keep others waiting, in seconds. The engine's thread gives up its turn at each call into the
#: device's library, and should get it back at once; the interpreter's own 5 ms are a whole step of a small model.
SWITCH_INTERVAL = 0.0005
#: The interpreter's own thresholds for collections, of which a start wants fewer than a stream of requests.
_GARBAGE = (700, 10, 10)


def tune_process(max_connections: int) -> None:
    """Prepare to serve. Call this once all long-lived objects exist. Garbage collections skip them from then on,
    because walking some hundred thousand objects would delay every stream. So would a last collection before: it finds
    a few hundred objects after a load."""
    _allow_files(max_connections + _SPARE_FILES)
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()
    gc.set_threshold(*_GARBAGE)


def _allow_files(wanted: int) -> None:
    """Raise the soft limit of open files; on most systems it is 1,024 where the hard one is far higher."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning("few files may be open", limit=allowed, wanted=wanted, see="ulimit -Hn, --max-connections")
