"""The HTTP server over a GPU: clients on loopback that stream, compared with the offline engine over the same
checkpoint.

Only this part needs files, since the server is a separate process: a checkpoint with random weights, which is removed
afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Figures = Iterator[dict[str, Any]]
#: What the server needs beside what bridle's engine does.
NEEDED = ("fastapi", "httptools", "pydantic", "starlette", "uvicorn", "websockets")
_OPTIONS = ("--control", "off", "--no-prefix-caching")
_MOST_PROMPT = 256
#: Of the checkpoint: with less, the server warns that it refuses longer requests.
_CONTEXT = 4_096


def missing_for_serving() -> str | None:
    """Return the names of missing packages, or None if all are installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    return ", ".join(missing) or None


def serving(model: str, num_streams: int, max_tokens: int, has_time: Callable[[], bool]) -> Figures:
    """Yield tokens per second of `num_streams` simultaneous streams, offline and over HTTP, and for HTTP the
    inter-token latency."""
    from bridle.bench.checkpoints import make_checkpoint
    from bridle.bench.control_guests import write_tokenizer
    from bridle.bench.engine import make_prompts

    if (missing := missing_for_serving()) is not None:
        yield {"what": "serve", "failed": f"the server needs {missing}"}
        return
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as name:
        folder = Path(name)
        checkpoint = make_checkpoint(model, folder)
        write_tokenizer(checkpoint.path, checkpoint.vocab_size)
        prompts = make_prompts(2 * num_streams, checkpoint.vocab_size)
        capacity = max(num_streams * (_MOST_PROMPT + max_tokens), _CONTEXT)
        offline = _offline(checkpoint, prompts, max_tokens, num_streams, capacity)
        yield {"what": "serve", "peer": "offline", "batch": num_streams, "tokens_per_second": offline}
        if has_time():
            yield _over_http(checkpoint, folder, prompts, max_tokens, num_streams, capacity, offline)


def _offline(checkpoint: Any, prompts: Any, max_tokens: int, num_streams: int, capacity: int) -> float:
    """Return the offline engine's tokens per second. The engine is closed afterwards, because the server needs the
    GPU's memory."""
    from bridle.bench.baselines import BridlePeer

    peer = BridlePeer(checkpoint, max_num_seqs=num_streams, capacity=capacity)
    try:
        peer.generate(prompts[:num_streams], 4)  # whatever is made lazily is made now
        return len(prompts) * max_tokens / peer.generate(prompts, max_tokens).seconds
    finally:
        peer.close()


def _over_http(
    checkpoint: Any, folder: Path, prompts: Any, max_tokens: int, num_streams: int, capacity: int, offline: float
) -> dict[str, Any]:
    from bridle.bench.load_report import timed
    from bridle.bench.serve import run
    from bridle.bench.serve_process import http_server
    from bridle.bench.sse_client import closed_loop

    room = ("--kv-memory", str(checkpoint.token_bytes * capacity))
    with http_server(checkpoint.path, folder, *_OPTIONS, *room) as server:
        run(closed_loop(server.target, prompts[:num_streams], 4, num_streams))
        row, _ = run(timed("streams", server, closed_loop(server.target, prompts, max_tokens, num_streams)))
    return {
        "what": "serve",
        "peer": "http",
        "batch": num_streams,
        "tokens_per_second": row.tokens_per_second,
        "ratio": row.tokens_per_second / offline,
        "failed_requests": row.failed + row.refused,
        "failed": f"{row.failed + row.refused} requests failed" if row.failed + row.refused else None,
        "first_p50_ms": 1e3 * row.first_p50,
        "gap_p50_ms": 1e3 * row.gap_p50,
        "gap_p99_ms": 1e3 * row.gap_p99,
        "server_cores": row.server_cpu,
    }
