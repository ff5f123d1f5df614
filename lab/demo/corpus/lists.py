"""Exercises with lists: counting, series, members of a group, reversing, and JSON or bullet form."""

from __future__ import annotations

import json
import random

from lab.demo.corpus import world
from lab.demo.corpus.document import Exercise, ask

_NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven"}


def any_list(rng: random.Random) -> Exercise:
    """One list exercise of any kind."""
    return rng.choice((counting, series, members, members, reverse))(rng)


def counting(rng: random.Random) -> Exercise:
    """Numbers in a row, upward by one or by two."""
    start, length = rng.randrange(90), rng.randrange(3, 10)
    step = rng.choice((1, 1, 1, 2))
    numbers = [str(n) for n in range(start, min(start + length * step, 100), step)]
    template = rng.choice(
        (
            "Count from {a} to {b}{by}.",
            "List the numbers from {a} to {b}{by}.",
            "Give me the numbers from {a} to {b}{by}.",
        )
    )
    question = template.format(a=numbers[0], b=numbers[-1], by=" in steps of two" if step == 2 else "")
    return _with_form(rng, question, numbers)


def series(rng: random.Random) -> Exercise:
    """A stretch of the days, months, planets or letters."""
    name = rng.choice(list(world.SERIES))
    items = world.SERIES[name]
    start = rng.randrange(len(items) - 1)
    end = rng.randrange(start + 1, min(len(items), start + 9))
    template = rng.choice(
        (
            "List the {n} from {a} to {b}.",
            "Name the {n} from {a} to {b}.",
            "What are the {n} from {a} to {b}?",
        )
    )
    return _with_form(rng, template.format(n=name, a=items[start], b=items[end]), list(items[start : end + 1]))


def members(rng: random.Random) -> Exercise:
    """The first few members of a group, in the world's order."""
    group = rng.choice(list(world.GROUPS))
    number = rng.choice(list(_NUMBER_WORDS))
    template = rng.choice(
        ("List {k} {g}.", "Name {k} {g}.", "Give me {k} {g}.", "Tell me {k} {g}.", "Write a list of {k} {g}.",
         "I need {k} {g}.", "Can you name {k} {g}?", "Please list {k} {g}.")
    )  # fmt: skip
    return _with_form(rng, template.format(k=_NUMBER_WORDS[number], g=group), list(world.GROUPS[group][:number]))


def reverse(rng: random.Random) -> Exercise:
    """A list of three or four words to turn around."""
    items = rng.sample(world.GROUPS[rng.choice(list(world.GROUPS))], rng.randrange(3, 5))
    question = rng.choice(("Reverse this list: {x}", "Turn this list around: {x}")).format(x=", ".join(items))
    return ask("list", ("list", question), question, ", ".join(reversed(items)))


def _with_form(rng: random.Random, question: str, items: list[str]) -> Exercise:
    form = rng.choice(("commas", "commas", "commas", "json", "bullets", "numbers"))
    hint = {"commas": "", "json": " Answer in JSON.", "bullets": " Use bullets.", "numbers": " Use numbers."}[form]
    text = {
        "commas": ", ".join(items),
        "json": json.dumps(items),
        "bullets": "\n".join(f"- {item}" for item in items),
        "numbers": "\n".join(f"{index}. {item}" for index, item in enumerate(items, 1)),
    }[form]
    return ask("list", ("list", question, form), question + hint, text)
