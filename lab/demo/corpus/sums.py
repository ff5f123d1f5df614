"""Exercises in arithmetic: sums up to 99, sums of two numbers up to 99, differences, and sums thought
through.

Answers always have the one form `12 + 34 = 46`, whatever the question. A pair of numbers is held out in both
orders, in every wording, and in the worked form.
"""

from __future__ import annotations

import random

from lab.demo.corpus.document import Exercise, ask, complete
from lab.demo.corpus.split import Split, split_of

_SUM_QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
)
_DIFFERENCE_QUESTIONS = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
    "{a} - {b} = ?",
)


def question(rng: random.Random) -> Exercise:
    """A sum asked in words or signs."""
    a, b = _pair(rng)
    return ask("sum", _sum_key(a, b), rng.choice(_SUM_QUESTIONS).format(a=a, b=b), f"{a} + {b} = {a + b}")


def completion(rng: random.Random) -> Exercise:
    """A sum to complete: `12 + 34 =` goes on with ` 46`."""
    a, b = _pair(rng)
    return complete("sum", _sum_key(a, b), f"{a} + {b} =", f" {a + b}")


def difference(rng: random.Random) -> Exercise:
    """A difference that is not negative, asked or to complete."""
    b, a = sorted((rng.randrange(100), rng.randrange(100)))
    key = ("difference", str(a), str(b))
    if rng.random() < 0.4:
        return complete("difference", key, f"{a} - {b} =", f" {a - b}")
    return ask("difference", key, rng.choice(_DIFFERENCE_QUESTIONS).format(a=a, b=b), f"{a} - {b} = {a - b}")


def thought(rng: random.Random) -> Exercise:
    """A sum worked digit by digit between `<think>` marks before it is answered."""
    a, b = _pair(rng)
    messages = (
        {"role": "user", "content": rng.choice(_SUM_QUESTIONS).format(a=a, b=b)},
        {"role": "assistant", "content": f"{a} + {b} = {a + b}", "reasoning_content": worked(a, b)},
    )
    return Exercise("think", _sum_key(a, b), messages, thinking=True)


def drill(rng: random.Random, split: Split) -> str:
    """Many sums under one heading: the cheapest way to practice."""
    lines = ["Sums:"]
    while len(lines) < 13:
        a, b = _pair(rng)
        if split_of(_sum_key(a, b)) == split:
            lines.append(f"{a} + {b} = {a + b}")
    return "\n".join(lines)


def worked(a: int, b: int) -> str:
    """The steps of a sum: the ones with their carry, then the tens."""
    carry, ones = divmod(a % 10 + b % 10, 10)
    lines = [f"ones: {a % 10} + {b % 10} = {10 * carry + ones}"]
    if a >= 10 or b >= 10 or carry:
        extra = f" + {carry}" if carry else ""
        lines.append(f"tens: {a // 10} + {b // 10}{extra} = {a // 10 + b // 10 + carry}")
    return "\n".join(lines)


def _pair(rng: random.Random) -> tuple[int, int]:
    """Mostly pairs with a sum up to 99; every fifth is any pair of numbers below 100."""
    if rng.random() < 0.2:
        return rng.randrange(100), rng.randrange(100)
    total = rng.randrange(100) if rng.random() < 0.3 else rng.randrange(10, 100)
    a = rng.randrange(total + 1)
    return a, total - a


def _sum_key(a: int, b: int) -> tuple[str, ...]:
    return ("sum", str(min(a, b)), str(max(a, b)))
