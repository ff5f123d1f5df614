"""Constraints: regexes, JSON schemas, grammars, choices and quotations that a generated text must fit.

    LLM("demo").generate("A random digit: ", constraint=Regex("[0-9]"))

Masks come from llguidance, which is imported when the first constraint is compiled. Modules of this package are
imported when one of their names is first used.
"""

from typing import TYPE_CHECKING

from bridle.lazy_names import lazy_names

if TYPE_CHECKING:
    from bridle.structured_output.limits import ConstraintLimits as ConstraintLimits
    from bridle.structured_output.pool import ConstraintPool as ConstraintPool
    from bridle.structured_output.spec import After as After
    from bridle.structured_output.spec import Choice as Choice
    from bridle.structured_output.spec import Concat as Concat
    from bridle.structured_output.spec import Constraint as Constraint
    from bridle.structured_output.spec import Gbnf as Gbnf
    from bridle.structured_output.spec import JsonObject as JsonObject
    from bridle.structured_output.spec import JsonSchema as JsonSchema
    from bridle.structured_output.spec import Lark as Lark
    from bridle.structured_output.spec import OneOf as OneOf
    from bridle.structured_output.spec import Regex as Regex
    from bridle.structured_output.spec import Substring as Substring
    from bridle.structured_output.spec import Yacc as Yacc
    from bridle.structured_output.spec import parse as parse
    from bridle.structured_output.vocabulary import GrammarVocabulary as GrammarVocabulary
    from bridle.structured_output.vocabulary import vocabulary_of as vocabulary_of
else:
    __getattr__, __all__ = lazy_names(
        __name__,
        {
            "limits": "ConstraintLimits",
            "pool": "ConstraintPool",
            "spec": "After Choice Concat Constraint Gbnf JsonObject JsonSchema Lark OneOf Regex Substring Yacc parse",
            "vocabulary": "GrammarVocabulary vocabulary_of",
        },
    )
