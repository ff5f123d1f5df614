"""Cases of the recipe `quote`: invented facts among sentences of Python's reference, which is part of Python as
`pydoc_data.topics` (PSF licence)."""

from __future__ import annotations

import json
import re
from functools import cache
from pydoc_data.topics import topics
from random import Random

from dev.recipes.recipe import Case, Recipe

_SHORTEST, _LONGEST = 40, 120
_NUM_FACTS, _NUM_OTHERS = 4, 4
_PLACES = ("Arlen", "Brinmoor", "Caldera", "Dunmere", "Elswick", "Farholt", "Gorsley", "Hexby")
#: A sentence about a place, and the question that it answers.
_FACTS = (
    (
        "In {year}, workers from the north finished the old bridge of {place}.",
        "When was the bridge of {place} finished?",
    ),
    ("It was {name} who designed the town hall of {place}.", "Who designed the town hall of {place}?"),
    ("About {count} people live in {place} today.", "How many people live in {place}?"),
    ("Since {year}, a railway has connected {place} with the coast.", "Since when has {place} had a railway?"),
    ("The baker {name} won the last election in {place}.", "Who won the last election in {place}?"),
    (
        "Every spring, {count} visitors come to the market of {place}.",
        "How many visitors come to the market of {place}?",
    ),
)
_NAMES = ("Ada Brook", "Carl Dean", "Emma Frost", "Gus Hale", "Iris Jones", "Karl Lind", "Mona Nash", "Otto Pryce")
_ASK = "{article}\n\n{question} Answer with the sentence of the text that says so, word for word, and nothing else."


@cache
def _sentences() -> tuple[str, ...]:
    """Return plain sentences of Python's reference, each once."""
    found = dict[str, None]()
    for _, text in sorted(topics.items()):
        for paragraph in text.split("\n\n"):
            for sentence in re.split(r"(?<=[.]) +(?=[A-Z])", " ".join(paragraph.split())):
                if re.fullmatch(r"[A-Z][A-Za-z ,']+\.", sentence) and _SHORTEST <= len(sentence) <= _LONGEST:
                    found[sentence] = None
    return tuple(found)


def cases(count: int, seed: int) -> list[Case]:
    """Return `count` cases, each with its own seed and article."""
    return [_case(f"{seed}-{number}") for number in range(count)]


def _case(key: str) -> Case:
    random = Random(key)
    facts = [
        [
            text.format(place=place, name=name, year=random.randint(1700, 1950), count=random.randint(1200, 9800))
            for text in kind
        ]
        for place, name, kind in zip(
            random.sample(_PLACES, _NUM_FACTS),
            random.sample(_NAMES, _NUM_FACTS),
            random.choices(_FACTS, k=_NUM_FACTS),
            strict=True,
        )
    ]
    wanted, question = random.choice(facts)
    sentences = [fact for fact, _ in facts] + random.sample(_sentences(), _NUM_OTHERS)
    random.shuffle(sentences)
    article = " ".join(sentences)
    form = {"gbnf": "root ::= " + " | ".join(json.dumps(each) for each in sentences) + "\n"}
    return Case(
        key,
        [{"role": "user", "content": _ASK.format(article=article, question=question)}],
        wanted,
        form,
        {"ARTICLE": article},
    )


def is_right(case: Case, text: str) -> bool:
    """Return whether the text is the wanted sentence, exactly as in the article, with or without quotation marks."""
    known: str = case.known
    return text.strip().strip('"“”') == known


RECIPE = Recipe("quote.py", 60, cases, is_right)
