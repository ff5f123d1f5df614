"""Wraps the functions of llama.cpp that the executor uses, and checks their results. This module does not handle plans
or the engine's sequences: a slot is llama.cpp's own sequence number.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bridle.distribution import install_hint
from bridle.errors import InternalError, OutOfBlocks, ShardUnavailable, UnsupportedModel

_log = logging.getLogger(__name__)

#: Maximum number of sequences in one context of llama.cpp.
MAX_SLOTS = 256
#: Maximum number of sequences of a model with recurrent layers, which has a state for each sequence.
MAX_STATES = 64
_KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
_ERROR = 4
_WHOLE, _PARTIAL = 0, 1  # parts of a slot's state: all of it, and only the recurrent state


class Cell(NamedTuple):
    """A token to compute, with its slot, its position, and a flag for whether its logits are needed."""

    token: int
    position: int
    slot: int
    has_logits: bool


def require_library() -> None:
    """Raise `UnsupportedModel` if the extra `llamacpp` is not installed."""
    if find_spec("llama_cpp") is None:
        raise UnsupportedModel(f"backend 'llamacpp' needs the extra: {install_hint('llamacpp')}")


@cache
def library() -> Any:
    """Return the Python module with llama.cpp's functions. Raises `UnsupportedModel` if the extra is not installed."""
    require_library()
    import llama_cpp

    llama_cpp.llama_log_set(_log_callback(), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def _log_callback() -> Any:
    """Return a callback that forwards llama.cpp's log to bridle's log. llama.cpp's errors are logged as warnings,
    because bridle itself raises an error if a call fails."""
    import llama_cpp

    def take(level: int, text: bytes, data: object) -> None:
        _log.log(logging.WARNING if level == _ERROR else logging.DEBUG, "%s", text.decode("utf-8", "replace").rstrip())

    return llama_cpp.llama_log_callback(take)


class Model:
    """A loaded model with one llama.cpp context, whose `num_cells` KV cells all sequences share."""

    def __init__(
        self, path: Path, *, num_cells: int, max_batch: int, kv_type: str, num_threads: int, on_gpu: bool
    ) -> None:
        self._lib = library()
        self.max_batch = max_batch
        self._context: Any = None
        self._batch: Any = None
        settings = self._lib.llama_model_default_params()
        settings.n_gpu_layers = -1 if on_gpu else 0
        if hasattr(settings, "load_mode"):  # a mapped file that is truncated during use would end the process
            settings.load_mode = self._lib.LLAMA_LOAD_MODE_NONE
        else:
            settings.use_mmap = False
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise UnsupportedModel(f"llama.cpp cannot load {path}; see the log for the reason")
        lib = self._lib
        #: True if the model has a recurrent state, which cannot be truncated.
        self.is_recurrent = bool(lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model))
        self.num_slots = MAX_STATES if self.is_recurrent else MAX_SLOTS
        try:
            self._check_kind(path)
            self._open_context(num_cells, kv_type, num_threads)
        except Exception:
            self.close()
            raise
        self._memory = self._lib.llama_get_memory(self._context)
        self.vocab_size = int(self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model)))
        self.hidden_size = int(self._lib.llama_model_n_embd(self._model))

    def _check_kind(self, path: Path) -> None:
        if self._lib.llama_model_has_encoder(self._model):
            raise UnsupportedModel(f"{path} is an encoder-decoder; bridle serves decoder-only models")

    def _open_context(self, num_cells: int, kv_type: str, num_threads: int) -> None:
        lib = self._lib
        settings = lib.llama_context_default_params()
        settings.n_ctx = max(num_cells, self.max_batch)  # a batch is never larger than the context
        settings.n_batch = settings.n_outputs_max = self.max_batch
        settings.n_ubatch = min(self.max_batch, 512)
        settings.n_seq_max = self.num_slots
        settings.n_threads = settings.n_threads_batch = num_threads
        settings.type_k = settings.type_v = _KV_TYPES[kv_type]
        settings.flash_attn_type = 0 if kv_type == "float32" else -1
        settings.kv_unified = settings.swa_full = True  # slots share cells, and windows may be rolled back
        settings.no_perf = True
        self._context = lib.llama_init_from_model(self._model, settings)
        if not self._context:
            raise OutOfBlocks(f"llama.cpp cannot create a context of {num_cells} tokens; see the log for the reason")
        self._batch = lib.llama_batch_init(self.max_batch, 0, 1)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights."""
        return int(self._lib.llama_model_size(self._model)) if self._model else 0

    # -- computing ------------------------------------------------------------------------------------------------

    def decode(self, cells: Sequence[Cell]) -> Tensor:
        """Compute at most `max_batch` tokens; return logits [R, V] of the cells with `has_logits`, in order."""
        self._fill(cells)
        self._run(len(cells))
        count = sum(cell.has_logits for cell in cells)
        if not count:
            return torch.empty(0, self.vocab_size)
        rows = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), (count, self.vocab_size))
        return torch.from_numpy(rows.copy())

    def embed(self, cells: Sequence[Cell]) -> Tensor:
        """Compute tokens, and return their hidden states [T, hidden]."""
        self._lib.llama_set_embeddings(self._context, True)
        try:
            self._fill(cells)
            self._run(len(cells))
            rows = [
                np.ctypeslib.as_array(self._lib.llama_get_embeddings_ith(self._context, at), (self.hidden_size,)).copy()
                for at in range(len(cells))
            ]
        finally:
            self._lib.llama_set_embeddings(self._context, False)
        return torch.from_numpy(np.stack(rows))

    def _fill(self, cells: Sequence[Cell]) -> None:
        batch = self._batch
        batch.n_tokens = len(cells)
        for at, cell in enumerate(cells):
            batch.token[at], batch.pos[at], batch.logits[at] = cell.token, cell.position, cell.has_logits
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = cell.slot

    def _run(self, count: int) -> None:
        status = self._lib.llama_decode(self._context, self._batch)
        if status == 1:
            raise OutOfBlocks(f"llama.cpp has fewer than {count} free KV cells")
        if status != 0:
            raise InternalError(f"llama.cpp returned status {status} for a batch of {count} tokens")

    # -- what it remembers ----------------------------------------------------------------------------------------

    def cut(self, slot: int, length: int) -> None:
        """Remove the KV of a slot's positions from `length` on."""
        if not self._lib.llama_memory_seq_rm(self._memory, slot, length, -1):
            raise InternalError(f"llama.cpp cannot truncate slot {slot} to {length} tokens")

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the KV of the first `length` positions of slot `source` into the empty slot `target`."""
        if length:
            self._lib.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def state(self, slot: int) -> bytes:
        """Return the recurrent state of a slot."""
        return bytes(self.read(slot, _PARTIAL))

    def restore(self, slot: int, state: bytes) -> None:
        """Restore a slot's recurrent state from the data that `state` returned."""
        if not self.write(slot, bytearray(state), _PARTIAL):
            raise InternalError(f"llama.cpp cannot restore a state of {len(state)} bytes in slot {slot}")

    def size_of(self, slot: int, part: int = _WHOLE) -> int:
        """Return the size in bytes of a slot's data, or of the part `part` of it."""
        return int(self._lib.llama_state_seq_get_size_ext(self._context, slot, part))

    def read(self, slot: int, part: int = _WHOLE) -> bytearray:
        """Return a slot's data (KV and recurrent state), or the part `part` of it."""
        state = bytearray(self.size_of(slot, part))
        held = (ctypes.c_uint8 * len(state)).from_buffer(state)
        if self._lib.llama_state_seq_get_data_ext(self._context, held, len(state), slot, part) != len(state):
            raise InternalError(f"llama.cpp cannot save the state of slot {slot}")
        return state

    def write(self, slot: int, state: bytearray | memoryview, part: int = _WHOLE) -> bool:
        """Restore a slot from the data that `read` returned. Return whether llama.cpp accepts the data."""
        held = (ctypes.c_uint8 * len(state)).from_buffer(state)
        return bool(self._lib.llama_state_seq_set_data_ext(self._context, held, len(state), slot, part) == len(state))

    def clear(self) -> None:
        if self._context:
            self._lib.llama_memory_clear(self._memory, False)

    # -- adapters ---------------------------------------------------------------------------------------------------

    def read_adapter(self, path: Path) -> Any:
        """Return an adapter's handle; None if llama.cpp refuses the adapter. Raises `ShardUnavailable` once the model
        is closed."""
        if not self._model:
            raise ShardUnavailable("the executor is closed")
        return self._lib.llama_adapter_lora_init(self._model, str(path).encode())

    def free_adapter(self, handle: Any) -> None:
        self._lib.llama_adapter_lora_free(handle)

    def use_adapter(self, handle: Any | None) -> None:
        """Use this adapter in all later computations (None: no adapter)."""
        if handle is None:
            status = self._lib.llama_set_adapters_lora(self._context, None, 0, None)
        else:
            handles = (ctypes.c_void_p * 1)(ctypes.cast(handle, ctypes.c_void_p))
            pointer = ctypes.cast(handles, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))
            status = self._lib.llama_set_adapters_lora(self._context, pointer, 1, (ctypes.c_float * 1)(1.0))
        if status != 0:
            raise InternalError("llama.cpp cannot apply an adapter that it has loaded")

    def close(self) -> None:
        """Free model and context. Idempotent."""
        if self._batch is not None:
            self._lib.llama_batch_free(self._batch)
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._batch = self._context = self._model = None
