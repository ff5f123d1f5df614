"""Renders a conversation as a prompt, with the model's own chat template or a client's template. Before that, messages
are validated and converted to a common format.

The model's own template is rendered in this process, in a sandbox with limits on steps and sizes. A client's template
is rendered in a separate process, which the operating system limits, so that a harmful template is only refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle import os_sandbox
from bridle.errors import InvalidRequest, Overloaded, TemplateFailure, UnsupportedFeature, UnsupportedModel
from bridle.multimodal.modalities import OF_PARTS, WORDS
from bridle.safe_repr import short_repr

if TYPE_CHECKING:
    from bridle.multimodal.sources import Source
    from bridle.tokenizer.template_engine import ChatTemplateProgram, TemplateError

Message = Mapping[str, Any]
Prepared = list[dict[str, Any]]

MAX_MESSAGES = 4_096
#: Roles that messages may have with any chat template. The template writes, changes or refuses each of them.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
#: The types of content parts that are text. A `refusal` is the text of an assistant that declined to answer.
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")

MAX_TEMPLATE_CHARS = 256 << 10

_MEMORY = 512 << 20  # bytes of address space for a client's template
_CPU_SECONDS = 1
WALL_SECONDS = 30.0  # includes the start of the process; only reached when the machine is busy
_MAX_PROCESSES = 2
_ENGINE = Path(__file__).with_name("template_engine.py")
#: Environment variables that a Python interpreter may need.
_KEPT_ENVIRONMENT = (os_sandbox.VARIABLE, "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
processes = threading.BoundedSemaphore(_MAX_PROCESSES)


class ChatTemplate:
    """A model's chat template and the special tokens that it may write. A model may have several templates by name, or
    none."""

    def __init__(self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]) -> None:
        named = {"default": source} if isinstance(source, str) else dict(source or {})
        self._sources = {name: text for name, text in named.items() if text}
        self._special_tokens = dict(special_tokens)
        self.is_present = bool(self._sources)

    @property
    def text(self) -> str:
        """Return the source of the template; if there are several templates, all sources joined."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Prepared,
        tools: Sequence[Mapping[str, Any]] | None,
        template: str | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt. `template` is a client's template. `variables` are additional variables of the template,
        which cannot replace the parts of a conversation."""
        from bridle.tokenizer.template_engine import TemplateError  # imports jinja2: many processes render nothing

        has_developer = any(message["role"] == "developer" for message in messages)
        known = {
            **self._special_tokens,
            **variables,
            "messages": self._known_roles(messages, template) if has_developer else messages,
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if template is not None:
                return _render_apart(template, known)
            name = "tool_use" if tools and "tool_use" in self._sources else "default"
            program = self._programs.get(name) or self._compile(name)
            if "functions" in program.source:  # a variable that some templates read
                known.setdefault("functions", json.dumps([tool.get("function", tool) for tool in tools or ()]))
            if "datetime" in program.source:
                known.setdefault("datetime", f"{datetime.now().astimezone():%Y-%m-%d}")
            try:
                return program.render(known)
            except TemplateError as error:
                others = [_described(tool) for tool in tools or ()]
                if error.kind != "failed" or (others and others == known["tools"]):
                    raise
                if others:
                    known["tools"] = others
                else:
                    del known["tools"]  # some templates expect no variable `tools` if there are no tools
                return program.render(known)
        except TemplateError as error:
            raise self._translate(error, template is None) from error

    @cached_property
    def _programs(self) -> dict[str, ChatTemplateProgram]:
        return {}

    def _compile(self, name: str) -> ChatTemplateProgram:
        """Return one of the model's templates, which is compiled when it is first used."""
        if name not in self._sources:
            reason = f"only {sorted(self._sources)}" if self._sources else "none"
            raise TemplateFailure(
                f"the model has no chat template ({reason}); give one, or send a plain prompt", "chat_template"
            )
        from bridle.tokenizer.template_engine import OWN_LIMITS, ChatTemplateProgram

        program = self._programs[name] = ChatTemplateProgram(self._sources[name], OWN_LIMITS)
        return program

    def _known_roles(self, messages: Prepared, template: str | None) -> Prepared:
        """Return the messages with roles that the template knows. Some clients send the system message with the role
        `developer`, and most templates silently drop messages with unknown roles."""
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


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool with a description for each parameter, because some templates require descriptions."""
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    given = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(parameters, Mapping) or not isinstance(given, Mapping):
        return dict(tool)
    properties = {
        key: {"description": "", **each} if isinstance(each, Mapping) else each for key, each in given.items()
    }
    return {**tool, "function": {**function, "parameters": {**parameters, "properties": properties}}}


def _render_apart(source: str, variables: Mapping[str, Any]) -> str:
    """Render a client's template in a process with limits."""
    from bridle.tokenizer.template_engine import CLIENT_LIMITS, TemplateError

    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}", "chat_template"
        )
    task = {"source": source, "variables": variables, "limits": CLIENT_LIMITS}
    try:
        text = json.dumps({**task, "memory": _MEMORY, "seconds": _CPU_SECONDS})
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a variable of the chat template is not JSON: {error}", "chat_template") from error
    if not processes.acquire(timeout=WALL_SECONDS):
        raise Overloaded("too many clients' chat templates are being rendered; try again")
    try:
        answer = _run_engine(text)
    finally:
        processes.release()
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
            timeout=WALL_SECONDS,
            env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"kind": "limit", "message": f"rendering takes more than {WALL_SECONDS:g} seconds"}
    if done.returncode != 0:
        message = f"rendering takes more than {_CPU_SECONDS} s of processor time, or too much memory"
        return {"kind": "limit", "message": message}
    answer = json.loads(done.stdout)
    return answer if isinstance(answer, dict) else {}


