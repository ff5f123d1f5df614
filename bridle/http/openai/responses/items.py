"""Builds the items of an answer from pieces of output, and the events that report the growth of each item."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bridle.chat.stream_deltas import CallArguments, Content, StreamDelta, Thought, ToolCallStart
from bridle.http.openai.responses.tools import Name

Event = dict[str, Any]
Item = dict[str, Any]


class ItemWriter:
    """Builds `items`, of which the last may be incomplete until the writer is closed. `names` maps flat names to
    functions in namespaces. A message at the end of the items is the answer; all other messages are commentary."""

    def __init__(self, response_id: str, names: Mapping[str, Name]) -> None:
        self.items: list[Item] = []
        self._id, self._names = response_id, names
        self._is_open = False

    def add(self, pieces: Iterable[StreamDelta]) -> list[Event]:
        """Add pieces of output. Returns their events."""
        return [event for piece in pieces for event in self._of(piece)]

    def close(self, status: str = "completed") -> list[Event]:
        """Close the last item. Returns the events. An answer without items gets an empty message."""
        opened = [] if self.items else self._begin("message", _message(f"msg_{self._id}_0"))
        return [*opened, *self._end(status, "final_answer")]

    def _of(self, piece: StreamDelta) -> list[Event]:
        number = len(self.items)
        match piece:
            case Thought():
                opened = self._begin("reasoning", _reasoning(f"rs_{self._id}_{number}"))
                return [*opened, self._grow("reasoning_text", piece.text)]
            case Content():
                opened = self._begin("message", _message(f"msg_{self._id}_{number}"))
                return [*opened, self._grow("output_text", piece.text)]
            case ToolCallStart():
                return [*self._end(), *self._begin("function_call", self._call(f"fc_{self._id}_{number}", piece))]
            case CallArguments():
                self.items[-1]["arguments"] += piece.text
                return [self._event("response.function_call_arguments.delta", delta=piece.text)]

    def _begin(self, kind: str, item: Item) -> list[Event]:
        """Open an item, unless the open item has the same type."""
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        events = self._end()
        self.items.append(item)
        self._is_open = True
        # The event needs a copy, because the item grows afterwards.
        told = item | {"content": []} if "content" in item else dict(item)
        events.append(self._event("response.output_item.added", item=told))
        if "content" in item:
            events.append(self._event("response.content_part.added", content_index=0, part=dict(item["content"][0])))
        return events

    def _grow(self, kind: str, text: str) -> Event:
        self.items[-1]["content"][0]["text"] += text
        further: Event = {"logprobs": []} if kind == "output_text" else {}
        return self._event(f"response.{kind}.delta", content_index=0, delta=text, **further)

    def _end(self, status: str = "completed", phase: str = "commentary") -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            item["phase"] = phase
        if item["type"] == "function_call":
            done = [
                self._event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
            ]
        else:
            part = item["content"][0]
            further: Event = {"logprobs": []} if part["type"] == "output_text" else {}
            name = f"response.{part['type']}.done"
            done = [self._event(name, content_index=0, text=part["text"], **further)]
            done.append(self._event("response.content_part.done", content_index=0, part=part))
        item_done = self._event("response.output_item.done", item=item)
        return [*done, item_done]

    def _call(self, item_id: str, call: ToolCallStart) -> Item:
        inner = self._names.get(call.name)
        name = {"name": call.name} if inner is None else {"name": inner.name, "namespace": inner.namespace}
        begun = {"type": "function_call", "id": item_id, "call_id": f"call_{call.id}", "status": "in_progress"}
        return begun | name | {"arguments": ""}

    def _event(self, kind: str, **fields: Any) -> Event:
        """Return an event about the last item."""
        about = {} if "item" in fields else {"item_id": self.items[-1]["id"]}
        return {"type": kind, "output_index": len(self.items) - 1} | about | fields


def _message(item_id: str) -> Item:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "message", "id": item_id, "role": "assistant", "status": "in_progress", "content": [part]}


def _reasoning(item_id: str) -> Item:
    part = {"type": "reasoning_text", "text": ""}
    return {"type": "reasoning", "id": item_id, "summary": [], "status": "in_progress", "content": [part]}
