"""The settings of benchmarks. Each benchmark reads those that concern it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings. With empty `model_sizes` or `batches`, or `threads` None, the benchmark chooses."""

    quick: bool = False
    model_sizes: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    threads: int | None = None
    as_json: bool = False
    lmql: Path | None = None  # an environment with the genuine LMQL
    report: Path | None = None  # a page to write
    parts: tuple[str, ...] = ()  # pieces of the names of parts; empty: all
    folder: Path | None = None  # what was made and measured is kept there, and a later run goes on
