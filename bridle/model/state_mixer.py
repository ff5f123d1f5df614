"""Recurrent layers of the library, computed over packed steps: each row with the state of its own sequence.

The library's mixers (gated delta nets, state space layers, short convolutions) ask a cache for their states by a few
methods. A mixer that does so is wrapped. Those with short convolutions or gated delta rules compute a step at once, as
`packed_mixer` says. Any other one is called token by token, each time with the state of that token's sequence. Either
way a state depends on tokens alone, and not on how a prompt was cut or on which tokens were drafts. What does not
depend on the state is computed for all tokens at once, where mixers are called token by token too: each linear layer
that gets the mixer's input, or what another such layer has made of it, and the linear layer that gives its output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bridle.errors import InternalError
from bridle.model.forward_context import handler_or_none
from bridle.model.packed_mixer import PackedStates, packed_forward
from bridle.model.state_pool import Span

_PROTOCOL = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHES = ("cache_params", "past_key_values")


@runtime_checkable
class StateHandler(Protocol):
    """A handler of forward passes that also keeps recurrent states."""

    def spans(self, layer: int, num_tokens: int) -> list[Span]:
        """The packed tokens of the pass in order, with their states in a layer. A span of a sequence may follow another
        one of it, so each is read and written before the next."""
        ...


def wrap_mixers(model: nn.Module) -> int:
    """Wrap all mixers of a model that keep their states in a cache. Returns how many there are."""
    mixers = [module for module in model.modules() if _keeps_states(module)]
    for module in mixers:
        if "forward" not in vars(module):
            _use_configured_limit(module)
            vars(module)["forward"] = StateMixer(module).forward
    return len(mixers)


def layers_by_token(model: nn.Module) -> set[str]:
    """The names of the linear layers of wrapped mixers that compute one token at a time, and not those of a step."""
    names = set()
    for name, module in model.named_modules():
        mixer = getattr(vars(module).get("forward"), "__self__", None)
        if isinstance(mixer, StateMixer):
            names |= {f"{name}.{layer}" for layer in mixer.by_token}
    return names


def _use_configured_limit(module: Any) -> None:
    """Bound time steps as the configuration says. One family's mixer raises the lower bound, but only where it computes
    several tokens at once, so its results would depend on that; it was trained without."""
    limit = getattr(getattr(module, "config", None), "time_step_limit", None)
    if limit is not None and hasattr(module, "time_step_limit"):
        module.time_step_limit = tuple(limit)


def _keeps_states(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    if inspect.signature(type(module).forward).parameters.keys().isdisjoint(_CACHES):
        return False
    functions = (
        inspect.unwrap(value) for kind in type(module).__mro__ for value in vars(kind).values() if callable(value)
    )
    return any(_PROTOCOL & {*function.__code__.co_names} for function in functions if hasattr(function, "__code__"))


class StateMixer:
    """Computes in the place of a mixer's `forward`. Outside of packed steps the mixer computes as ever."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layer: int = module.layer_idx  # type: ignore[assignment]
        self._compute = module.forward
        names = list(inspect.signature(module.forward).parameters)
        self._input, self._cache = names[0], next(name for name in _CACHES if name in names)
        self._packed = packed_forward(module)
        self._last: str | None = None  # the name of the linear layer that gives the output, once known
        self.by_token: Set[str] = frozenset()  # linear layers that compute each token alone

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mixer's outputs [1, T, hidden] for inputs [1, T, hidden]."""
        handler: object = handler_or_none()
        if not isinstance(handler, StateHandler):
            return self._compute(*args, **kwargs)
        rows: Tensor = args[0] if args else kwargs[self._input]
        spans = handler.spans(self.layer, rows.shape[1])
        if self._packed is not None:
            states = PackedStates(self.layer, spans)
            return states.compute(self._packed, self.module, **{self._input: rows, self._cache: states})
        return self._by_token(rows, spans)

    def _by_token(self, rows: Tensor, spans: list[Span]) -> Tensor:
        with _hoisted(self.module, rows, self._last) as hoisted:
            outputs = [output for span in spans for output in self._steps(hoisted, span)]
        if self._last is None:
            self._last = hoisted.name_of(outputs[-1])
            self.by_token = hoisted.by_token - {self._last}
            return torch.cat(outputs, 1)
        return hoisted.finish()

    def _steps(self, hoisted: _Hoisted, span: Span) -> Iterator[Tensor]:
        for states, is_last in span.by_token():
            output: Tensor = self._compute(**{self._input: hoisted.begin(), self._cache: states})
            hoisted.end(output)
            if is_last:
                span.went_in("conv")
                span.went_in("recurrent")
            yield output


