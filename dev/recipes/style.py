"""Cases of the recipe `style`: questions about everyday things. An answer must have three short, plain sentences that
begin differently."""

from __future__ import annotations

import re
from random import Random

from dev.recipes.recipe import Case, Recipe

_WORDS, _LETTERS, _SENTENCES = 14, 10, 3
_THINGS = (
    "garden bicycle library bridge candle market river violin bakery mirror camera forest harbor kitchen lantern "
    "museum needle orchard pencil school teapot umbrella village window blanket compass doorbell engine ferry glacier "
    "hammer island"
)
_ASKS = ("What is a {}?", "Why do people like a {}?", "What can you do with a {}?", "Tell a child about a {}.")
_SYSTEM = (
    f"Answer in exactly {_SENTENCES} sentences of at most {_WORDS} words. Use no word of more than {_LETTERS} letters. "
    "Begin each sentence with another word."
)
#: The rules that a grammar can express: it cannot compare the beginnings of sentences.
_FORM = {
    "gbnf": f'root ::= sentence{{{_SENTENCES - 1}}} last\nsentence ::= text ". "\nlast ::= text "."\n'
    f'text ::= [A-Z] [a-z]{{0,{_LETTERS - 1}}} (","? " " word){{2,{_WORDS - 1}}}\nword ::= [A-Za-z]{{1,{_LETTERS}}}\n'
}
#: Last words of sentences that were cut off.
_CUT = "a an and are as at by for from in is of on or that the their to with your"


def cases(count: int, seed: int) -> list[Case]:
    """Return different questions in an order that depends on the seed."""
    asked = [ask.format(thing) for ask in _ASKS for thing in _THINGS.split()]
    Random(seed).shuffle(asked)
    return [_case(question) for question in asked[:count]]


def _case(question: str) -> Case:
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
    return Case(question, messages, None, _FORM)


def is_right(case: Case, text: str) -> bool:
    """Return whether the answer follows all rules and no sentence was cut off."""
    sentences = re.findall(r"[^.!?]+[.!?]", text.strip())
    words = [re.findall(r"[\w'-]+", each) for each in sentences]
    if len(sentences) != _SENTENCES or "".join(sentences) != text.strip() or not all(words):
        return False
    is_short = all(3 <= len(each) <= _WORDS and max(map(len, each)) <= _LETTERS for each in words)
    is_varied = len({each[0].lower() for each in words}) == _SENTENCES
    return is_short and is_varied and not any(each[-1].lower() in _CUT.split() for each in words)


RECIPE = Recipe("style.py", 90, cases, is_right)
