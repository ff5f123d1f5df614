"""Runs recurrent layers of transformers over packed steps, in which each row uses the state of its own sequence. The
mixers of transformers (gated delta nets, state space layers, short convolutions) get their states from a cache object.
If `packed_mixer` supports a mixer's recurrence, the mixer is wrapped, and computes a whole step in one call. A state
depends only on the sequence's tokens, not on the chunking of the prompt or on which tokens were draft tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from bridle.model.forward_context import handler_or_none
from bridle.model.packed_mixer import PackedMixer, packed_forward
from bridle.model.state_pool import Span

_CACHES = ("cache_params", "past_key_values")


@runtime_checkable
class StateHandler(Protocol):
    """An attention handler that also stores recurrent states."""

    def spans(self, layer: int, num_tokens: int) -> list[Span]:
        """Return the packed tokens of the pass as spans in order, with the states of their sequences in a layer. A
        sequence may have several spans. A span's state must therefore be written before the next span is read."""
        ...


def wrap_mixers(model: nn.Module) -> int:
    """Wrap the mixers of a model whose recurrence `packed_mixer` supports. Return the number of these mixers."""
    count = 0
    for module in model.modules():
        forward = packed_forward(module) if keeps_states(module) else None
        if forward is not None:
            count += 1
            if "forward" not in vars(module):
                _use_configured_limit(module)
                vars(module)["forward"] = StateMixer(module, forward).forward
    return count


def _use_configured_limit(module: Any) -> None:
    """Set the bounds of the mixers' time steps to those in the configuration. The mixer of one family raises the lower
    bound when it computes several tokens at once. Its results would then depend on the number of tokens, and the model
    was trained without this bound."""
    limit = getattr(getattr(module, "config", None), "time_step_limit", None)
    if limit is not None and hasattr(module, "time_step_limit"):
        module.time_step_limit = tuple(limit)


def keeps_states(module: nn.Module) -> bool:
    """Return whether a module is a recurrent layer, whose forward function has a cache argument."""
    parameters = inspect.signature(type(module).forward).parameters
    return isinstance(getattr(module, "layer_idx", None), int) and not parameters.keys().isdisjoint(_CACHES)


class StateMixer:
    """Replaces the `forward` function of a mixer. Outside of packed steps, the mixer's original function is called."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._compute = module.forward
        names = list(inspect.signature(module.forward).parameters)
        self._input, self._cache = names[0], next(name for name in _CACHES if name in names)
        self._layer: int = module.layer_idx  # type: ignore[assignment]
        self._packed = PackedMixer(module, self._layer, forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mixer's outputs [1, T, hidden] for inputs [1, T, hidden]."""
        handler: object = handler_or_none()
        if not isinstance(handler, StateHandler):
            return self._compute(*args, **kwargs)
        rows: Tensor = args[0] if args else kwargs[self._input]
        return self._packed(handler.spans(self._layer, rows.shape[1]), self._cache, **{self._input: rows})
