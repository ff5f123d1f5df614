"""The attention handler of the current forward pass. Models of transformers call a registered attention function. A
model cannot pass the step's data to this function, because several models drop unknown keyword arguments. The caller of
a forward pass therefore sets a handler with the step's data, and the registered function calls this handler. Each
thread has its own handler, because each loaded model has its own engine thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from bridle.errors import InternalError


class AttentionOptions(NamedTuple):
    """Attention options of one layer. `window` is the sliding window's size, including the token itself. `softcap`
    bounds scores by tanh. `sinks` [Hq] are the scores of an additional key without a value."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionHandler(Protocol):
    """Computes attention for the models of transformers. `query` is [T, Hq, D], `key` [T, Hkv, D], `value` [T, Hkv,
    Dv], all for the new tokens only; the result is [T, Hq, Dv]. `extra` holds the other keyword arguments from the
    model."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        extra: dict[str, Any],
    ) -> Tensor:
        raise NotImplementedError


class _Slot(threading.local):
    handler: AttentionHandler | None = None


_slot = _Slot()


@contextmanager
def attention_handler(handler: AttentionHandler) -> Iterator[None]:
    """Use `handler` for the attention calls of this thread inside the block."""
    previous, _slot.handler = _slot.handler, handler
    try:
        yield
    finally:
        _slot.handler = previous


def handler_or_none() -> AttentionHandler | None:
    """Return the attention handler of this thread's current forward pass, or None outside of a pass."""
    return _slot.handler


def current_handler() -> AttentionHandler:
    """Return the attention handler of this thread's current forward pass. Raises `InternalError` outside of a pass."""
    handler = _slot.handler
    if handler is None:
        raise InternalError("a model that bridle loaded was called outside of an engine step")
    return handler
