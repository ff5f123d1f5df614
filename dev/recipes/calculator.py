"""Cases of the recipe `calculator`: word problems of two calculations with numbers of two to four digits."""

from __future__ import annotations

import re
from random import Random

from dev.recipes.recipe import Case, Recipe

_SYSTEM = (
    "Solve the problem. Write each calculation in a line of its own, such as 12 * 3 = 36. "
    "The last line is: The answer is N."
)
_EXAMPLE = [
    {"role": "user", "content": "Mia buys 12 cards for 31 cents each and a pen for 90 cents. How many cents is that?"},
    {"role": "assistant", "content": "12 * 31 = 372\n372 + 90 = 462\nThe answer is 462."},
]
FORM = {
    "gbnf": 'root ::= step{1,3} "The answer is " number "."\n'
    'step ::= number (" " [-+*/] " " number)+ " = " number "\\n"\nnumber ::= [0-9]{1,9}\n'
}


def problem(random: Random, small: int, large: int) -> tuple[str, int]:
    """Return a problem with numbers between `small` and `large`, and its solution."""
    a, b, c = random.randint(small, large), random.randint(small, large), random.randint(small, large)
    kinds = (
        (f"Tom buys {a} pens for {b} cents each and a bag for {c} cents. How many cents is that?", a * b + c),
        (f"A hall has {a} rows with {b} seats each. {c} seats are taken. How many seats are free?", a * b - c),
        (
            f"A farm sells {a} eggs on Monday and {b} on Tuesday, for {c} cents each. How many cents is that?",
            (a + b) * c,
        ),
        (f"A train carries {a + b} people. {b} get off and {c} get on. How many people are on it now?", a + c),
        (f"One box holds {a} bolts, another one {b}. How many bolts are in {c} pairs of such boxes?", (a + b) * c),
    )
    return random.choice([kind for kind in kinds if kind[1] > 0])


def cases(count: int, seed: int) -> list[Case]:
    """Return `count` cases. Each case has its own seed, so a smaller count gives the first cases of a larger one."""
    return [case_of(f"{seed}-{number}", 12, 999) for number in range(count)]


def case_of(key: str, small: int, large: int) -> Case:
    """Return a case whose problem has numbers between `small` and `large`."""
    question, solution = problem(Random(key), small, large)
    messages = [{"role": "system", "content": _SYSTEM}, *_EXAMPLE, {"role": "user", "content": question}]
    return Case(key, messages, solution, FORM)


def is_right(case: Case, text: str) -> bool:
    """Return whether the last number of the text is the solution."""
    numbers = re.findall(r"\d[\d,]*", text)
    return bool(numbers) and int(numbers[-1].replace(",", "")) == case.known


RECIPE = Recipe("calculator.py", 80, cases, is_right)
