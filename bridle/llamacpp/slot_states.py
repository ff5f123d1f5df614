"""Reads and writes the KV of llama.cpp's slots as bytes, for a KV store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from bridle.llamacpp.library import Model, library
from bridle.llamacpp.slots import Slots
from bridle.model.weights_digest import weights_digest


class SlotStates:
    """Implements `bridle.engine.interfaces.SequenceStates` over the slots of a model."""

    def __init__(self, model: Model, slots: Slots, identity: Callable[[], str]) -> None:
        self._model, self._slots, self.identity = model, slots, identity
        self.is_cuttable = not model.is_recurrent

    def size_of(self, seq_id: int, num_tokens: int) -> int:
        held = self._slots.held.get(seq_id)
        if held is None or held.stored < num_tokens or not (self.is_cuttable or held.stored == num_tokens):
            return 0
        return self._model.size_of(held.slot)

    def read(self, seq_id: int) -> bytearray:
        return self._model.read(self._slots[seq_id].slot)

    def free(self, seq_ids: Sequence[int]) -> None:
        self._slots.release(seq_ids)

    def adopt(self, seq_id: int, adapter: str | None, tokens: Sequence[int], state: memoryview) -> bool:
        def restore(slot: int) -> bool:
            if not self._model.write(slot, state):
                return False
            if self.is_cuttable:
                self._model.cut(slot, len(tokens))
            return True

        return self._slots.adopt(seq_id, tokens, restore)


def kv_identity(folder: Path, kv_type: str, on_gpu: bool) -> str:
    """Return a text that identifies the format of the KV, and everything other than the tokens that its values depend
    on. Reads all weights of the model if their digest is not known yet."""
    found = library()
    build = Path(getattr(found.llama_cpp._lib, "_name", ""))
    digest = blake2b(build.read_bytes()).hexdigest() if build.is_file() else ""
    parts = (weights_digest(folder), kv_type, on_gpu, found.__version__, digest, found.llama_print_system_info())
    return f"llamacpp {parts}"