# -- messages ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Look:
    """Converts messages with images, audio or videos. If the template `takes_parts`, content becomes a list of parts.
    Otherwise, content becomes text with one of `placeholders`, by modality, for each file. `written` has, by modality,
    texts that a template writes for a file and that are not tokens. `sources` are the files that were found, in
    order."""

    placeholders: Mapping[str, str]
    takes_parts: bool
    written: Mapping[str, str] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)

    def content(self, content: Any, where: str) -> str | list[dict[str, str]]:
        """Return content whose parts are text, images, audio or videos, in the format that the template accepts."""
        given = [content] if isinstance(content, str) or content is None else content
        if not isinstance(given, Sequence):
            raise InvalidRequest(f"{where} is {type(content).__name__}; must be text or a list of parts", where)
        parts = [self._part(part, f"{where}[{i}]") for i, part in enumerate(given) if part is not None]
        if self.takes_parts:
            return parts
        return "\n".join(part["text"] if "text" in part else self.placeholders[part["type"]] for part in parts)

    def _part(self, part: Any, where: str) -> dict[str, str]:
        from bridle.multimodal.sources import source_of

        is_read = isinstance(part, Mapping) and OF_PARTS.get(str(part.get("type"))) in self.placeholders
        if is_read and (source := source_of(part, where)) is not None:
            self.sources.append(source)
            return {"type": source.modality}
        return {"type": "text", "text": _part(part, where)}

    def check(self, messages: Prepared) -> None:
        """Raise `InvalidRequest` for text that spells a placeholder if there are files, because a file could be bound
        to the text."""
        tokens = set(self.placeholders.values())
        stands_for = {spelling: modality for modality, spelling in (*self.written.items(), *self.placeholders.items())}
        for i, message in enumerate(messages if self.sources else ()):
            content = message["content"]
            texts = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            for spelling, modality in stands_for.items():
                own = 0 if self.takes_parts or spelling not in tokens else self._num_places(i, modality)
                if texts.count(spelling) != own:
                    raise InvalidRequest(
                        f"messages[{i}] has the text {spelling!r}, which is the placeholder of {WORDS[modality][1]}",
                        f"messages[{i}]",
                    )

    def placed(self, text: str) -> str:
        """Return a template's output, with placeholders instead of the texts in `written`."""
        for modality, spelling in self.written.items() if self.sources else ():
            text = text.replace(spelling, self.placeholders[modality])
        return text

    def _num_places(self, number: int, modality: str) -> int:
        mine = (source for source in self.sources if source.modality == modality)
        return sum(source.where.startswith(f"messages[{number}].") for source in mine)


def prepare(messages: Sequence[Message], look: Look | None = None, template: str | None = None) -> Prepared:
    """Return validated copies of messages in a common format. The content is text (parts are joined with line breaks,
    and missing content becomes empty), or the result of `look`. The arguments of tool calls are objects, not JSON text.

    Raises `InvalidRequest` if `messages` is not a list of messages, or if a role is neither one of `ROLES` nor in
    `template`, the source of the chat template. Without `look`, raises `UnsupportedFeature` for images and other media.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list of objects with `role` and `content`", "messages")
    if not messages:
        raise InvalidRequest("messages is empty; it must have at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries; at most {MAX_MESSAGES}", "messages")
    prepared = [_prepare(message, f"messages[{i}]", look, template) for i, message in enumerate(messages)]
    if look is not None:
        look.check(prepared)
    return prepared


def check_role(role: Any, template: str | None, where: str) -> None:
    """Refuse a role that is not one of `ROLES` and not a quoted word in the source of the chat template. Most templates
    would drop a message with such a role, or write a role that the model does not know."""
    if role in ROLES:
        return
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role is {short_repr(role)}; must be a non-empty string", f"{where}.role")
    if template is not None and f"'{role}'" not in template and f'"{role}"' not in template:
        rule = f"must be one of {', '.join(ROLES)}, or a role that the chat template names"
        raise InvalidRequest(f"{where}.role is {short_repr(role)}; {rule}. Correct the role", f"{where}.role")


def _prepare(message: Message, where: str, look: Look | None, template: str | None) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is {type(message).__name__}; must be an object", where)
    if message.get("role") not in ROLES:
        check_role(message.get("role"), template, where)
    prepared = dict(message)
    content = message.get("content")
    if look is not None:
        prepared["content"] = look.content(content, f"{where}.content")
    elif not isinstance(content, str):
        prepared["content"] = _text(content, f"{where}.content")
    if message.get("tool_calls") is not None:
        prepared["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return prepared


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} is {type(content).__name__}; must be text or a list of parts", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if kind in TEXT_PARTS and isinstance(text, str):
        return text
    if kind in TEXT_PARTS:
        raise InvalidRequest(f"{where} has no text", where)
    raise UnsupportedFeature(f"{where} is of type {short_repr(kind)}", where)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls. Each must be an object with a `function`, or a function itself; the function must have a
    name."""
    if not isinstance(calls, Sequence):
        raise InvalidRequest(f"{where} must be a list of function calls", where)
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return the call with its arguments as an object. Arguments that are not JSON stay unchanged."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be a list of function calls", where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return dict(call)
    if function is call:
        return {**call, "arguments": parsed}
    return {**call, "function": {**function, "arguments": parsed}}
