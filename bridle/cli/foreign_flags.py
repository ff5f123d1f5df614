"""Translates flags of other servers on the command line of `bridle serve`, because users of these servers type them
first.

A flag that has an equivalent in bridle is replaced. A flag without an equivalent is refused, and the error says what to
use instead. `bridle.compat.cli_flags` has the tables, and docs/coming-from.md shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bridle.compat.cli_flags import MODEL, TAKEN, Flag, rows_of
from bridle.compat.suggestions import nearest

#: Flags whose value may look like another server's flag.
_OPAQUE = ("-A", "--aici-rtarg")


def in_our_words(words: Sequence[str]) -> list[str]:
    """Return the arguments of `bridle serve` with bridle's own flags in place of other servers' flags."""
    rest, found = list(words), list[str]()
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*found, word, *rest]
        row = TAKEN.get(_plain(word))
        if row is not None and (row.here != MODEL or "=" in word or _values(rest[:1])):
            found += _here(row, word, rest)
            continue
        found.append(word)
        if word in _OPAQUE and rest:
            found.append(rest.pop(0))
    return found


def _here(row: Flag, word: str, rest: list[str]) -> Iterator[str]:
    """Yield bridle's flags for another server's flag. The flag's values are removed from `rest`, which has the words
    after the flag."""
    _, has_value, value = word.partition("=")
    if row.here == MODEL:
        yield from [value] if has_value else _values(rest, 1)
    else:
        yield from [f"{row.here}={value}"] if has_value else row.here.split()
    if row.further:
        if not has_value:
            yield from _values(rest, 1)
        yield from (f"{row.further}={each}" for each in _values(rest))


def _values(rest: list[str], at_most: int | None = None) -> list[str]:
    """Remove and return the words that precede the next flag, at most `at_most` words."""
    count = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    count = count if at_most is None else min(count, at_most)
    taken = rest[:count]
    del rest[:count]
    return taken


def advice(flag: str, own: Iterable[str] = ()) -> str | None:
    """Return the flag to use instead of another server's flag; None if no supported server has the flag. `--flag=value`
    and `--a_b` are recognized, too. A name that resembles a flag in `own` counts as a misspelling of that flag, not as
    a flag of another server's family.
    """
    rows = rows_of(_plain(flag))
    if not rows or (rows[0].is_family and nearest(_plain(flag), own) is not None):
        return None
    told: dict[str, list[str]] = {}
    for row in rows:
        told.setdefault(_told(row), []).extend(row.systems)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{' and '.join(systems)}: {text}" for text, systems in told.items())


def meant_elsewhere(words: Sequence[str], message: str) -> Iterator[str]:
    """Yield notes about flags in `words` that the error `message` names and that mean something else in another
    server."""
    for name in dict.fromkeys(map(_plain, words)):
        if name.startswith("--") and name[2:].replace("-", "_") in message:
            rows = [row for row in rows_of(name) if not row.here and not row.is_family]
            yield from (f"{' and '.join(row.systems)}'s {name} has another meaning: {row.why}" for row in rows)


def _told(row: Flag) -> str:
    if row.here == MODEL:
        return "the model needs no flag: `bridle serve MODEL`"
    told = row.here or row.why
    return f"here it is {told}" if told.startswith("--") else told


def _plain(word: str) -> str:
    """Return a flag's name as the tables spell it."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name
