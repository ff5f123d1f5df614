"""Limits of a constraint: its sizes, the time and memory of its compilation, and the time of every later mask. Sizes
limit what a client can send, and are checked before compilation. Limits of time and memory bound the cost of a
constraint whose sizes are allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridle.cgroups import num_cores

#: Maximum number of bytes of a whole constraint, written as JSON.
MAX_BYTES = 512 * 1024
#: Maximum nesting of a JSON schema's values, and of brackets in a regex or grammar.
MAX_JSON_DEPTH = 100
MAX_BRACKETS = 200
#: Maximum number of options of a choice, of parts of a combination, and of nested combinations.
MAX_OPTIONS = 20_000
MAX_PARTS = 64
MAX_NESTING = 8
#: Maximum number of characters of a text from which the output may quote.
MAX_SUBSTRING_CHARS = 64 * 1024

#: Limits of llguidance itself. The fuel of a step limits each mask to some tens of milliseconds. The number of lexer
#: states (1 to 2 kB each) limits the memory that grows during an output.
PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    """Limits of the compiler of constraints. One compilation may take `seconds` of processor time and `memory` bytes;
    at most `num_compilers` compilations run at a time. At most `cache_entries` compiled grammars, of about
    `cache_bytes` in total, are cached. `num_threads` threads compute masks."""

    seconds: float = 0.75
    memory: int = 256 * 1024 * 1024
    num_compilers: int = 2
    cache_entries: int = 256
    cache_bytes: int = 128 * 1024 * 1024
    num_threads: int = min(8, num_cores())
