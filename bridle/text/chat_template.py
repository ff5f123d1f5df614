"""Renders a conversation as a prompt, with the model's own chat template or one that the client sends.

The model's own template is rendered in this process, in a sandbox with limits on steps and sizes. A client's template
is rendered in a process of its own, which the operating system bounds: the worst that can happen is that it is refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from bridle.errors import InvalidRequest, Overloaded, TemplateFailure, UnsupportedModel
from bridle.text.messages import Prepared
from bridle.text.template_engine import ChatTemplateProgram, Limits, TemplateError

OWN_LIMITS = Limits(max_steps=5_000_000, max_chars=32 << 20)
CLIENT_LIMITS = Limits(max_steps=500_000, max_chars=4 << 20)
MAX_TEMPLATE_CHARS = 256 << 10

_MEMORY = 512 << 20  # address space of a client's template, bytes
_CPU_SECONDS = 1
_WALL_SECONDS = 30.0  # start of the process included; only reached when the machine is busy
_MAX_PROCESSES = 2
_ENGINE = Path(__file__).with_name("template_engine.py")
_KEPT_ENVIRONMENT = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # what an interpreter may need
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_processes = threading.BoundedSemaphore(_MAX_PROCESSES)


class ChatTemplate:
    """A model's chat template (or several by name, or none) and the special tokens it may write."""

    def __init__(self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]) -> None:
        named = {"default": source} if isinstance(source, str) else dict(source or {})
        self._sources = {name: text for name, text in named.items() if text}
        self._special_tokens = dict(special_tokens)
        self.is_present = bool(self._sources)

    @property
    def text(self) -> str:
        """The source; of several templates, one after the other."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Prepared,
        tools: Sequence[Mapping[str, Any]] | None,
        template: str | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt. `template` is a client's own; `variables` are further ones it may read."""
        taken = sorted(_RESERVED & set(variables))
        if taken:
            raise InvalidRequest(f"{taken[0]!r} cannot be set as a variable of the chat template", taken[0])
        known = {
            **self._special_tokens,
            **variables,
            "messages": self._known_roles(messages, template),
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._own(bool(tools)).render(known) if template is None else _render_apart(template, known)
        except TemplateError as error:
            raise self._translate(error, template is None) from error

    @cached_property
    def _programs(self) -> dict[str, ChatTemplateProgram]:
        return {}

    def _own(self, has_tools: bool) -> ChatTemplateProgram:
        """The model's template for a prompt with or without tools."""
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            reason = f"only {sorted(self._sources)}" if self._sources else "none"
            raise TemplateFailure(
                f"the model has no chat template ({reason}); give one, or send a plain prompt",
                "chat_template",
            )
        if name not in self._programs:
            self._programs[name] = ChatTemplateProgram(self._sources[name], OWN_LIMITS)
        return self._programs[name]

    def _known_roles(self, messages: Prepared, template: str | None) -> Prepared:
        """Return the messages in roles that the template knows. Some clients send the system message with the role
        `developer`, and most templates silently drop messages of unknown roles."""
        if all(message["role"] != "developer" for message in messages):
            return messages
        if "developer" in (self.text if template is None else template):
            return messages
        return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]

    def _translate(self, error: TemplateError, is_own: bool) -> InvalidRequest | UnsupportedModel:
        whose = "the model's chat template" if is_own else "the chat template"
        if error.kind == "syntax" and is_own:
            return UnsupportedModel(f"{whose} is not valid: {error}")
        if error.kind == "refused":
            return TemplateFailure(f"{whose} refused the messages: {error}", "messages")
        verb = {"syntax": "is not valid", "limit": "was stopped"}.get(error.kind, "failed on these messages")
        return TemplateFailure(f"{whose} {verb}: {error}", "messages" if is_own else "chat_template")


def _render_apart(source: str, variables: Mapping[str, Any]) -> str:
    """Render a client's template in a bounded process."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}", "chat_template"
        )
    task = {"source": source, "variables": variables, "limits": CLIENT_LIMITS}
    try:
        text = json.dumps({**task, "memory": _MEMORY, "seconds": _CPU_SECONDS})
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a variable of the chat template is not JSON: {error}", "chat_template") from error
    if not _processes.acquire(timeout=_WALL_SECONDS):
        raise Overloaded("too many chat templates of clients are being rendered; try again")
    try:
        answer = _run_engine(text)
    finally:
        _processes.release()
    if "text" in answer:
        return str(answer["text"])
    raise TemplateError(str(answer.get("kind")), str(answer.get("message")))


def _run_engine(task: str) -> dict[str, Any]:
    try:
        done = subprocess.run(  # noqa: S603 - our own file, no shell
            [sys.executable, "-I", str(_ENGINE)],
            input=task.encode("utf-8"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_WALL_SECONDS,
            env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemplateError("limit", f"it takes more than {_WALL_SECONDS:g} seconds") from None
    if done.returncode != 0:
        message = f"it takes more than {_CPU_SECONDS} s of processor time or too much memory"
        raise TemplateError("limit", message)
    answer = json.loads(done.stdout)
    return answer if isinstance(answer, dict) else {}
