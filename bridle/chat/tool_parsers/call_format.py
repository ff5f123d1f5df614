"""Data types that describe how a model writes tool calls.

A format is plain data: `bridle doctor` prints it, traces keep it, and `--tool-format FILE` replaces it. It is derived
from the model's chat template (`inference.py`) or named by the operator (`presets.py`). The reader, the grammars and
the stop tokens all follow from it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from bridle.errors import InvalidRequest

#: Fields of a pattern. Every other part of a pattern is literal text.
NAME, ID, INDEX, ARGUMENTS, KEY, VALUE = "{name}", "{id}", "{index}", "{arguments}", "{key}", "{value}"
FIELDS = frozenset({NAME, ID, INDEX, ARGUMENTS, KEY, VALUE})


class JsonArguments(msgspec.Struct, frozen=True, tag="json"):
    """Arguments as one JSON object; with `is_text`, as a JSON string that contains the object."""

    is_text: bool = False


class TaggedArguments(msgspec.Struct, frozen=True, tag="tagged"):
    """Arguments one by one, each between tags: `opening` KEY middle VALUE `closing`.

    Strings are written without quotes, other values as JSON or as Python literals. `middles` maps a JSON type to the
    text between key and value; "any" means all other types. `closing` may repeat the key, at `{key}`. With `is_nested`,
    objects and arrays are nested tags, and the items of arrays have the tag `item`. `literals` is "python" if values
    are spelled `True` and `{'a': 1}`, and "mixed" if only words such as `True` are.
    """

    opening: str
    middles: dict[str, str]
    closing: str
    separator: str = ""
    is_nested: bool = False
    literals: str = "json"


class PythonArguments(msgspec.Struct, frozen=True, tag="python"):
    """Arguments as Python's keyword arguments: `city='Rome', days=3`."""


class QuotedArguments(msgspec.Struct, frozen=True, tag="quoted"):
    """Arguments as an object whose keys are bare and whose strings are between `quote`:
    `{city:<|"|>Rome<|"|>,days:3}`."""

    quote: str


#: The values of `TaggedArguments.literals`.
LITERALS = ("json", "python", "mixed")
Arguments = JsonArguments | TaggedArguments | PythonArguments | QuotedArguments


class CallFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layout of calls: `section_open` call `separator` call ... `section_close`.

    `call` is a pattern of literals and fields. With `name_key`, the call is a JSON object with the function's name
    under this key and the arguments under `arguments_key`. An empty `name_key` means that the name itself is the key of
    the arguments. `is_bare` means that no markup begins a call: an output is either calls from its first character on,
    or text. `max_calls` is set where the template refuses further calls, or writes them in another way. With
    `is_prompted`, the prompt ends with the opening of a call. If the model does not continue the call, it writes
    `content_open` and then content.
    """

    call: tuple[str, ...]
    arguments: Arguments
    section_open: str = ""
    section_close: str = ""
    separator: str = ""
    name_key: str | None = None
    arguments_key: str = "arguments"
    is_bare: bool = False
    max_calls: int | None = None
    is_prompted: bool = False
    content_open: str = ""
    source: str = "template"

    @property
    def opening(self) -> str:
        """Return the literal text before the first field of a call."""
        return self.call[0] if self.call and self.call[0] not in FIELDS else ""

    @property
    def closing(self) -> str:
        """Return the literal text after the last field of a call."""
        return self.call[-1] if self.call and self.call[-1] not in FIELDS else ""

    @property
    def trigger(self) -> str:
        """Return the markup that begins calls, without white space and JSON brackets; empty for bare calls."""
        return "" if self.is_bare else markup(self.section_open) or markup(self.opening)

    @property
    def end_mark(self) -> str:
        """Return the markup that ends a call, without JSON braces."""
        return self.closing.strip().lstrip("}").strip()

    def literals(self) -> tuple[str, ...]:
        """Return all literal texts of the format. Special tokens among them must be visible in outputs."""
        own = [part for part in self.call if part not in FIELDS]
        tagged = self.arguments
        if isinstance(tagged, TaggedArguments):
            own += [tagged.opening, *tagged.middles.values(), tagged.closing, tagged.separator]
        elif isinstance(tagged, QuotedArguments):
            own.append(tagged.quote)
        return (self.section_open, self.section_close, self.separator, *own)


def markup(text: str) -> str:
    """Return the part of a literal before JSON and white space: `<tool_call>` of `<tool_call>\\n{"name": "`. Of several
    tags on separate lines, only the first counts, because models omit line breaks."""
    for mark in ('{"', "{\n", "{ "):
        text = text.split(mark, 1)[0]
    text = text.strip().rstrip("[{").strip()
    first = text.partition("\n")[0]
    return first if _CALL_TAG.fullmatch(first) else text


_CALL_TAG = re.compile(r"<[^<>]*(?:call|tool)[^<>]*>", re.IGNORECASE)


def to_dict(form: CallFormat) -> dict[str, Any]:
    """Return the format as plain data."""
    data = msgspec.to_builtins(form)
    assert isinstance(data, dict)
    return data


def parse_format(data: object) -> CallFormat:
    """Return the format in plain data. Raises `InvalidRequest` that names the invalid field."""
    try:
        form = msgspec.convert(data, CallFormat)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"tool_format: {error}", "tool_format") from None
    names = form.call[: form.call.index(ARGUMENTS)] if ARGUMENTS in form.call else ()
    if NAME not in names:
        raise InvalidRequest(
            f"tool_format: call is {form.call}; it must contain {NAME} and, later, {ARGUMENTS}", "tool_format"
        )
    if not form.trigger and not form.is_bare:
        raise InvalidRequest(
            "tool_format: no markup begins a call; set section_open, or let `call` begin with markup", "tool_format"
        )
    _check_arguments(form.arguments)
    return form


def _check_arguments(arguments: Arguments) -> None:
    needed: dict[str, str] = {}
    if isinstance(arguments, TaggedArguments):
        needed = {"opening": arguments.opening, "closing": arguments.closing, "middles": "".join(arguments.middles)}
        if arguments.literals not in LITERALS:
            known = ", ".join(LITERALS)
            raise InvalidRequest(
                f"tool_format: arguments.literals is {arguments.literals!r}; must be one of {known}", "tool_format"
            )
    elif isinstance(arguments, QuotedArguments):
        needed = {"quote": arguments.quote}
    for name, text in needed.items():
        if not text.strip():
            raise InvalidRequest(f"tool_format: arguments.{name} is empty; write the text of the tag", "tool_format")
