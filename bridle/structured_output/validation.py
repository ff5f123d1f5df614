"""Validates constraints: a child process tests whether a constraint can be used, and with which grammar. This module
does not use a model's vocabulary."""

from __future__ import annotations

import re
from contextlib import suppress

from bridle.errors import InvalidRequest
from bridle.structured_output.compile_sandbox import NOT_USABLE, CompileSandbox, GrammarRefused
from bridle.structured_output.grammar import grammar_of, has_tokens, without_tokens
from bridle.structured_output.limits import ConstraintLimits
from bridle.structured_output.schema_fault import fault_path
from bridle.structured_output.spec import Constraint, Gbnf, JsonSchema, Lark, Regex, Yacc
from bridle.structured_output.vocabulary import load_llguidance

#: Names of kinds of constraints in the message of a refusal.
_CALLED: dict[type[Constraint], str] = {
    JsonSchema: "the schema",
    Regex: "the regex",
    Lark: "the grammar",
    Gbnf: "the grammar",
    Yacc: "the grammar",
}
#: The position of an error in llguidance's messages: the line, and in brackets the column.
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")


def usable(constraint: Constraint, trials: CompileSandbox) -> tuple[str, int]:
    """Return a grammar that compiled in a child process, and its size in bytes. If a schema is refused, an equivalent
    schema in supported keywords is tested. Raises `InvalidRequest` with the problem of the constraint."""
    grammar = grammar_of(constraint)
    try:
        return grammar, trials.try_grammar(without_tokens(grammar) if has_tokens(constraint) else grammar)
    except GrammarRefused as refusal:
        other = grammar_of(constraint, in_other_words=True)
        if other != grammar:
            with suppress(InvalidRequest):
                return other, trials.try_grammar(other)
        path = fault_path(constraint, trials, refusal) if isinstance(constraint, JsonSchema) else ""
        told = _told(constraint, str(refusal)) + (f", at {path}" if path else "")
        raise GrammarRefused(told, refusal.param) from None  # for the schema as its author wrote it


def check_usable(constraint: Constraint) -> None:
    """Raise `InvalidRequest` with the problem if no request could use the constraint. Starts a process."""
    load_llguidance()
    trials = CompileSandbox(ConstraintLimits(num_compilers=1))
    try:
        usable(constraint, trials)
    finally:
        trials.close()


def _told(constraint: Constraint, message: str) -> str:
    """Return the error of a refused grammar, in words that fit the client's constraint. Positions in the error refer to
    the tested grammar, so they are kept only if the client wrote this grammar."""
    reason = message.removeprefix(NOT_USABLE)
    place = r"line \1, column \2: " if isinstance(constraint, Lark) else ""
    called = _CALLED.get(type(constraint), "the constraint's grammar")
    return f"{called} is not usable: {_PLACE.sub(place, reason, count=1)}"
