"""What one may choose about a benchmark. Each reads the settings that concern it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """Empty `model_sizes` and `batches`, and `threads` None, are left to the benchmark."""

    quick: bool = False
    model_sizes: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    threads: int | None = None
    as_json: bool = False
    lmql: Path | None = None  # an environment with the genuine LMQL
    report: Path | None = None  # a page to write
