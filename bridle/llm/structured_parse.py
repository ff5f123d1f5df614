"""Objects instead of text: the schema of a type is the constraint, and the output is parsed to a value of that type.

While an output grows, its object has the fields that are generated so far. Fields that are not generated yet have their
defaults, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_origin

from bridle.chat.chat_request import ChatRequest
from bridle.errors import IncompleteOutput, InvalidRequest
from bridle.outputs import RequestOutput
from bridle.serving import raise_first_error
from bridle.structured_output import JsonSchema
from bridle.structured_output.request_fields import NAMES

if TYPE_CHECKING:
    from pydantic import BaseModel

T = TypeVar("T")


class ParsedType(Generic[T]):
    """A type that can be parsed from JSON: a pydantic model, a dataclass, a `TypedDict`, `list[Thing]`, `Literal`, and
    so on. Raises `InvalidRequest` for a type without a schema."""

    def __init__(self, kind: type[T]) -> None:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        try:
            self._adapter = TypeAdapter(kind)
            self.constraint = JsonSchema(self._adapter.json_schema())
        except PydanticUserError as error:
            reason = str(error).splitlines()[0]
            raise InvalidRequest(f"{getattr(kind, '__name__', kind)} has no JSON schema: {reason}", "kind") from None
        self._kind = kind

    def read(self, output: RequestOutput, content: str) -> T:
        """Return the object in a finished output. Raises the output's error, or `IncompleteOutput` if the output was
        cut off."""
        from pydantic import ValidationError

        raise_first_error(output)
        try:
            return self._adapter.validate_json(content)
        except ValidationError as error:
            first = output.outputs[0]
            what = error.errors(include_url=False, include_context=False)[0]["msg"]
            raise IncompleteOutput(
                f"the output ended after {len(first.token_ids)} tokens ({_ending(output)}) and is not complete: {what}",
                content,
            ) from None

    def partial(self, content: str) -> T | None:
        """Return the object as far as it is generated; None if nothing is generated yet."""
        from pydantic_core import from_json

        try:
            data = from_json(content, allow_partial="trailing-strings")
        except ValueError:
            return None
        found: T = _built(self._kind, data)
        return found


def typed_as(kind: type[T], given: Mapping[str, Any]) -> tuple[ParsedType[T], dict[str, Any]]:
    """Return the type, and the keywords of a call with the schema of the type as the constraint. Raises
    `InvalidRequest` if the keywords already contain a constraint."""
    typed = ParsedType(kind)
    for name in ("constraint", *(name for name in NAMES if name in given)):
        if given.get(name) is not None:
            raise InvalidRequest(f"leave {name} out, because the type is the constraint", name)
    return typed, {**given, "constraint": typed.constraint}


def content_of(output: RequestOutput, turn: ChatRequest | None) -> str:
    """Return the text of an output without its reasoning and its tool calls."""
    return output.outputs[0].text if turn is None else turn.message(output.outputs[0]).content


def objects_of(
    kind: ParsedType[T], turns: Sequence[ChatRequest | None], outputs: Sequence[RequestOutput], prompts: Any
) -> Any:
    """Return the objects in finished outputs, or a single object if there was one prompt."""
    found = [kind.read(output, content_of(output, turn)) for turn, output in zip(turns, outputs, strict=True)]
    return found[0] if is_single(prompts) or is_conversation(prompts) else found


def partials(
    kind: ParsedType[T], output: Callable[[], RequestOutput], turn: ChatRequest | None
) -> Callable[[], list[T]]:
    """Return a function to call each time the output has grown. The function returns the object if it has changed, else
    nothing."""
    last: list[T] = []

    def take() -> list[T]:
        found = kind.partial(content_of(output(), turn))
        if found is None or (last and last[0] == found):
            return []
        last[:] = [found]
        return [found]

    return take


def is_conversation(prompts: Any) -> bool:
    """Return whether the value is a list of messages (a conversation)."""
    return _is_list(prompts) and bool(prompts) and all(isinstance(each, Mapping) and "role" in each for each in prompts)


def are_conversations(prompts: Any) -> bool:
    """Return whether each item of the value is a conversation."""
    return _is_list(prompts) and bool(prompts) and all(map(is_conversation, prompts))


def is_single(prompts: Any) -> bool:
    """Return whether the value is one prompt (a string or token ids) and not a list of prompts."""
    return not _is_list(prompts) or (bool(prompts) and all(isinstance(each, int) for each in prompts))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _ending(output: RequestOutput) -> str:
    reason = output.outputs[0].finish_reason
    return (
        "max_tokens or the context" if reason is not None and reason.value == "length" else str(reason and reason.value)
    )


def _built(kind: Any, data: Any) -> Any:
    """Return incomplete data as a value of a type, as far as the data fits the type."""
    from pydantic import BaseModel

    if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(data, dict):
        return _model(kind, data)
    if get_origin(kind) is list and isinstance(data, list):
        return [_built(get_args(kind)[0], each) for each in data]
    if get_origin(kind) is dict and isinstance(data, dict):
        return {key: _built(get_args(kind)[1], each) for key, each in data.items()}
    choices = [each for each in get_args(kind) if each is not NoneType] if NoneType in get_args(kind) else []
    return _built(choices[0], data) if len(choices) == 1 and data is not None else data


def _model(kind: type[BaseModel], data: Mapping[str, Any]) -> Any:
    """Return a pydantic model with only the fields that the data has."""
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        key = field.alias if field.alias is not None and field.alias in data else name
        if key in data:
            found[name] = _built(field.annotation, data[key])
        elif field.is_required():
            found[name] = None
    return kind.model_construct(set(data), **found)
