"""Which way of writing calls a model has learned, as its chat template and its vocabulary tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from bridle.chat.stream_deltas import ANY_CALL, CallRules, ToolReader
from bridle.chat.tool_parsers.grammar import Form, Function
from bridle.chat.tool_parsers.hermes import OPEN, Hermes
from bridle.chat.tool_parsers.llama import PYTHON_TAG, Llama
from bridle.chat.tool_parsers.mistral import ARGS, MARK, Mistral

if TYPE_CHECKING:
    from bridle.tokenizer import Tokenizer


class ToolFormat(Protocol):
    """How calls are written. `opening_token` is the special token that begins them, for formats that have one;
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


def format_of(tokenizer: Tokenizer) -> ToolFormat:
    """The format of a model. One whose template says nothing is read for tags, as most are."""
    template = tokenizer.template_text
    if OPEN in template:
        return Hermes()
    if MARK in template or tokenizer.id_of(MARK) is not None:
        ends = [tokenizer.token_text(token) for token in tokenizer.eos_token_ids]
        return Mistral(ends, is_spelled=tokenizer.id_of(ARGS) is None)
    if PYTHON_TAG in template or tokenizer.id_of(PYTHON_TAG) is not None or '"parameters": ' in template:
        return Llama()
    return Hermes()
