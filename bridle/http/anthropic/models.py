"""The models in Anthropic's shape, for its clients, which ask on the same path as OpenAI's and say by a header who they
are."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import Request

Row = dict[str, Any]


def is_anthropic(request: Request) -> bool:
    """Whether a client of Anthropic's API asks."""
    return "anthropic-version" in request.headers


def anthropic_row(row: Row) -> Row:
    """A model: OpenAI's row, with what Anthropic's clients look for."""
    created = datetime.fromtimestamp(row["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return row | {"type": "model", "display_name": row["id"], "created_at": created}


def anthropic_list(rows: list[Row]) -> Row:
    """All of them, on one page."""
    ids = [row["id"] for row in rows]
    return {
        "data": [anthropic_row(row) for row in rows],
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }
