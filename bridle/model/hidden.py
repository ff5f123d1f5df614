"""What a model of the library has made of a text before its head turns it into logits: taken as it goes in."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class HeadInput:
    """Sees what goes into a model's head. `size` is its length, 0 where the library does not say which part the head
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
        """Those of the last pass that give logits [R, hidden]; a head that saw all T positions shows only these."""
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
