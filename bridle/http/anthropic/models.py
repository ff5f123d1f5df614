"""The list of models in Anthropic's format. Anthropic's clients use the same path as OpenAI's clients; their header
`anthropic-version` identifies them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import Request

Row = dict[str, Any]


def is_anthropic(request: Request) -> bool:
    """Return whether the request comes from a client of Anthropic's API."""
    return "anthropic-version" in request.headers


def anthropic_row(row: Row) -> Row:
    """Convert a model's entry from OpenAI's format to Anthropic's format."""
    created = datetime.fromtimestamp(row["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    most = {"max_input_tokens": row["max_model_len"], "max_tokens": row["max_model_len"]}
    made = {"type": "model", "display_name": row["id"], "created_at": created, "lifecycle": "active"}
    return row | made | most | dict.fromkeys(("capabilities", "deprecated_at", "retires_at", "line"))


def anthropic_list(rows: list[Row]) -> Row:
    """Return all models as one page of Anthropic's list."""
    ids = [row["id"] for row in rows]
    return {
        "data": [anthropic_row(row) for row in rows],
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }
