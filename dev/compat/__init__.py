"""Equivalents of other systems' names that are not fields, flags or routes: data for docs/coming-from.md. The package
itself uses only the tables in `bridle.compat`."""

from __future__ import annotations

from bridle.compat.schema import LibrarySymbol
from dev.compat.libraries import LIBRARIES
from dev.compat.programs import INFERLETS, STEERING
from dev.compat.vllm import VLLM

WORDS: tuple[LibrarySymbol, ...] = (*VLLM, *LIBRARIES, *STEERING, *INFERLETS)
