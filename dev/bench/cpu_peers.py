"""The programs that `bridle bench cpu` compares, by name: bridle over a checkpoint or a GGUF file, llama.cpp over the
same file, and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bridle.bench.baselines import BridlePeer, GeneratePeer, Peer, load_transformers
from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.settings import BenchSettings
from bridle.model.memory import return_memory
from dev.bench.cpu_files import FILE_TYPES, can_write, has_llamacpp, write_file
from dev.bench.cpu_limits import CpuCase
from dev.bench.cpu_parts import BenchPart, num_steps

_MAX_SEQS = 64
_STEP_TOKENS = 256
#: Minimum capacity of an engine in tokens: loading fails if the capacity is less than one request may need.
_LEAST_ROOM = 1024


@contextmanager
def load_peers(
    checkpoint: BenchCheckpoint, folder: Path, wanted: Sequence[BenchPart], settings: BenchSettings
) -> Iterator[dict[str, Peer]]:
    """Yield the available programs of these parts by name, with enough KV for the largest case."""
    capacity = max(_LEAST_ROOM, *(_room(part.case, settings) for part in wanted if part.case is not None))
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for name in dict.fromkeys(name for part in wanted for name in part.peers):
            peer = load_peer(checkpoint, folder, name, settings, capacity)
            if peer is not None:
                stack.callback(return_memory)
                stack.callback(peer.close)
                peers[name] = peer
        yield peers


def load_peer(
    checkpoint: BenchCheckpoint, folder: Path, name: str, settings: BenchSettings, capacity: int
) -> Peer | None:
    """Return one program; None if it is not available."""
    program, _, form = name.rpartition(" ")
    if program == "transformers":
        return GeneratePeer(load_transformers(checkpoint))
    shared: dict[str, Any] = {"num_threads": settings.threads, "capacity": capacity, "max_num_seqs": _MAX_SEQS}
    if form in FILE_TYPES:
        if not can_write() or (program == "llama.cpp" and not has_llamacpp()):
            return None
        file = write_file(checkpoint, folder, form)
        return BridlePeer(checkpoint, file=file, backend="llamacpp" if program == "llama.cpp" else "torch", **shared)
    return BridlePeer(checkpoint, quantization="none" if form == "float32" else "int8", **shared)


def _room(case: CpuCase, settings: BenchSettings) -> int:
    """Return the tokens of KV that a case needs. The first sequences sample already while the last prompt is
    computed."""
    early = case.batch + case.batch * case.context // _STEP_TOKENS
    return case.batch * (case.context + num_steps(settings) + early + 32)
