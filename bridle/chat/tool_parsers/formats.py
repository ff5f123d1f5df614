"""Finds a model's format of tool calls in its chat template and vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from bridle.chat.stream_deltas import ANY_CALL, CallRules, ToolReader
from bridle.chat.tool_parsers.call_format import CallFormat, JsonArguments, to_dict
from bridle.chat.tool_parsers.call_grammar import CallGrammar
from bridle.chat.tool_parsers.call_reader import PYTHON_TAG, CallFormatReader
from bridle.chat.tool_parsers.grammar import Form, Function
from bridle.chat.tool_parsers.harmony import Harmony, harmony_of
from bridle.chat.tool_parsers.inference import infer_format
from bridle.chat.tool_parsers.mistral import ARGS, MARK, Mistral
from bridle.chat.tool_parsers.presets import FROM_TEMPLATE, PRESETS, name_of, preset_or_file
from bridle.chat.tool_parsers.untagged import with_bare_calls
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.template_probes import prober_of, renderer_of

_log = logging.getLogger(__name__)
#: The name of a format that cannot be parsed. Requests with tools are refused for it.
UNKNOWN = "unknown"


class ToolFormat(Protocol):
    """A format of tool calls. `opening_token` is the special token that begins calls, if the format has one.
    `is_spelled`: grammars of this format write calls as the model would write them without a grammar."""

    opening_token: str | None
    is_spelled: bool

    def reader(self, is_open: bool = False, rules: CallRules = ANY_CALL) -> ToolReader:
        """Return a reader for one output. With `is_open`, the prompt ends with the opening token. `rules` define what
        counts as a call."""
        raise NotImplementedError

    def must_call(self, functions: Sequence[Function], max_calls: int) -> Form:
        """Return the grammar of an output that consists of calls, at least one."""
        raise NotImplementedError

    def may_call(self, functions: Sequence[Function]) -> Form | None:
        """Return the grammar of an output in which all calls are valid; None if there is no such grammar."""
        raise NotImplementedError


class InferredFormat:
    """A format that a `CallFormat` describes, such as a format that was inferred from a chat template. `specials` maps
    the texts of special tokens to their ids."""

    opening_token: str | None = None
    is_spelled: bool = True

    def __init__(self, form: CallFormat, specials: Mapping[str, int], bare_calls: bool = True) -> None:
        self.form, self._bare_calls = form, bare_calls
        #: True if grammars of calls spell each argument, so that they need the schemas of all functions.
        self.needs_schemas = not isinstance(form.arguments, JsonArguments)
        self._specials = {text: token for text, token in specials.items() if any(text in x for x in form.literals())}

    @property
    def shows_special_tokens(self) -> bool:
        """Return whether special tokens are markup of calls, so that outputs must contain their text."""
        return bool(self._specials)

    def reader(self, is_open: bool = False, rules: CallRules = ANY_CALL) -> ToolReader:
        inner = CallFormatReader(self.form, rules)
        return with_bare_calls(inner, rules) if self._bare_calls and not self.form.is_bare else inner

    def must_call(self, functions: Sequence[Function], max_calls: int) -> Form:
        return Form(CallGrammar(self.form, self._specials).must_call(functions, max_calls), bool(self._specials))

    def may_call(self, functions: Sequence[Function]) -> Form | None:
        return Form(CallGrammar(self.form, self._specials).may_call(functions, self._bare_calls), bool(self._specials))


#: The format of each existing tokenizer that was examined; None for a format that cannot be parsed.
_KNOWN: WeakKeyDictionary[Tokenizer, ToolFormat | None] = WeakKeyDictionary()


def format_of(tokenizer: Tokenizer) -> ToolFormat:
    """Return the format of calls that a model's chat template writes. If the template writes no calls, the most common
    format is used. Raises `UnsupportedFeature` for calls that cannot be parsed."""
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = _find(tokenizer)
    known = _KNOWN[tokenizer]
    if known is None:
        raise UnsupportedFeature(
            "tools: got functions for a model whose chat template writes calls in an unknown format. "
            "Start the server with --tool-format NAME, or send no tools",
            "tools",
        )
    return known


def is_hermes(tokenizer: Tokenizer) -> bool:
    """Return whether calls have the most common format, whose usual explanation suffices."""
    kind = format_of(tokenizer)
    return isinstance(kind, InferredFormat) and kind.form == HERMES


def _find(tokenizer: Tokenizer) -> ToolFormat | None:
    name = tokenizer.chat_settings.tool_format
    return harmony_of(tokenizer) or _inferred(tokenizer) if name in FROM_TEMPLATE else _chosen(tokenizer, name)


def _inferred(tokenizer: Tokenizer) -> ToolFormat | None:
    form = inferred_from(tokenizer)
    if form is not None:
        return _named(form, tokenizer)
    found = _by_words(tokenizer)
    if found is None and prober_of(renderer_of(tokenizer.chat_template)) is None:
        found = InferredFormat(HERMES, _specials(tokenizer), tokenizer.chat_settings.bare_calls)
    _log.log(
        logging.WARNING if found is None else logging.INFO,
        "the chat template has no known format of tool calls: %s; --tool-format sets another format",
        "requests with tools are refused" if found is None else f"{described_as(found)['name']} is assumed",
    )
    return found


def _chosen(tokenizer: Tokenizer, name: str) -> ToolFormat:
    """Return the format that the operator configured. Raises `InvalidRequest` if there is no such format, or if the
    vocabulary lacks a token for it."""
    bare = tokenizer.chat_settings.bare_calls
    match preset_or_file(name):
        case "mistral":
            return _mistral(tokenizer)
        case "harmony":
            found = harmony_of(tokenizer)
            if found is None:
                raise InvalidRequest(
                    f"tool_format is {name!r}, but this model has no channels; choose another format, or auto",
                    "tool_format",
                )
            return found
        case CallFormat() as form:
            return InferredFormat(form, _specials(tokenizer), bare)


def described(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return plain data about the format of a model's calls: its name, and other known properties."""
    try:
        return described_as(format_of(tokenizer))
    except UnsupportedFeature:
        return {"name": UNKNOWN}


