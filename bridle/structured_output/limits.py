"""Limits on a constraint: sizes, time and memory of its compilation, and of every mask afterwards. Sizes bound what
a client can send, and are checked before anything is compiled. The other numbers bound the cost that a text of an
allowed size can still cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridle.cgroups import num_cores

#: Bytes of a whole constraint, written as JSON.
MAX_BYTES = 512 * 1024
#: Nesting of a JSON schema's values, and of brackets in a regex or grammar.
MAX_JSON_DEPTH = 100
MAX_BRACKETS = 200
#: Options of a choice, parts of a combination, and combinations within one another.
MAX_OPTIONS = 20_000
MAX_PARTS = 64
MAX_NESTING = 8
#: Characters of a text that may be quoted from.
MAX_SUBSTRING_CHARS = 64 * 1024

#: Bounds of llguidance itself. A step's fuel lets no mask take longer than some tens of milliseconds; the number
#: of lexer states (1 to 2 kB each) is what an output can make grow while it runs.
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
    """`seconds` of processor time and `memory` bytes for one compilation, `num_compilers` of them at a time; at
    most `cache_entries` compiled grammars of about `cache_bytes` together are kept; `num_threads` compute
    masks."""

    seconds: float = 0.75
    memory: int = 256 * 1024 * 1024
    num_compilers: int = 2
    cache_entries: int = 256
    cache_bytes: int = 128 * 1024 * 1024
    num_threads: int = min(8, num_cores())
