"""Records the operations of a device without a device: torch code runs over tensors that only have shapes (torch's
device `meta`).

Each launch, upload and wait for the device is recorded with the line of bridle's code that caused it. A launch is one
operation on device tensors, neither a view nor an allocation, so it needs at least one kernel. An upload from pinned
memory is *quick* if the host does not wait for it, and so is a download to pinned memory. A wait is an operation for
which the host needs a value from the device or waits for an event."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves

from tests.sources import ROOT

META = torch.device("meta")
PACKAGE = str(ROOT / "bridle")

#: Operations that move no number.
_FREE = """
    _has_same_storage_numel _reshape_alias _unsafe_view alias as_strided chunk contiguous detach device
    diagonal empty empty_like empty_strided expand expand_as flatten is_pinned is_same_size lift_fresh
    movedim mT narrow new_empty new_empty_strided permute resize_ resolve_conj resolve_neg select set_
    slice split split_with_sizes squeeze squeeze_ sym_size sym_stride t transpose type_as unbind unfold
    unsqueeze unsqueeze_ unsafe_chunk unsafe_split view view_as
"""
FREE = frozenset(_FREE.split())


def _site() -> str:
    """Return the innermost line of bridle's package that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.endswith("/uploads.py"):
            return f"bridle{name.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class DeviceTrace:
    """Counts launches, uploads and waits, each by kind and line. Memory that one trace saw pinned counts as pinned in
    all later traces."""

    _pinned: ClassVar[set[int]] = set()
    _held: ClassVar[list[Tensor]] = []  # so that no pinned memory is used again

    def __init__(self) -> None:
        self.launches: Counter[tuple[str, str]] = Counter()
        self.uploads: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.downloads: Counter[tuple[str, str]] = Counter()  # quick ones
        self.is_on = True

    # -- noting ----------------------------------------------------------------------------------------------------

    def launch(self, what: str, number: int = 1) -> None:
        if self.is_on:
            self.launches[what, _site()] += number

    def wait(self, what: str) -> None:
        if self.is_on:
            self.waits[what, _site()] += 1

    def upload(self, source: object, is_quick: bool) -> None:
        how = "quick" if is_quick and self._is_pinned(source) else "slow"
        if self.is_on:
            self.uploads[how, _site()] += 1

    def download(self, target: object, is_quick: bool) -> None:
        if not is_quick or not self._is_pinned(target):
            self.wait("copy_")
        elif self.is_on:
            self.downloads["quick", _site()] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(_memory(tensor))
        self._held.append(tensor)
        return tensor

    def _is_pinned(self, tensor: object) -> bool:
        """Return whether a tensor is in pinned memory."""
        return isinstance(tensor, Tensor) and _memory(tensor) in self._pinned

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.is_on, before = False, self.is_on
        try:
            yield
        finally:
            self.is_on = before

    # -- judging ---------------------------------------------------------------------------------------------------

    def check(self, *, launches: int, quick: int = 1, slow: int = 0, waits: int = 0, downloads: int = 0) -> None:
        """Check that the trace has no more operations than these numbers. A failure names every line that caused an
        operation."""
        slowly = Counter({key: count for key, count in self.uploads.items() if key[0] == "slow"})
        quickly = self.uploads - slowly
        found = {"launches": self.launches, "quick uploads": quickly, "slow uploads": slowly, "waits": self.waits}
        found["downloads"] = self.downloads
        for (what, counts), limit in zip(found.items(), (launches, quick, slow, waits, downloads), strict=True):
            if counts.total() > limit:
                raise AssertionError(f"{counts.total()} {what}, {limit} are allowed:\n{_listed(counts)}")

    def __str__(self) -> str:
        return "\n".join(
            f"{what}: {counts.total()}\n{_listed(counts)}"
            for what, counts in (("launches", self.launches), ("uploads", self.uploads), ("waits", self.waits))
        )


def _listed(counts: Counter[tuple[str, str]]) -> str:
    return "\n".join(f"  {count:4} {what:20} {site}" for (what, site), count in counts.most_common())


@contextmanager
def traced() -> Iterator[DeviceTrace]:
    """Record the device operations inside the `with` block."""
    trace = DeviceTrace()
    streams = _Streams(trace)
    fakes = {
        "device": _no_context,
        "stream": _no_context,
        "Stream": streams,
        "current_stream": streams,
        "Event": streams,
    }
    with _Functions(trace), _Operations(trace), patch.multiple("torch.cuda", **fakes):
        yield trace


@contextmanager
def _no_context(_device: object) -> Iterator[None]:
    yield


