"""What is no field, flag or route in other systems, and what it is here: data for docs/coming-from.md. Of the tables in
`bridle.elsewhere` the package itself tells its users."""

from __future__ import annotations

from bridle.elsewhere.rows import Word
from lab.elsewhere.libraries import LIBRARIES
from lab.elsewhere.programs import INFERLETS, STEERING
from lab.elsewhere.vllm import VLLM

WORDS: tuple[Word, ...] = (*VLLM, *LIBRARIES, *STEERING, *INFERLETS)
