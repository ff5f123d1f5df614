"""Equivalents of other systems' names that are no field, flag or route: data for docs/coming-from.md. The tables in
`bridle.compat` are those that the package itself uses."""

from __future__ import annotations

from bridle.compat.schema import LibrarySymbol
from dev.compat.libraries import LIBRARIES
from dev.compat.programs import INFERLETS, STEERING
from dev.compat.vllm import VLLM

WORDS: tuple[LibrarySymbol, ...] = (*VLLM, *LIBRARIES, *STEERING, *INFERLETS)
