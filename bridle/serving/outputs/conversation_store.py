"""Conversations that the server keeps for its clients. Requests add items to a conversation and continue it.

Conversations are kept in memory as JSON for some time after their last change. Limits apply to each user and to all
users together. With a state file, conversations are also saved in that file. Users cannot access the conversations of
other users. Items are plain data.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import structlog

from bridle.errors import InvalidRequest, Overloaded, UnknownConversation
from bridle.safe_repr import short_repr
from bridle.serving.outputs.saved_records import SavedRecords
from bridle.serving.tenancy.per_user_store import StoreBounds

_log: structlog.stdlib.BoundLogger = structlog.get_logger("bridle.http")
#: Limits: seconds (a day), number of conversations of all users and of one, bytes of all users and of one.
BOUNDS = StoreBounds(86_400.0, 16_384, 1_024, 256 << 20, 64 << 20)
#: Limits with a state file, where conversations are kept for 30 days.
SAVED_BOUNDS = replace(BOUNDS, seconds=30 * 86_400.0)
#: Maximum number of items, and of bytes, of one conversation.
MAX_ITEMS, MAX_BYTES = 4_096, 16 << 20

Item = dict[str, Any]


@dataclass(slots=True)
class Conversation:
    """A conversation of a user. `created` is a Unix time. `items` are JSON and have ids."""

    user: str
    id: str
    created: int
    metadata: dict[str, str] = field(default_factory=dict)
    items: dict[str, bytes] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return the conversation in the form that clients see."""
        return {"id": self.id, "object": "conversation", "created_at": self.created, "metadata": self.metadata}

    def listed(self) -> list[Item]:
        """Return the items, the oldest first."""
        return [msgspec.json.decode(item) for item in self.items.values()]

    def item(self, name: str) -> Item:
        """Return an item of a conversation by the item's id. Raises `UnknownConversation`."""
        if name not in self.items:
            raise UnknownConversation(
                f"conversation {self.id} has no item {short_repr(name)}; list the conversation's items"
            )
        found: Item = msgspec.json.decode(self.items[name])
        return found


class ConversationStore(SavedRecords[Conversation]):
    """Keeps conversations. With a state `table`, the store also has the conversations that were saved there. Only one
    thread may use the store. Conversations that `find` returned are never modified; every change stores a new
    object."""

    kind, unknown, noun, plural = Conversation, UnknownConversation, "conversation", "conversations"
    usual = BOUNDS
    advice = "they are kept for {:g} s after their last change, within bounds. Create it again"

    def create(self, user: str, metadata: dict[str, str], items: Iterable[Item]) -> Conversation:
        """Store a new conversation. Raises `InvalidRequest` if the new conversation would be too large."""
        made = Conversation(user, f"conv_{secrets.token_hex(16)}", int(time.time()), metadata)
        return self.put(self._with(made, items))

    def update(self, conversation: Conversation, metadata: dict[str, str]) -> Conversation:
        """Replace the metadata of a conversation."""
        return self.put(replace(conversation, metadata=metadata))

    def add(self, conversation: Conversation, items: Iterable[Item]) -> list[Item]:
        """Append items to a conversation. Items without an id get an id. Returns the added items. Raises
        `InvalidRequest` if there are too many items, or if the items are too large."""
        made = self.put(self._with(conversation, items))
        return [made.item(name) for name in list(made.items)[len(conversation.items) :]]

    def begin_turn(self, user: str, name: str, items: list[Item]) -> ConversationTurn:
        """Return the turn that will add the given items and their answer to a conversation. Raises
        `UnknownConversation`, and `InvalidRequest` if there is no room for the items."""
        self._with(self.find(user, name), items)
        return ConversationTurn(self, user, name, items)

    def end_turn(self, turn: ConversationTurn, output: Iterable[Item]) -> None:
        """Add the items and the answer of a turn. A turn always has room for its items and its answer."""
        found = self.find(turn.user, turn.id)
        self.put(self._with(found, [*turn.items, *output], slack=2))

    def remove(self, conversation: Conversation, item: str) -> Conversation:
        """Remove an item from a conversation. Raises `UnknownConversation`."""
        conversation.item(item)
        return self.put(
            replace(conversation, items={name: kept for name, kept in conversation.items.items() if name != item})
        )

    def _with(self, conversation: Conversation, items: Iterable[Item], slack: int = 1) -> Conversation:
        made = replace(conversation, items=dict(conversation.items))
        for item in items:
            name = item.get("id")
            if not isinstance(name, str) or not name or name in made.items:
                name = f"item_{secrets.token_hex(12)}"
            made.items[name] = msgspec.json.encode({**item, "id": name})
        num_bytes = sum(map(len, made.items.values()))
        max_items, max_bytes = slack * MAX_ITEMS, slack * MAX_BYTES
        if len(made.items) > max_items or num_bytes > max_bytes:
            raise InvalidRequest(
                f"conversation: with these items it would have {len(made.items)} items and {num_bytes} bytes; at "
                f"most {max_items} items and {max_bytes} bytes. Delete items, or begin another conversation",
                "conversation",
            )
        return made


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """A request that continues the conversation `id` of a user with `items`."""

    store: ConversationStore
    user: str
    id: str
    items: list[Item]

    def end(self, output: Iterable[Item]) -> None:
        """Add the items of the request and its output to the conversation. If the turn cannot be added any more, the
        reason is logged."""
        try:
            self.store.end_turn(self, output)
        except (InvalidRequest, Overloaded) as error:
            _log.warning("conversation not continued", conversation=self.id, error=str(error))
