"""Tests of CUDA graphs that cannot be captured, over a fake of torch's graphs. Operations that wait are found before
the capture. A failed capture is undone, and steps then run without graphs."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from bridle.engine.interfaces import ExecutorInfo
from bridle.model import graph_loading
from bridle.model.graph_loading import GraphLoader
from bridle.model.recorder import CudaRecorder, refusing_waits
from tests.fakes import tiny_checkpoints
from tests.model.cuda_memory import Card
from tests.model.tape import WAITS

CUDA = torch.device("cuda", 0)
GIB = 1 << 30
INFO = ExecutorInfo("m", 300, 64, 32, 4, max_num_batched_tokens=8)


class _Warning(TorchDispatchMode):
    """Warns of operations that wait for the device, as torch does on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITS:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return func(*args, **(kwargs or {}))


class Gpu:
    """Fake streams and graphs that record their calls. `capture_end` raises `fault` before the allocator has left the
    graph's memory pool, as in torch 2.11."""

    def __init__(self, card: Card) -> None:
        self.card, self.fault, self.leaks = card, None, False
        self.done: list[str] = []
        self._watch: Any = None

    def watch(self, mode: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
        if mode == "warn":
            self._watch = _Warning()
            self._watch.__enter__()

    def end_allocation(self, device: int, pool: object) -> None:
        if not self.card.captures_underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.card.captures_underway = False
        self.done.append("left the pool")

    def install(self, patch: pytest.MonkeyPatch) -> None:
        gpu, stream = self, SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)

        class Graph:
            def capture_begin(self, **_: Any) -> None:
                gpu.card.captures_underway = True
                gpu.done.append("begin")

            def capture_end(self) -> None:
                if gpu.fault is not None:
                    raise gpu.fault
                gpu.card.captures_underway = False

            def reset(self) -> None: ...

            def replay(self) -> None:
                gpu.done.append("replay")

        gpu.card.install(patch)
        stands = {
            "CUDAGraph": Graph,
            "Stream": lambda _: stream,
            "current_stream": lambda _: stream,
            "stream": lambda _: nullcontext(),
            "device": lambda _: nullcontext(),
            "graph_pool_handle": lambda: (0, 7),
            "set_sync_debug_mode": gpu.watch,
            "get_sync_debug_mode": lambda: 0,
            "memory_snapshot": lambda: [{"segment_pool_id": (0, 7)}] if gpu.leaks else [],
        }
        for name, stand in stands.items():
            patch.setattr(torch.cuda, name, stand)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", gpu.end_allocation)
        patch.setattr(torch._C, "_cuda_releasePool", lambda *_: gpu.done.append("released the pool"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(Card(80 * GIB))
    made.install(monkeypatch)
    return made


def test_work_is_done_twice_before_it_is_captured(gpu: Gpu) -> None:
    done: list[int] = []
    replay = CudaRecorder(CUDA).record(lambda: done.append(1))
    assert (len(done), gpu.done) == (3, ["begin", "replay"])
    replay()
    assert gpu.done[-1] == "replay"


def test_what_waits_is_not_captured(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match=r"waits for the device in .*cannot be captured"):
        CudaRecorder(CUDA).record(lambda: print(torch.ones(2).sum().item()))
    assert not gpu.done, "no capture was begun"


def test_other_threads_may_wait(gpu: Gpu) -> None:
    with refusing_waits():
        other = threading.Thread(target=lambda: warnings.warn("called a synchronizing CUDA operation", stacklevel=1))
        other.start()
        other.join()


def test_other_warnings_are_shown(gpu: Gpu) -> None:
    with pytest.warns(UserWarning, match="something else"), refusing_waits():
        warnings.warn("something else", stacklevel=1)


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["work", "end"])
def test_a_capture_that_fails_is_undone(gpu: Gpu, where: str) -> None:
    fault = RuntimeError("operation failed due to a previous error during capture")
    gpu.fault, gpu.leaks, turn = fault, True, iter(range(9))

    def work() -> None:
        if next(turn) == 2 and where == "work":
            raise ValueError("in the middle")

    recorder = CudaRecorder(CUDA)
    with pytest.raises(ValueError if where == "work" else RuntimeError, match=r"in the middle|previous error"):
        recorder.record(work)
    assert gpu.done == ["begin", "left the pool"]
    torch.cuda.empty_cache()  # which torch refuses in the middle of a capture
    recorder.close()
    recorder.close()
    assert gpu.done[2:] == ["released the pool"], "once"


def test_a_pool_that_torch_released_is_left_alone(gpu: Gpu) -> None:
    gpu.fault = RuntimeError("capture")
    recorder = CudaRecorder(CUDA)
    with pytest.raises(RuntimeError):
        recorder.record(lambda: None)
    recorder.close()
    assert gpu.done == ["begin", "left the pool"]


# -- a model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "waits"), [("llama", False), ("mixtral", True)])
def test_a_load_goes_on_without_graphs(
    family: str, waits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading continues without graphs for a dense model whose capture fails, and for experts that wait for token
    counts."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints.cached_checkpoint(family))
    if waits:
        model.set_experts_implementation("eager")
    ids = torch.arange(4).unsqueeze(0)
    gpu = Gpu(Card(80 * GIB))
    gpu.install(monkeypatch)

    class Graphs:
        def __init__(self, _runner: Any, _kernel: Any, _geometry: Any, _info: Any, recorder: Any, _: Any) -> None:
            self._recorder = recorder

        @torch.inference_mode()
        def capture(self, kind: object, sizes: list[int], report: Any) -> None:
            self._recorder.record(lambda: model(ids))

    monkeypatch.setattr(graph_loading, "StepGraphs", Graphs)
    gpu.fault = RuntimeError("capture was invalidated")
    runner: Any = SimpleNamespace(attention=SimpleNamespace(cache=SimpleNamespace(device=CUDA)))
    loader = GraphLoader(runner, None, None, lambda: CudaRecorder(CUDA))  # type: ignore[arg-type]
    assert loader.measure(INFO) == 0
    assert loader.load(INFO) is None
    reason = "a step that waits for the device" if waits else "capture was invalidated"
    assert f"without CUDA graphs: RuntimeError: {reason}" in caplog.text
    assert "torch keeps" not in caplog.text
    assert ("begin" in gpu.done) is not waits
    torch.cuda.empty_cache()
