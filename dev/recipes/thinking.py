"""Cases of the recipe `thinking`: short word problems, with at most forty words of reasoning before the answer."""

from __future__ import annotations

from random import Random

from dev.recipes.calculator import is_right as ends_right
from dev.recipes.calculator import problem
from dev.recipes.recipe import Case, Recipe

_BUDGET = 40
_SYSTEM = (
    f"Think first, in short sentences and at most {_BUDGET} words. Then write, in a line of its own: The answer is N."
)
_EXAMPLE = [
    {"role": "user", "content": "Mia buys 4 cards for 9 cents each and a pen for 20 cents. How many cents is that?"},
    {
        "role": "assistant",
        "content": "The cards cost 4 * 9 = 36 cents. The pen makes it 36 + 20 = 56.\nThe answer is 56.",
    },
]
#: The simple way to limit thoughts: a number of characters, about as many as forty words have.
_FORM = {"gbnf": 'root ::= [^\\n]{20,200} "\\nThe answer is " [0-9]{1,9} "."\n'}


def cases(count: int, seed: int) -> list[Case]:
    """Return `count` cases, each with its own seed."""
    return [_case(f"{seed}-thinking-{number}") for number in range(count)]


def _case(key: str) -> Case:
    question, solution = problem(Random(key), 3, 20)
    messages = [{"role": "system", "content": _SYSTEM}, *_EXAMPLE, {"role": "user", "content": question}]
    return Case(key, messages, solution, _FORM, {"BUDGET": _BUDGET})


def is_right(case: Case, text: str) -> bool:
    """Return whether the reasoning is within the budget and ends with a complete sentence, and the answer is right."""
    thought, mark, _ = text.partition("The answer is")
    is_kept = len(thought.split()) <= _BUDGET and thought.rstrip().endswith((".", "!", "?"))
    return bool(mark) and is_kept and ends_right(case, text)


RECIPE = Recipe("thinking.py", 120, cases, is_right)
