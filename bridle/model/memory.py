"""Measures the free memory of a device and the peak memory of a computation, in bytes."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from bridle.cgroups import memory_room
from bridle.errors import UnsupportedModel
from bridle.malloc import return_free_memory

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PEAK = re.compile(r"VmHWM:\s*(\d+) kB")


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`, within the limits of the machine and of this process's
    control group. A GPU's driver counts torch's cached memory as used, so the cache is released first."""
    if device.type == "cuda":
        release_cached(device)
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    room = memory_room()
    return available if room is None else min(available, room)


def check_weights_fit(needed: int, item_size: int, device: torch.device) -> None:
    """Raise `UnsupportedModel` if weights of `needed` bytes do not fit into the device's free memory. `item_size` is
    the bytes of one value, for the message. The check runs before the weights are read."""
    free = free_memory(device)
    if needed > free:
        raise UnsupportedModel(
            f"the weights need {show_bytes(needed)} ({item_size} per value), but {device} has {show_bytes(free)} free"
        )


def run_with_peak(device: torch.device, run: Callable[[], T]) -> tuple[T, int]:
    """Call `run`. Return its result and its peak memory in bytes, minus the memory that `run` leaves allocated."""
    if device.type == "cuda":
        return _run_on_cuda(device, run)
    return_free_memory()
    _forget_peak()
    result = run()
    peak = _peak()
    return_memory()
    return result, max(peak - int(psutil.Process().memory_info().rss), 0)


def _run_on_cuda(device: torch.device, run: Callable[[], T]) -> tuple[T, int]:
    release_cached(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    release_cached(device)
    return result, max(peak - torch.cuda.memory_reserved(device), 0)


def release_cached(device: torch.device) -> None:
    """Return memory that torch caches without using it, such as that of released pools and graphs, to the GPU
    driver."""
    if device.type != "cuda":
        return
    gc.collect()
    torch.cuda.synchronize(device)
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # after a failed capture, torch may refuse this call from now on
        _log.warning("torch could not release its cached memory on %s: %s", device, error)


def return_memory() -> None:
    """Return freed memory that malloc still holds to the system, so that other programs can use it."""
    gc.collect()
    return_free_memory()


def _forget_peak() -> None:
    """Reset the recorded peak memory of the process, if the system supports this. If the system does not support a
    reset, the measured peak covers the whole life of the process, and is an overestimate."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Return the maximum memory that the process has used at once."""
    try:
        found = _PEAK.search(Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) << 10
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def show_bytes(size: int) -> str:
    """Format a size in bytes as text, with a unit."""
    if size < 1 << 20:
        return f"{size} bytes"
    return f"{size / (1 << 20):.1f} MiB" if size < 1 << 30 else f"{size / (1 << 30):.1f} GiB"
