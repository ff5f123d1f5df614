"""Tables of other servers' flags, each with the corresponding flag of `bridle serve`.

Three names give access to the rows of the tables. `spellings` returns a flag's alternative names. `TAKEN` has the flags
that bridle replaces by its own flags. `rows_of` returns the rows of a flag name. The page docs/coming-from.md shows the
tables.
"""

from __future__ import annotations

from bridle.compat.cli_flags.llama_cpp import LLAMA_CPP
from bridle.compat.cli_flags.schema import MODEL, Flag
from bridle.compat.cli_flags.sglang import SGLANG
from bridle.compat.cli_flags.shared import SHARED
from bridle.compat.cli_flags.tgi import LMQL, TGI
from bridle.compat.cli_flags.vllm import VLLM
from bridle.compat.schema import System

FLAGS: tuple[Flag, ...] = (*SHARED, *VLLM, *SGLANG, *LLAMA_CPP, *TGI)
#: The flags of other servers for `bridle serve-model`.
SERVE_MODEL = LMQL


def spellings(flag: str) -> list[str]:
    """Return all names that commands accept for a flag of bridle: bridle's name, then names in other servers."""
    return [flag, *(row.name for row in FLAGS if row.is_shown and row.here == flag)]


def row_of(system: System, name: str) -> Flag | None:
    """Return the table row of a system's flag: the flag's own row, else the row with the longest matching prefix, else
    None."""
    found = [row for row in (*FLAGS, *SERVE_MODEL) if system in row.systems and row.covers(name)]
    return max(found, key=lambda row: (not row.is_family, len(row.name)), default=None)


def rows_of(name: str) -> list[Flag]:
    """Return the table rows of a flag name, one for each meaning in other systems."""
    rows = (*FLAGS, *(row for row in SERVE_MODEL if not row.here))
    exact = [row for row in rows if row.name == name]
    return exact or [row for row in rows if row.is_family and row.covers(name)]


def _taken() -> dict[str, Flag]:
    meanings: dict[str, list[Flag]] = {}
    for row in FLAGS:
        meanings.setdefault(row.name, []).append(row)
    return {
        name: rows[0]
        for name, rows in meanings.items()
        if len({row.here for row in rows}) == 1 and rows[0].here and not rows[0].is_same and not rows[0].is_shown
    }


#: Flags that are replaced by bridle's flags, by name. A name with different meanings in two systems is not replaced.
TAKEN: dict[str, Flag] = _taken()

__all__ = ["FLAGS", "MODEL", "SERVE_MODEL", "TAKEN", "Flag", "row_of", "rows_of", "spellings"]
