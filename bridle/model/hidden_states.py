"""The hidden states of a text, recorded as they enter the model's head, which turns them into logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class HeadInput:
    """Records the inputs of a model's head. `size` is their length; 0 if the library does not say which module the head
    is."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: Tensor | None = None
        head = _head_of(model)
        self.size = 0 if head is None else _size_of(model, head)
        if self.size:
            assert head is not None
            head.register_forward_pre_hook(self._see)

    def _see(self, _head: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen = inputs[0]

    def rows(self, logits_rows: Tensor) -> Tensor | None:
        """The hidden states [R, hidden] of the last pass for the rows that give logits, also where the head saw all T
        positions. None if there are none."""
        seen, self._seen = self._seen, None
        if seen is None:
            return None
        flat = seen.reshape(-1, seen.shape[-1])
        return flat if flat.shape[0] == logits_rows.shape[0] else flat.index_select(0, logits_rows)


def _head_of(model: nn.Module) -> nn.Module | None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None


def _size_of(model: nn.Module, head: nn.Module) -> int:
    size = getattr(head, "in_features", None) or getattr(getattr(model, "config", None), "hidden_size", 0)
    return int(size or 0)
