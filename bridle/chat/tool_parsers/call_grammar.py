"""Grammars of calls in any format that a `CallFormat` describes.

Markup that is a special token is written by its id; all other markup is text. Arguments follow each function's schema:
JSON by the schema itself, tagged arguments one by one in the order of the schema's properties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from bridle.chat.tool_parsers import call_format as cf
from bridle.chat.tool_parsers.argument_grammar import ArgumentGrammar, pattern
from bridle.chat.tool_parsers.grammar import Function, quoted
from bridle.chat.tool_parsers.untagged import free_text

#: Matches keys on separate lines, by which a template shows that it indents JSON.
_INDENTED = re.compile(r',\s*\n\s*"')
#: The maximum number of calls in one output, if the request sets no limit.
MAX_CALLS = 64


class CallGrammar(ArgumentGrammar):
    """Writes grammars of calls in Lark's notation. `specials` maps the text of special tokens to their ids."""

    def __init__(self, form: cf.CallFormat, specials: Mapping[str, int]) -> None:
        used = {text: token for text, token in specials.items() if any(text in x for x in form.literals())}
        super().__init__(form.arguments, used)
        self._form = form
        self._call_end = form.closing
        self._is_indented = any(_INDENTED.search(part) for part in form.call)

    def must_call(self, functions: Sequence[Function], max_calls: int) -> str:
        """Return the grammar of an output that consists of calls, at least one."""
        self._rules = []
        self._call_rules(functions)
        limit = min(max_calls, self._form.max_calls or max_calls)
        return "\n".join([f"start: {self._whole_section(limit)}", *self._rules, ""])

    def may_call(self, functions: Sequence[Function], reads_bare: bool = False) -> str:
        """Return the grammar of an output that may contain text and valid calls. With `reads_bare`, calls of strict
        functions without markup must be valid, too."""
        self._rules = []
        self._call_rules(functions)
        if self._form.is_bare:
            self._rules.append(r"TEXT: /\s*([^\s\{\[](?s:.)*)?/")
            whole = self._whole_section(self._form.max_calls or MAX_CALLS)
            return "\n".join([f"start: {whole} | TEXT", *self._rules, ""])
        if self._form.is_prompted:
            whole = self._whole_section(self._form.max_calls or MAX_CALLS)
            plain = self._literal(self._form.content_open.removeprefix(self._form.opening))
            self._rules.append(f"TAIL: /(?s:.*)/ & ~/(?s:.*){pattern(self._form.opening)}(?s:.*)/")
            self._rules.append(f"free[suffix={quoted(self._form.opening)}]: /(?s:.*)/")
            return "\n".join([f"start: {whole} | {plain} (TAIL | free {whole})", *self._rules, ""])
        trigger, section = self._split_section()
        token = self._literal(trigger) if trigger in self._specials else ""
        return "\n".join([*free_text(trigger, f"({section})", functions, reads_bare, token), *self._rules, ""])

    def _split_section(self) -> tuple[str, str]:
        """Return the text or special token that begins calls, and the grammar of the text after it."""
        form = self._form
        limit = form.max_calls or MAX_CALLS
        whole = form.section_open or form.opening
        special = next((text for text in self._specials if whole.startswith(text)), None)
        trigger = special or whole[: min(self._first_special(whole), len(form.trigger))]
        rest = whole[len(trigger) :]
        if form.section_open:
            return trigger, self._section(rest, limit)
        return trigger, self._first_and_more(rest, limit)

    def _whole_section(self, max_calls: int) -> str:
        """Return the rule for an output that begins with calls, without the part that is already in the prompt."""
        return (
            self._first_and_more("", max_calls)
            if self._form.is_prompted
            else self._section(self._form.section_open, max_calls)
        )

    def _first_and_more(self, opening: str, max_calls: int) -> str:
        """Return the rule for calls of which the first begins with `opening`."""
        self._rules.append("first: " + " | ".join(f"first_{number}" for number in range(self._num_functions)))
        self._rules += [f"first_{number}: {self._call(each, opening)}" for number, each in enumerate(self._functions)]
        more = f" ({self._literal(self._form.separator)} one){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        return f"first{more}"

    def _section(self, opening: str, max_calls: int) -> str:
        form = self._form
        more = f" ({self._literal(form.separator)} one){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        return f"{self._literal(opening)} one{more} {self._literal(form.section_close)}"

    def _call_rules(self, functions: Sequence[Function]) -> None:
        self._functions, self._num_functions = functions, len(functions)
        names = [f"call_{number}" for number in range(len(functions))]
        self._rules.append("one: " + " | ".join(names))
        self._rules += [f"{name}: {self._call(each)}" for name, each in zip(names, functions, strict=True)]

    def _call(self, function: Function, opening: str | None = None) -> str:
        """Return the right side of a rule for a call. `opening` replaces the call's first literal."""
        made: list[str] = []
        for place, part in enumerate(self._form.call):
            if place == 0 and opening is not None and part not in cf.FIELDS:
                part = opening
            made.append(self._part(part, place, function))
        return " ".join(each for each in made if each) or '""'

    def _part(self, part: str, place: int, function: Function) -> str:
        if part == cf.NAME:
            is_json = self._form.name_key is not None
            text = json.dumps(function.name, ensure_ascii=False)[1:-1] if is_json else function.name
            return quoted(text)
        if part == cf.ID:
            return "/[0-9A-Za-z_]{1,40}/"
        if part == cf.INDEX:
            return "/[0-9]{1,4}/"
        return self._arguments(function) if part == cf.ARGUMENTS else self._literal(part)