class _Streams:
    """Fake streams and events, of which only `synchronize` makes the host wait."""

    def __init__(self, trace: DeviceTrace) -> None:
        self._trace = trace

    def __call__(self, _device: object = None) -> _Streams:
        return self

    def record(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def wait_stream(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._trace.wait("event")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _zeros(shape: Sequence[int]) -> Any:
    """Return zeros in a tensor's shape as a list, in place of `tolist`, which needs values."""
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


class _Functions(TorchFunctionMode):
    """A mode of torch that records Python calls: those that read a value without an operation, and those that pin
    memory."""

    def __init__(self, trace: DeviceTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, trace = getattr(func, "__name__", ""), self._trace
        if name in ("tensor", "as_tensor", "new_tensor") and (
            torch.device(kwargs.get("device") or "cpu").type == "meta" or any(map(is_device, args))
        ):
            trace.upload(None, False)
            with trace.paused():
                return func(*args, **kwargs)
        if name == "pin_memory":
            return trace.pin(args[0].clone())
        if name == "empty" and kwargs.get("pin_memory"):
            return trace.pin(torch.zeros(*args, **{key: kwargs[key] for key in kwargs if key != "pin_memory"}))
        if name in ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__", "__len__"):
            return self._number(name, func, args, kwargs)
        if name == "__setitem__" and is_device(args[0]):
            return self._set(*args)
        return func(*args, **kwargs)

    def _number(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if name == "__len__" or not is_device(tensor):
            return func(*args, **kwargs)
        self._trace.wait(name)
        if name in ("numpy", "cpu"):
            zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
            return zeros if name == "cpu" else zeros.numpy()
        return {"tolist": _zeros, "__bool__": lambda _: False, "__float__": lambda _: 0.0}.get(name, lambda _: 0)(
            tuple(tensor.shape)
        )

    def _set(self, target: Tensor, index: Any, value: Any) -> None:
        indices = index if isinstance(index, tuple) else (index,)
        if any(isinstance(each, Tensor) and each.dtype is torch.bool for each in indices):
            self._trace.wait("set by booleans")
        if any(isinstance(each, list) for each in indices):
            self._trace.upload(None, False)
        self._trace.launch("set")


class _Operations(TorchDispatchMode):
    """A mode of torch that records operations on the device."""

    def __init__(self, trace: DeviceTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, trace = func.overloadpacket.__name__, self._trace
        is_asked = any(map(is_device, arg_tree_leaves(*args, **kwargs)))
        if name in ("_to_copy", "to", "copy_") and (moved := self._move(func, name, args, kwargs)) is not None:
            return moved
        if is_asked and name in ("nonzero", "masked_select"):
            trace.wait(name)
            trace.launch(name, 3)
            return args[0].new_empty((1, args[0].dim()), dtype=torch.int64)
        if is_asked and name in ("index", "index_put_", "index_put", "_index_put_impl_"):
            return self._index(func, name, args, kwargs)
        if func.namespace == "aten" and func._can_decompose():
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        if name not in FREE and (is_asked or any(map(is_device, tree_leaves(made)))):
            trace.launch(name)
        return made

    def _move(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Record a copy between host and device."""
        if name == "copy_":
            source, target = args[1], args[0].device.type
        else:
            source = args[0]
            device = kwargs.get("device")
            target = source.device.type if device is None else torch.device(device).type
        if (source.device.type == "meta") == (target == "meta"):
            return None
        if target == "meta":
            is_quick = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            self._trace.upload(source, bool(is_quick))
            return args[0] if name == "copy_" else func(*args, **kwargs)
        if name == "copy_":
            self._trace.download(args[0], bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2])))
            return args[0]
        self._trace.wait(name)
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def _index(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensor, indices = args[0], [each for each in args[1] if each is not None]
        if any(each.dtype is torch.bool for each in indices):
            self._trace.wait(f"{name} by booleans")
            self._trace.launch(name, 4)
            return tensor if "put" in name else tensor.new_empty((1, *tensor.shape[indices[0].dim() :]))
        if any(not is_device(each) and each.dim() for each in indices):
            self._trace.upload(None, False)
        self._trace.launch(name)
        return tensor if "put" in name else func(*args, **kwargs)


class LaunchKeys:
    """The variants for which Triton compiles kernels: the kernel of each launch, with the kinds of its arguments.

    Signatures are read from the sources of `modules`, so Triton need not be installed."""

    def __init__(self, *modules: str) -> None:
        self._kernels: dict[str, tuple[dict[str, bool], set[str]]] = {}  # arguments, and those of no kind
        self.found: list[tuple[object, ...]] = []
        for module in modules:
            path = ROOT / "bridle" / f"{module.replace('.', '/')}.py"
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef):
                    self._kernels[node.name] = _signature(node)

    def arg_names(self, name: str) -> tuple[str, ...]:
        return tuple(self._kernels[name][0])

    def launch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names, unkinded = self._kernels[name]
        given = dict(zip(names, args, strict=False)) | kwargs
        kinds = [
            (each, value if names.get(each, True) else _kind(value, each in unkinded)) for each, value in given.items()
        ]
        self.found.append((name, *sorted(kinds)))


def _signature(node: ast.FunctionDef) -> tuple[dict[str, bool], set[str]]:
    names = {arg.arg: ast.unparse(arg.annotation or ast.Constant(0)) == "tl.constexpr" for arg in node.args.args}
    keywords = [word for each in node.decorator_list if isinstance(each, ast.Call) for word in each.keywords]
    unkinded = {name for word in keywords if word.arg == "do_not_specialize" for name in ast.literal_eval(word.value)}
    return names, unkinded


def _kind(value: Any, is_unkinded: bool) -> object:
    """Return an argument's kind, which decides whether Triton compiles again: its type, its alignment, and whether it
    is 1."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.storage_offset() * value.element_size() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool) and not is_unkinded:
        return "1" if value == 1 else "int", value % 16 == 0
    return type(value).__name__


class Counted:
    """A fake module of Triton kernels that counts launches and runs nothing."""

    def __init__(self, trace: DeviceTrace, keys: LaunchKeys | None = None) -> None:
        self._trace, self._keys = trace, keys

    def __getattr__(self, name: str) -> Any:
        trace, keys = self._trace, self._keys

        class Launcher:
            arg_names = () if keys is None else keys.arg_names(name)  # of kernels that take theirs by name

            def __getitem__(self, _grid: object) -> Any:
                def launch(*args: Any, **kwargs: Any) -> None:
                    trace.launch(name)
                    if keys is not None:
                        keys.launch(name, args, kwargs)

                return launch

        return Launcher()