class _Hoisted:
    """The linear layers of a mixer during one pass over `rows` [1, T, hidden]."""

    def __init__(self, rows: Tensor, last: str | None) -> None:
        self._rows, self._last = rows, last
        self._number = -1  # of the token under way
        #: Of the token under way: slices by address, with the tensors of all tokens that they are from.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self._products: dict[tuple[str, int], Tensor] = {}
        self._given: dict[str, Tensor] = {}  # the latest output of each layer
        self._inputs: list[Tensor] = []  # of the last layer
        self._computes: dict[str, Callable[[Tensor], Tensor]] = {}
        self._placeholder: Tensor | None = None

    def put_in(self, name: str, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what computes in the place of a linear layer."""
        self._computes[name] = compute
        if name == self._last:
            return self._defer
        return lambda rows: self._product(name, rows)

    def begin(self) -> Tensor:
        """Return the mixer's input of the next token, [1, 1, hidden]."""
        self._number += 1
        row = self._rows.narrow(1, self._number, 1)
        self._known = {row.data_ptr(): (row, self._rows)}
        return row

    def end(self, output: Tensor) -> None:
        """Check the output of one token."""
        if self._last is not None and output is not self._placeholder:
            raise InternalError(f"a recurrent layer does not end with {self._last!r}, as it did when it was tried")

    def name_of(self, output: Tensor) -> str | None:
        """Return the name of the layer whose output this is; None if it is of none, or of one for all tokens."""
        return next((name for name, given in self._given.items() if given is output), None)

    @property
    def by_token(self) -> set[str]:
        """The names of the layers that did not compute all tokens at once."""
        return self._computes.keys() - {name for name, _ in self._products}

    def finish(self) -> Tensor:
        """Return the mixer's outputs [1, T, hidden]."""
        assert self._last is not None
        return self._computes[self._last](torch.cat(self._inputs, 1))

    def _product(self, name: str, rows: Tensor) -> Tensor:
        part, whole = self._known.get(rows.data_ptr(), (None, None))
        if part is None or whole is None or part.shape != rows.shape or part.stride() != rows.stride():
            given = self._computes[name](rows)
            self._given[name] = given
            return given
        key = name, id(whole)
        if key not in self._products:
            self._products[key] = self._computes[name](whole)
        product = self._products[key]
        given = product.narrow(1, self._number, 1)
        self._known[given.data_ptr()] = given, product
        return given

    def _defer(self, rows: Tensor) -> Tensor:
        self._inputs.append(rows)
        if self._placeholder is None:  # of the right shape; its numbers are never read
            self._placeholder = torch.empty_like(self._rows.narrow(1, 0, 1))
        return self._placeholder


@contextmanager
def _hoisted(module: nn.Module, rows: Tensor, last: str | None) -> Iterator[_Hoisted]:
    """Let the linear layers of a mixer compute all tokens of `rows` at once inside the block, where they can."""
    hoisted = _Hoisted(rows, last)
    layers = [(name, layer, vars(layer).get("forward")) for name, layer in _linears(module)]
    for name, layer, _ in layers:
        vars(layer)["forward"] = hoisted.put_in(name, layer.forward)
    try:
        yield hoisted
    finally:
        for _, layer, before in layers:
            if before is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = before


def _linears(module: nn.Module) -> Sequence[tuple[str, nn.Module]]:
    from bridle.model.lora_layers import LINEARS

    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, LINEARS)]
