"""Asynchronous sampling: the device samples while the host does other work. A plan may contain a token that is still
being sampled. Until the token is received, the executor's copy of the sequence holds a placeholder. On the device, the
sampler's output replaces the placeholder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bridle.engine.scheduling.step_plan import PlanRow, StepResult, placeholder_for_row
from bridle.errors import InternalError
from bridle.model.h2d_copies import upload_list
from bridle.model.sequence_state import CachedRequestState

#: Seconds between two checks for the end of a forward pass that is awaited.
_LOOK = 1e-4


class AsyncSampling:
    """The latest sampling of an executor, in progress or complete. A sampling in progress is a *drawing*, whose
    `take()` waits for the sampled tokens. If the drawing has a tensor `tokens` [rows] on the device, a later forward
    pass can read the sampled tokens without waiting. Otherwise, the host first waits for the sampled tokens."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._drawing: Any = None
        self._result: StepResult | None = None  # placeholders: sequence, position
        self._named: list[tuple[CachedRequestState, int]] = []  # where names stand, by their mirrors' positions
        self._event: torch.cuda.Event | None = None  # the end of the last forward

    def reset(self) -> None:
        """Forget the sampled tokens."""
        self._drawing = self._result = self._event = None
        self._named = []

    # -- drawing -------------------------------------------------------------------------------------------

    def start(self, drawing: Any) -> None:
        """Record a sampling in progress (a drawing), or the result of a complete sampling."""
        if self._drawing is not None or self._result is not None:
            raise InternalError("sampling was started before the last sampled tokens were read")
        if isinstance(drawing, StepResult):
            self._result = drawing
        else:
            self._drawing = drawing

    def take(self) -> StepResult:
        """Wait for the sampled tokens, and put them in the place of the placeholders."""
        result = self._wait()
        for mirror, position in self._named:
            if position < len(mirror.tokens) and mirror.tokens[position] < 0:
                mirror.tokens[position] = _computed(result.tokens[placeholder_for_row(mirror.tokens[position])])
        self._drawing, self._result, self._named = None, None, []
        return result

    def _wait(self) -> StepResult:
        if self._result is None:
            if self._drawing is None:
                raise InternalError("sampled tokens were requested, but no sampling was started")
            self._result = self._drawing.take()
        return self._result

    # -- naming --------------------------------------------------------------------------------------------

    def note_names(self, rows: Sequence[PlanRow], mirrors: Sequence[CachedRequestState]) -> bool:
        """Remember which of the executor's sequences end in a placeholder; return whether any sequence does. `mirrors`
        are the executor's copies of the sequences."""
        named = [
            (mirror, len(mirror.tokens) - 1)
            for row, mirror in zip(rows, mirrors, strict=True)
            if row.new_tokens and row.new_tokens[-1] < 0
        ]
        self._named += named
        return bool(named)

    def fill(self, ids: Tensor) -> Tensor:
        """Return the token ids, of any shape, with placeholders replaced by the sampled tokens. The id is 0 if no token
        could be sampled."""
        tokens = getattr(self._drawing, "tokens", None)
        if tokens is None:
            drawn = [_computed(token) for token in self._wait().tokens]
            tokens = upload_list(drawn, ids.dtype, ids.device)
        rows = placeholder_for_row(ids).clamp_min(0)  # type: ignore[arg-type,attr-defined]  # the same arithmetic, on a tensor
        return torch.where(ids < 0, tokens.to(ids.dtype)[rows].clamp_min(0), ids)

    # -- waiting for the forward ---------------------------------------------------------------------------

    def mark_forward(self) -> None:
        """Record that a forward pass was launched."""
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(self._device))

    def await_forward(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the last forward pass; return whether it has ended."""
        until = time.monotonic() + seconds
        while self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK)
        return True


def _computed(token: int) -> int:
    """Return the token id to compute for a sampled token; 0 for -1, which means that no token could be sampled."""
    return max(token, 0)
