"""The keyword `trace` of calls: True keeps the trace in the output, a file's name writes it there as well."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bridle.errors import InvalidRequest
from bridle.outputs import RequestOutput
from bridle.serving import LoadedModel
from bridle.serving.tracing.trace_header import traces_of
from bridle.traces import write


def is_traced(given: Mapping[str, Any]) -> bool:
    """Return whether a call asks for traces. Raises `InvalidRequest` unless the value is a boolean or a file name."""
    wish = given.get("trace")
    if not isinstance(wish, (bool, str, os.PathLike, type(None))):
        raise InvalidRequest(f"trace is {wish!r}; it is True, False or the name of a file", "trace")
    return bool(wish)


def keep_traces(model: LoadedModel, outputs: Iterable[RequestOutput], given: Mapping[str, Any]) -> None:
    """Complete the traces of outputs that have ended, and write them if the call says so."""
    traces = traces_of(model, outputs)
    if traces and isinstance(given["trace"], (str, os.PathLike)):
        write(traces, Path(given["trace"]))
