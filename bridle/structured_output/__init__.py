"""Constraints: regexes, JSON schemas, grammars, choices and quotations that a generated text must fit.

    LLM("demo").generate("A random digit: ", constraint=Regex("[0-9]"))

Masks come from llguidance, which is imported when the first constraint is compiled.
"""

from bridle.structured_output.limits import ConstraintLimits
from bridle.structured_output.pool import ConstraintPool
from bridle.structured_output.spec import (
    After,
    Choice,
    Concat,
    Constraint,
    Gbnf,
    JsonObject,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Substring,
    Yacc,
    parse,
)
from bridle.structured_output.vocabulary import GrammarVocabulary, vocabulary_of

__all__ = [
    "After",
    "Choice",
    "Concat",
    "Constraint",
    "ConstraintLimits",
    "ConstraintPool",
    "Gbnf",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "OneOf",
    "Regex",
    "Substring",
    "GrammarVocabulary",
    "Yacc",
    "parse",
    "vocabulary_of",
]