def described_as(kind: ToolFormat) -> dict[str, Any]:
    """Return plain data about a format: its name, and other known properties."""
    match kind:
        case InferredFormat(form=form):
            return {"name": name_of(form), **to_dict(form)}
        case found:
            return {"name": _NAMES[type(found)]}


_NAMES: dict[type, str] = {Mistral: "mistral", Harmony: "harmony"}


def inferred_from(tokenizer: Tokenizer) -> CallFormat | None:
    """Return the format that the model's chat template shows; None if the template writes no calls."""
    return infer_format(renderer_of(tokenizer.chat_template), tuple(map(tokenizer.token_text, tokenizer.eos_token_ids)))


def _named(form: CallFormat, tokenizer: Tokenizer) -> ToolFormat:
    """Return the format with its reader. Mistral's models write two formats, even if their template shows only one.
    Models write the calls of Hermes and Llama with the usual spaces, even if their template has other spaces."""
    if form.trigger == MARK:
        return _mistral(tokenizer)
    for usual in (HERMES, PRESETS["llama3_json"]):
        if _compact(form) == _compact(usual) and not form.section_open:
            return InferredFormat(usual, _specials(tokenizer), tokenizer.chat_settings.bare_calls)
    return InferredFormat(form, _specials(tokenizer), tokenizer.chat_settings.bare_calls)


def _compact(form: CallFormat) -> list[str]:
    return ["".join(part.split()) for part in form.call]


def _specials(tokenizer: Tokenizer) -> dict[str, int]:
    return {tokenizer.token_text(token): token for token in tokenizer.special_token_ids}


def _mistral(tokenizer: Tokenizer) -> Mistral:
    ends = [tokenizer.token_text(token) for token in tokenizer.eos_token_ids]
    return Mistral(ends, tokenizer.id_of(ARGS) is None, tokenizer.chat_settings.bare_calls)


def _by_words(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the format whose markup occurs in the template or the vocabulary; None if none does."""
    template = tokenizer.template_text
    if HERMES.trigger not in template and (MARK in template or tokenizer.id_of(MARK) is not None):
        return _mistral(tokenizer)
    told = [form for form in PRESETS.values() if form.trigger and form.trigger in template]
    is_llama = PYTHON_TAG in template or tokenizer.id_of(PYTHON_TAG) is not None or '"parameters": ' in template
    usual = PRESETS["llama3_json"] if is_llama else None
    form = HERMES if HERMES in told else max(told, key=lambda each: len(each.trigger), default=usual)
    return None if form is None else InferredFormat(form, _specials(tokenizer), tokenizer.chat_settings.bare_calls)


HERMES = PRESETS["hermes"]


def shows_special_tokens(kind: ToolFormat) -> bool:
    """Return whether outputs must contain the text of special tokens, so that calls can be parsed."""
    return isinstance(kind, Harmony) or (isinstance(kind, InferredFormat) and kind.shows_special_tokens)
