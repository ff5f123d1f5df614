"""Records what work asks of a device, to ask it again at once: a CUDA graph.

What is recorded reads and writes the same memory each time it is replayed. It must not wait for the device, and a
number of the host's is the one that it was while recording.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

Work = Callable[[], None]


class Recorder(Protocol):
    """A way to record work."""

    def record(self, work: Work) -> Work:
        """Do the work, recording it; returns what does it again. Raises whatever tells that it cannot be recorded."""
        ...


class CudaRecorder:
    """Captures CUDA graphs of one device, which are never replayed at the same time: they share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Work) -> Work:
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()  # compiles kernels and chooses those of libraries, which cannot be captured
            self._stream.synchronize()
            graph = self._capture(work)
        main.wait_stream(self._stream)
        graph.replay()  # capturing does nothing
        replay: Work = graph.replay
        return replay

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may go on
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # it fails as the capture did
                graph.capture_end()
            raise
        graph.capture_end()
        return graph
