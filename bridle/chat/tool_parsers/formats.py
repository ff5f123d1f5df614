"""Detection of a model's tool-call format from its chat template and vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from bridle.chat.stream_deltas import ANY_CALL, CallRules, ToolReader
from bridle.chat.tool_parsers.call_format import CallFormat
from bridle.chat.tool_parsers.call_grammar import CallGrammar
from bridle.chat.tool_parsers.call_reader import CallFormatReader
from bridle.chat.tool_parsers.grammar import Form, Function
from bridle.chat.tool_parsers.harmony import Harmony, harmony_of
from bridle.chat.tool_parsers.hermes import OPEN, Hermes
from bridle.chat.tool_parsers.inference import infer_format
from bridle.chat.tool_parsers.llama import PYTHON_TAG, Llama
from bridle.chat.tool_parsers.mistral import ARGS, MARK, Mistral
from bridle.chat.tool_parsers.probes import RenderChat, prober_of

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer


class ToolFormat(Protocol):
    """Format of tool calls. `opening_token` is the special token that begins them, for formats that have one;
    `is_spelled` says that grammars spell calls as the model writes them by itself."""

    opening_token: str | None
    is_spelled: bool

    def reader(self, is_open: bool = False, rules: CallRules = ANY_CALL) -> ToolReader:
        """A reader for one output; with `is_open` the prompt ends with the opening token. `rules` say what a call
        is."""
        raise NotImplementedError

    def must_call(self, functions: Sequence[Function], max_calls: int) -> Form:
        """The grammar of an output that is calls, one at least."""
        raise NotImplementedError

    def may_call(self, functions: Sequence[Function]) -> Form | None:
        """The grammar of an output in which calls, if there are any, are right; None if there is no such grammar."""
        raise NotImplementedError


class InferredFormat:
    """A format that is described by a value, such as one that was inferred from a chat template. `specials` maps the
    texts of special tokens to their ids."""

    opening_token: str | None = None
    is_spelled: bool = True

    def __init__(self, form: CallFormat, specials: Mapping[str, int]) -> None:
        self.form = form
        self._specials = {text: token for text, token in specials.items() if any(text in x for x in form.literals())}

    @property
    def shows_special_tokens(self) -> bool:
        """True if special tokens are markup of calls, so that outputs must contain their text."""
        return bool(self._specials)

    def reader(self, is_open: bool = False, rules: CallRules = ANY_CALL) -> ToolReader:
        return CallFormatReader(self.form, rules)

    def must_call(self, functions: Sequence[Function], max_calls: int) -> Form:
        return Form(CallGrammar(self.form, self._specials).must_call(functions, max_calls), bool(self._specials))

    def may_call(self, functions: Sequence[Function]) -> Form | None:
        return Form(CallGrammar(self.form, self._specials).may_call(functions), bool(self._specials))


#: Formats that were found out, as long as their tokenizers are there.
_KNOWN: WeakKeyDictionary[Tokenizer, ToolFormat] = WeakKeyDictionary()


def format_of(tokenizer: Tokenizer) -> ToolFormat:
    """The format of a model's calls: what its chat template writes. A model whose template writes none is read for the
    most common format."""
    known = _KNOWN.get(tokenizer)
    if known is None:
        known = _KNOWN[tokenizer] = harmony_of(tokenizer) or _inferred(tokenizer)
    return known


def _inferred(tokenizer: Tokenizer) -> ToolFormat:
    form = inferred_from(tokenizer)
    return _by_words(tokenizer) if form is None else _named(form, tokenizer)


def inferred_from(tokenizer: Tokenizer) -> CallFormat | None:
    """The format that the model's chat template shows; None if it writes no calls."""
    return infer_format(_renderer(tokenizer), tuple(map(tokenizer.token_text, tokenizer.eos_token_ids)))


def _renderer(tokenizer: Tokenizer) -> RenderChat:
    template = tokenizer.chat_template

    def render(
        messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        return template.render(messages, tools, None, {}, add_generation_prompt)

    return render


#: How templates take calls of earlier turns, as long as their tokenizers are there.
_STYLES: WeakKeyDictionary[Tokenizer, tuple[bool, bool]] = WeakKeyDictionary()


def as_the_template_reads(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which earlier calls have the form that the model's template can write: some templates take arguments
    only as JSON text, some write calls only where there is no content."""
    if tokenizer not in _STYLES:
        prober = prober_of(_renderer(tokenizer))
        _STYLES[tokenizer] = (False, False) if prober is None else (prober.is_text, prober.is_null)
    is_text, is_null = _STYLES[tokenizer]
    return [_written(message, is_text, is_null) for message in messages] if is_text or is_null else messages


def _written(message: dict[str, Any], is_text: bool, is_null: bool) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = message.get("content")
    made = [_with_text(call) for call in calls] if is_text else calls
    return {**message, "content": None if is_null and not content else content, "tool_calls": made}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON text."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    changed = {**function, "arguments": text}
    return {**call, "function": changed} if "function" in call else changed


def _named(form: CallFormat, tokenizer: Tokenizer) -> ToolFormat:
    """The reader of a format: three common ones have their own, which also forgive what small models get wrong."""
    if form.trigger == OPEN and form.name_key == "name":
        return Hermes()
    if form.trigger == MARK or form.is_bare:
        return _by_words(tokenizer)
    specials = {tokenizer.token_text(token): token for token in tokenizer.special_token_ids}
    return InferredFormat(form, specials)


def _by_words(tokenizer: Tokenizer) -> ToolFormat:
    """The format that words of the template or of the vocabulary tell."""
    template = tokenizer.template_text
    if OPEN in template:
        return Hermes()
    if MARK in template or tokenizer.id_of(MARK) is not None:
        ends = [tokenizer.token_text(token) for token in tokenizer.eos_token_ids]
        return Mistral(ends, is_spelled=tokenizer.id_of(ARGS) is None)
    if PYTHON_TAG in template or tokenizer.id_of(PYTHON_TAG) is not None or '"parameters": ' in template:
        return Llama()
    return Hermes()


def shows_special_tokens(kind: ToolFormat) -> bool:
    """True if outputs must contain the text of special tokens for calls to be read."""
    return isinstance(kind, Harmony) or (isinstance(kind, InferredFormat) and kind.shows_special_tokens)
