"""The list of models in Anthropic's format. Anthropic's clients request it on OpenAI's path, and are recognized by the
header `anthropic-version`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import Request

Row = dict[str, Any]


def is_anthropic(request: Request) -> bool:
    """Return whether the request comes from a client of Anthropic's API."""
    return "anthropic-version" in request.headers


def anthropic_row(row: Row) -> Row:
    """Return OpenAI's entry of a model, with the fields that Anthropic's clients read."""
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
