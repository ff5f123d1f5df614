"""Records of answers as lines of JSON, and the table that summarizes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Record:
    """One judged answer."""

    model: str
    recipe: str
    column: str
    case: str
    text: str
    is_right: bool
    tokens: int
    seconds: float


class Records:
    """All records. If a file is given, they are stored in it, so that a later run computes only missing records."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        self.all = [Record(**json.loads(line)) for line in lines]

    def add(self, records: Sequence[Record]) -> None:
        """Add these records, and write them to the file immediately."""
        self.all += records
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(record)) + "\n" for record in records)

    def of(self, model: str, recipe: str, column: str) -> list[Record]:
        """Return the records of one model, recipe and column."""
        return [each for each in self.all if (each.model, each.recipe, each.column) == (model, recipe, column)]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, for a model, a recipe and a column. `low` and `high` are Wilson's 95 % interval of the
    share of right answers; tokens and seconds are means per case."""

    model: str
    recipe: str
    column: str
    cases: int
    right: int
    low: float
    high: float
    tokens: float
    seconds: float


def row_of(records: Sequence[Record]) -> Row:
    """Return the table's row for the records of one model, recipe and column."""
    first, count, right = records[0], len(records), sum(each.is_right for each in records)
    tokens, seconds = (sum(values) / count for values in zip(*((e.tokens, e.seconds) for e in records), strict=True))
    place = (first.model, first.recipe, first.column)
    return Row(*place, count, right, *interval(right, count), round(tokens, 1), round(seconds, 2))


def interval(right: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval for a share."""
    z, share = 1.96, right / total
    middle, spread = share + z * z / (2 * total), z * sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    low, high = ((middle + side) / (1 + z * z / total) for side in (-spread, spread))
    return round(max(low, 0.0), 3), round(min(high, 1.0), 3)


def show(rows: Sequence[Row], skipped: Mapping[str, str], console: Console) -> None:
    """Print the table, and the names of recipes without data."""
    from rich.table import Table

    table = Table("model", "recipe", "column", caption="right with an interval of 95 %; tokens and seconds of a case")
    for name in ("cases", "right", "interval", "tokens", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        share = f"{row.right / row.cases:.0%}"
        figures = (str(row.cases), share, f"{row.low:.0%} to {row.high:.0%}", f"{row.tokens:.0f}", f"{row.seconds:.2f}")
        table.add_row(row.model, row.recipe, row.column, *figures)
    console.print(table)
    for name, reason in skipped.items():
        console.print(f"{name}: not measured: {reason}")
