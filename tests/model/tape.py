"""A fake of CUDA graphs: operations are recorded with their tensors and repeated on the same memory. As in a real
graph, values that the host computed during recording stay the same, and reading a value of the device is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves

#: Operations that wait for the device.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")

Work = Callable[[], None]


class Tape(TorchDispatchMode):
    """Recorded operations that can be repeated."""

    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self._plays: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{func} waits for the device and cannot be captured")
        made = func(*args, **kwargs)
        given = {_memory(leaf) for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)}
        # What shares memory with what was given is a view of it, or was written in place.
        new = [isinstance(leaf, Tensor) and _memory(leaf) not in given for leaf in tree_leaves(made)]

        def play() -> None:
            again = tree_leaves(func(*args, **kwargs))
            for old, value, is_new in zip(tree_leaves(made), again, new, strict=True):
                if is_new:
                    old.copy_(value)

        self._plays.append(play)
        return made

    def note(self, work: Work) -> None:
        """Run work of Triton kernels, which torch's dispatch does not see, and record it."""
        with _paused():
            work()
        self._plays.append(work)

    def replay(self) -> None:
        with torch.inference_mode():
            for play in self._plays:
                play()


@contextmanager
def _paused() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class TapeRecorder:
    """Implements `bridle.model.recorder.Recorder`. `num_replays` counts the repeated recordings."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, work: Work) -> Work:
        tape = Tape.current = Tape()
        try:
            with tape:
                work()
        finally:
            Tape.current = None

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return replay

    def close(self) -> None:
        """Free nothing, as a tape holds no device memory."""


class TapedKernels:
    """A fake module of Triton kernels that runs launches, and records them while a tape records."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _Launcher(getattr(self._module, name))


class _Launcher:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            def work() -> None:
                self._kernel[grid](*args, **kwargs)

            work() if Tape.current is None else Tape.current.note(work)

        return launch
