"""What is no field, flag or route in other systems, and what it is here: data for docs/coming-from.md. Of the tables in
`bridle.compat` the package itself tells its users."""

from __future__ import annotations

from bridle.compat.schema import LibrarySymbol
from dev.compat.libraries import LIBRARIES
from dev.compat.programs import INFERLETS, STEERING
from dev.compat.vllm import VLLM

WORDS: tuple[LibrarySymbol, ...] = (*VLLM, *LIBRARIES, *STEERING, *INFERLETS)
