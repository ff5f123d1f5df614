"""Selection of the `system` blocks that become part of the prompt.

Some clients send a block that differs in every session, at the very beginning: Claude Code's first block is a line for
Anthropic's accounts. The common prefix would end at that block, so the rest of the prompt would be computed again for
each session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Prefixes of blocks that differ between sessions and contain no information for a model.
DROPPED = ("x-anthropic-billing-header:",)
#: The word on the command line for an empty list.
NONE = "none"


def kept_blocks(system: str | list[dict[str, Any]] | None, prefixes: Sequence[str]) -> tuple[Any, int]:
    """Return `system` without the text blocks that begin with one of `prefixes`, and the number of removed blocks. A
    string stays unchanged, because it is the client's whole system prompt."""
    if not isinstance(system, list):
        return system, 0
    kept = [block for block in system if not _begins(block.get("text"), tuple(prefixes))]
    return kept or None, len(system) - len(kept)


def _begins(text: Any, prefixes: tuple[str, ...]) -> bool:
    return isinstance(text, str) and text.startswith(prefixes)
