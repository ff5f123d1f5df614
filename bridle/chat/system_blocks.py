"""Selection of the `system` blocks that become part of the prompt.

Some clients send a block that differs in every session, at the very beginning: Claude Code's first block is a line for
Anthropic's accounts. The prefix cache would end there, and all that follows be computed again for each session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Beginnings of blocks that are known to differ between sessions and to say nothing to a model.
DROPPED = ("x-anthropic-billing-header:",)
#: The word that stands for an empty list.
NONE = "none"


def kept_blocks(system: str | list[dict[str, Any]] | None, prefixes: Sequence[str]) -> tuple[Any, int]:
    """`system` without the text blocks that begin with one of `prefixes`, and how many those are. A string stays
    unchanged, because it is the client's whole system prompt."""
    if not isinstance(system, list):
        return system, 0
    kept = [block for block in system if not _begins(block.get("text"), tuple(prefixes))]
    return kept or None, len(system) - len(kept)


def _begins(text: Any, prefixes: tuple[str, ...]) -> bool:
    return isinstance(text, str) and text.startswith(prefixes)
