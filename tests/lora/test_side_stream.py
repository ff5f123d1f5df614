"""Tests of work on a separate CUDA stream during steps. The work is complete at the end of its block. The work's memory
is not reused while steps may read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle.lora import open_adapter
from bridle.lora.side_stream import SideStream, used_by_steps
from bridle.lora.torch_ops import TorchKernel
from bridle.model import adapters
from bridle.model.adapters import ModelAdapters
from bridle.model.lora_layers import Sites
from tests.fakes import tiny_checkpoints
from tests.lora.kit import write_adapter
from tests.model.driver import load

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch's CUDA streams by fakes; return the list of their calls."""
    found: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            found.append("made")

        def synchronize(self) -> None:
            found.append("done")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.append("begin")
        yield
        found.append("end")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return found


def test_work_is_done_when_its_block_ends(notes: list[str]) -> None:
    side = SideStream(CUDA)
    for _ in range(2):
        with side.beside():
            notes.append("work")
    assert notes == ["made", *(["begin", "work", "end", "done"] * 2)]


def test_on_a_cpu_there_is_nothing_to_it(notes: list[str]) -> None:
    with SideStream(CPU).beside():
        notes.append("work")
    assert notes == ["work"]
    tensor = torch.ones(2)
    assert used_by_steps(tensor) is tensor


def test_adapters_are_copied_and_tried_beside_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []
    where: list[tuple[str, bool]] = []

    @contextmanager
    def beside(self: SideStream) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def placed(*args: Any) -> Any:
        where.append(("copy", bool(inside)))
        return original(*args)

    class Noted(TorchKernel):
        def prepare(self, adapter: Any) -> None:
            where.append(("trial", bool(inside)))

    original = adapters.place
    monkeypatch.setattr(SideStream, "beside", beside)
    monkeypatch.setattr(adapters, "place", placed)
    model = load(tiny_checkpoints.cached_checkpoint("llama")).runner.model
    device = ModelAdapters(Sites(model), torch.float32, CPU, Noted())
    device.read("a", open_adapter(write_adapter(tmp_path / "a", device.layers)))
    device.place("a")
    assert where == [("copy", True), ("trial", True)]
    assert "a" in device
