"""Keywords of a call: sampling parameters, constraints, run options, or unknown ones.

Besides its own arguments, a call accepts the fields of `SamplingParams` and the names of constraints. A call also
accepts the names that other systems use for these fields. Any other keyword raises an error that names the most similar
keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from bridle.compat.request_fields import BY_NAME
from bridle.compat.suggestions import nearest
from bridle.compat.vllm_calls import of_keyword
from bridle.errors import InvalidRequest, UnknownKeyword
from bridle.llm import arguments
from bridle.llm.options import RunOptions, Sampling
from bridle.sampling import SamplingParams
from bridle.structured_output.request_fields import NAMES, constraint_named

P = ParamSpec("P")
T = TypeVar("T")

_SAMPLING = frozenset(each.name for each in fields(SamplingParams))
_HOW = frozenset(RunOptions.__annotations__)
#: Keywords of a call that samples nothing.
_RUNS = frozenset({"adapter", "timeout", "priority", "deadline", "tenant"})
#: Minimum similarity of a name to a known one for which the error suggests the known name.
_ALIKE = 0.7


def settle(
    call: str, sampling: Sampling, default: SamplingParams, given: Mapping[str, Any], own: Iterable[str] = ()
) -> tuple[SamplingParams | Sequence[SamplingParams], RunOptions]:
    """Return the sampling parameters and the run options in the keywords of `call`. If the keywords contain no sampling
    parameters, `default` is returned. `own` are further arguments that the call accepts. Raises `UnknownKeyword`, and
    `InvalidRequest` for values that contradict each other."""
    known = _SAMPLING | _HOW | {*NAMES, *own}
    named = _named(call, given, known)
    changes = {name: value for name, value in named.items() if name in _SAMPLING}
    how: Any = {name: value for name, value in named.items() if name in _HOW}
    short = {name: value for name, value in named.items() if name in NAMES and name not in _HOW and value is not None}
    if short:
        if how.get("constraint") is not None:
            raise InvalidRequest(
                f"constraint and {next(iter(short))} were both given; give only one constraint", "constraint"
            )
        how["constraint"] = constraint_named(short)
    wanted = default if sampling is None else sampling
    return (_changed(wanted, changes) if changes else wanted), how


def settle_runs(call: str, given: Mapping[str, Any], own: Iterable[str] = ()) -> RunOptions:
    """Return the run options of a call that samples nothing."""
    for name in given:
        meant = BY_NAME[name].here if name in BY_NAME else name
        if name not in _RUNS and (meant in _SAMPLING or meant in NAMES or meant in _HOW):
            raise UnknownKeyword(f"{call}() samples no tokens, so {name!r} has no effect; leave it out", name)
    how: Any = _named(call, given, _RUNS | {*own})
    return cast(RunOptions, how)


class _Unset:
    """Default value of keywords in displayed signatures. This default value means that the value of an omitted keyword
    is determined later."""

    def __repr__(self) -> str:
        return "..."


_UNSET = _Unset()


def takes(options: type[Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Give a method a signature that lists the keywords of the typed dictionary `options`. The method also accepts the
    names that other systems use for these keywords. An unknown name raises `UnknownKeyword`, which suggests the most
    similar name."""

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(call)
        *own, _ = signature.parameters.values()
        shown = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_UNSET, annotation=kind.__forward_arg__)
            for name, kind in options.__annotations__.items()
        ]
        known = frozenset(each.name for each in (*own, *shown))

        @wraps(call)
        def translating(*args: P.args, **given: P.kwargs) -> T:
            named: Any = given if given.keys() <= known else _named(call.__name__, given, known)
            return call(*args, **named)

        method: Any = call if inspect.iscoroutinefunction(call) else translating  # the awaited method translates names
        method.__signature__ = signature.replace(parameters=[*own, *shown])
        typed: Callable[P, T] = method
        return typed

    return decorate


def check_names(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UnknownKeyword` for unknown keywords."""
    _named(call, dict.fromkeys(given), frozenset(known))


def _named(call: str, given: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return the keywords renamed to bridle's names."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        row = BY_NAME.get(name)
        here = name if name in known or row is None else row.here
        if here not in known:
            raise _unknown(call, name, known)
        if here in found:
            raise InvalidRequest(
                f"{here} was given twice, also as {name}" if here != name else f"{name} was given twice"
            )
        found[here] = value if here == name or row is None else row.value_here(value)
    return found


_BEAMS = "LLM.beam_search searches beams"
#: Keywords of other systems for which bridle has separate methods.
_CALLS_OF_THEIR_OWN = {
    "use_beam_search": _BEAMS,
    "num_beams": _BEAMS,
    "length_penalty": _BEAMS,
    "do_sample": "`temperature` 0 is greedy, any other draws",
}


def _unknown(call: str, name: str, known: frozenset[str]) -> UnknownKeyword:
    row = BY_NAME.get(name)
    why = _CALLS_OF_THEIR_OWN.get(name) or of_keyword(name) or (row.why if row is not None else "")
    if why:
        return UnknownKeyword(f"{call}() has no keyword {name!r}: {why}", name)
    meant = nearest(name, known, _ALIKE)
    return UnknownKeyword(
        f"{call}() has no keyword {name!r}" + (f"; did you mean {meant!r}?" if meant is not None else ""), name
    )


def _changed(
    sampling: SamplingParams | Sequence[SamplingParams], changes: Mapping[str, Any]
) -> SamplingParams | Sequence[SamplingParams]:
    if isinstance(sampling, (list, tuple)):
        return [arguments.as_sampling(each).with_(**changes) for each in sampling]
    return arguments.as_sampling(sampling).with_(**changes)
