"""Peers of `bridle bench cpu`, by name: bridle over a checkpoint or a GGUF file, llama.cpp over the same file, and
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bridle.bench.checkpoints import Checkpoint
from bridle.bench.peers import BridlePeer, GeneratePeer, Peer, load_transformers
from bridle.bench.settings import Settings
from bridle.model.memory import return_memory
from lab.bench.cpu_files import FILE_TYPES, can_write, has_llamacpp, write_file
from lab.bench.cpu_limits import Case
from lab.bench.cpu_parts import Part, num_steps

_MAX_SEQS = 64
_STEP_TOKENS = 256
#: The least room of an engine in tokens: less than one request may have is refused while loading.
_LEAST_ROOM = 1024


@contextmanager
def load_peers(
    checkpoint: Checkpoint, folder: Path, wanted: Sequence[Part], settings: Settings
) -> Iterator[dict[str, Peer]]:
    """The peers of these parts by name, as far as they can be had here, with room for the largest case."""
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


def load_peer(checkpoint: Checkpoint, folder: Path, name: str, settings: Settings, capacity: int) -> Peer | None:
    """One of them; None if it cannot be had here."""
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


def _room(case: Case, settings: Settings) -> int:
    """Tokens of a case's sequences: the first ones draw while the last one's prompt is read."""
    early = case.batch + case.batch * case.context // _STEP_TOKENS
    return case.batch * (case.context + num_steps(settings) + early + 32)
