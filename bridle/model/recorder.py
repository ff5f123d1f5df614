"""Records the operations of a device so that they can be replayed with one call, as a CUDA graph.

Each replay reads and writes the same device memory. Recorded operations must not wait for the device. Numbers that the
host passes to a kernel keep the values that they had during recording.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

import torch

Work = Callable[[], None]


class Recorder(Protocol):
    """Interface that records work for later replays."""

    def record(self, work: Work) -> Work:
        """Run and record `work`; return a function that repeats it. Raises the error if the work cannot be recorded."""
        ...

    def close(self) -> None:
        """Release the memory of failed recordings. Must be called when the recorded graphs are not used any more."""
        ...


class CudaRecorder:
    """Captures CUDA graphs of one device. All captured graphs share their memory, so two graphs must never be replayed
    at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._has_failed = False

    def record(self, work: Work) -> Work:
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                work()  # compiles kernels and selects those of libraries, which cannot be captured
                with refusing_waits():
                    work()
                self._stream.synchronize()
                graph = self._capture(work)
        finally:
            main.wait_stream(self._stream)
        graph.replay()  # the capture itself computes nothing
        replay: Work = graph.replay
        return replay

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may continue
        try:
            with _without_collections():
                work()
            graph.capture_end()
        except BaseException:
            self._undo(graph)
            raise
        return graph

    def _undo(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed. Up to torch 2.11 `capture_end` raises before the allocator leaves the graph's pool
        (pytorch#180395). If the allocator stayed in the graph's pool, no code in the process could empty torch's memory
        cache."""
        self._has_failed = True
        for end in (graph.capture_end, graph.reset):
            with suppress(RuntimeError):  # the capture has ended, or the call fails as the capture did
                end()
        with suppress(RuntimeError, AttributeError):  # the allocator has already left the pool
            torch._C._cuda_endAllocateToPool(_index(self._device), self._pool)

    def close(self) -> None:
        """Release the pool of failed captures. Some versions of torch keep the pool for a graph that was never captured
        (pytorch#190348)."""
        if not self._has_failed:
            return
        self._has_failed = False
        gc.collect()
        with suppress(RuntimeError, AttributeError):
            torch.cuda.empty_cache()
            segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if any(tuple(each["segment_pool_id"]) == self._pool for each in segments):
                torch._C._cuda_releasePool(_index(self._device), self._pool)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@contextmanager
def refusing_waits() -> Iterator[None]:
    """At the end of the `with` block, raise an error if this thread waited for the device. The check of torch applies
    to the whole process. torch's check is therefore set to warn only, which lets other threads wait as usual."""
    own, waits = threading.get_ident(), list[str]()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", ".*synchronizing CUDA")
        show = warnings.showwarning

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if "synchronizing CUDA" not in str(message):
                show(message, category, filename, lineno, file, line)
            elif threading.get_ident() == own:
                waits.append(f"{filename}:{lineno}")

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    if waits:
        raise RuntimeError(f"a step that waits for the device in {waits[0]} cannot be captured in a CUDA graph")


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection in the `with` block, because memory that is freed during a capture could become part
    of the graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
