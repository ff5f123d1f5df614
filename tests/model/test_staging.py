"""Tests of the upload of weights through pinned buffers, over a fake device that copies as late as it may."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from bridle.model import staging
from bridle.model.staging import BUFFER_BYTES, NUM_BUFFERS, Stager, StreamQueue, move_model, staged
from tests.model.device_trace import META, traced

CPU = torch.device("cpu")


class LateQueue:
    """A fake queue of copies that runs none of them before the host waits for an event."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], Any]] = []
        self.num_copies = self.num_waits = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.num_copies += 1
        self.todo.append(lambda: target.copy_(source))

    def mark(self) -> LateMark:
        return LateMark(self, self.num_copies)


class LateMark:
    def __init__(self, queue: LateQueue, number: int) -> None:
        self._queue, self._number = queue, number

    def synchronize(self) -> None:
        self._queue.num_waits += 1
        left = self._queue.num_copies - self._number
        while len(self._queue.todo) > left:
            self._queue.todo.pop(0)()


class Stage(Stager):
    """An uploader whose target device is also the CPU, in place of a GPU."""

    def put(self, tensor: Tensor) -> Tensor:
        with patch.object(torch, "empty_like", lambda source, device: torch.full_like(source, -1)):
            return super().put(tensor)


def tensors(seed: int) -> list[Tensor]:
    """Return tensors of several types and of all sizes, from none to several buffers; some are not contiguous."""
    draw = random.Random(seed)
    made = [torch.tensor(3.5), torch.empty(0, 4), torch.arange(12.0).view(3, 4).t(), torch.tensor([True, False])]
    for _ in range(40):
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.int8, torch.int64])
        made.append(torch.randint(-99, 99, (draw.randint(1, 90), draw.randint(1, 9))).to(dtype))
    draw.shuffle(made)
    return made


@pytest.mark.parametrize("seed", range(5))
def test_a_buffer_is_not_written_before_its_last_copy_was_made(seed: int) -> None:
    queue = LateQueue()
    stage = Stage(CPU, queue, buffer_bytes=256, num_buffers=3)
    sources = tensors(seed)
    moved = [stage.put(source) for source in sources]
    assert queue.todo  # it runs ahead of the device, ...
    assert len({source.data_ptr() for source in stage._buffers}) == 3  # ... and takes no more memory for that
    stage.finish()
    assert not queue.todo
    for want, have in zip(sources, moved, strict=True):
        assert torch.equal(want, have)
        assert want.dtype == have.dtype


def test_the_next_buffers_are_written_while_one_is_copied() -> None:
    queue = LateQueue()
    stage = Stage(CPU, queue, buffer_bytes=256, num_buffers=3)
    for _ in range(3):
        stage.put(torch.zeros(256, dtype=torch.uint8))
    assert (queue.num_copies, queue.num_waits) == (3, 0)
    stage.put(torch.zeros(1, dtype=torch.uint8))
    assert queue.num_waits == 1
    assert len(queue.todo) == 3  # of four copies, the first alone had to be over


def test_small_tensors_share_a_buffer() -> None:
    queue = LateQueue()
    stage = Stage(CPU, queue, buffer_bytes=256, num_buffers=2)
    for _ in range(8):
        stage.put(torch.zeros(17))  # 68 bytes, of which two fit
    assert queue.num_waits <= 3


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("angles", torch.arange(4.0))


def test_on_a_device_everything_goes_through_pinned_memory_and_is_waited_for_at_the_end() -> None:
    shares: list[float] = []
    untied = Tied().requires_grad_(False)
    untied.last.weight = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
    with traced() as trace:
        model = move_model(untied, META, shares.append)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    trace.check(launches=0, quick=4, waits=1)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_of_large_tensors_the_ring_is_waited_for_alone() -> None:
    size = BUFFER_BYTES * (NUM_BUFFERS + 2)
    with traced() as trace, staged(META) as put:
        put(torch.empty(size, dtype=torch.uint8))
    trace.check(launches=0, quick=NUM_BUFFERS + 2, waits=2 + NUM_BUFFERS)


def test_where_nothing_can_be_pinned_copies_are_plain_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: Any) -> Tensor:
        raise RuntimeError("no more locked memory")

    with patch.object(staging, "pinned", refuse), traced() as trace:
        model = move_model(nn.Linear(4, 4).requires_grad_(False), META)
    assert model.weight.device == META
    trace.check(launches=0, quick=0, slow=2)
    assert "pinning memory failed: no more locked memory" in caplog.text


def test_on_a_cpu_weights_stay_where_they_are() -> None:
    model = Tied()
    before = model.first.weight.data_ptr()
    with patch.object(staging, "Stager", side_effect=AssertionError):
        assert move_model(model, CPU).first.weight.data_ptr() == before
        with staged(CPU) as put:
            assert put(model.angles) is model.angles


@pytest.mark.gpu
def test_on_the_device_itself() -> None:
    device = torch.device("cuda")
    stage = Stager(device, StreamQueue(device), buffer_bytes=1 << 12, num_buffers=3)
    sources = tensors(0) * 20
    moved = [stage.put(source) for source in sources]
    stage.finish()
    for want, have in zip(sources, moved, strict=True):
        assert torch.equal(want, have.cpu())
    model = move_model(Tied().requires_grad_(False), device)
    assert model.last.weight is model.first.weight
