"""What the registered attention function does during the forward pass at hand.

Models of the library call one function by name and give it nothing of ours, and several drop unknown keywords on
the way. So the step's data travels beside the call: whoever runs a forward pass sets a handler around it. The slot
is per thread, since each loaded model has an engine thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from bridle.errors import InternalError


class AttentionOptions(NamedTuple):
    """How one layer attends. `window` counts the own token; `softcap` bounds scores by tanh; `sinks` `[Hq]` are
    scores of a key without value."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionHandler(Protocol):
    """Stands in for attention. `query` is [T, Hq, D], `key` [T, Hkv, D], `value` [T, Hkv, Dv], all for the new
    tokens only; the result is [T, Hq, Dv]. `extra` holds what else the model handed over."""

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
    """Let `handler` answer the attention calls that this thread makes inside the block."""
    previous, _slot.handler = _slot.handler, handler
    try:
        yield
    finally:
        _slot.handler = previous


def current_handler() -> AttentionHandler:
    """The handler in force. Raises `InternalError` outside of a step."""
    handler = _slot.handler
    if handler is None:
        raise InternalError("a model loaded by bridle was called outside of a step")
    return handler
