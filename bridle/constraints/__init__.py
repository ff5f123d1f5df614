"""Constraints: regexes, JSON schemas, grammars, choices and quotations that a generated text must fit.

    LLM("demo").generate("A random digit: ", constraint=Regex("[0-9]"))

Masks come from llguidance, which is imported when the first constraint is compiled.
"""

from bridle.constraints.limits import ConstraintLimits
from bridle.constraints.pool import ConstraintPool
from bridle.constraints.spec import (
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
from bridle.constraints.vocabulary import Vocabulary, vocabulary_of

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
    "Vocabulary",
    "Yacc",
    "parse",
    "vocabulary_of",
]
