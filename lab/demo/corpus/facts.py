"""Exercises about the facts of the world: statements, questions, and yes/no questions."""

from __future__ import annotations

import random

from lab.demo.corpus import phrasings, world
from lab.demo.corpus.document import Exercise, ask, complete
from lab.demo.corpus.phrasings import RELATIONS, Relation, sentence

_WEIGHTS = [len(relation.facts) for relation in RELATIONS]


def statement(rng: random.Random) -> Exercise:
    """A statement to complete: `The capital of France is` goes on with ` Paris.`."""
    relation, subject = _draw(rng)
    template = rng.choice(relation.statements)
    obj = relation.facts[subject]
    return complete("fact", ("fact", relation.name, subject, template), sentence(template, subject), f" {obj}.")


def question(rng: random.Random) -> Exercise:
    """A question about a fact; the answer is the same sentence for every way of asking."""
    relation, subject = _draw(rng)
    template = rng.choice(relation.questions)
    answer = sentence(relation.answer, subject, relation.facts[subject])
    return ask("fact", ("fact", relation.name, subject, template), sentence(template, subject), answer)


def short_answer(rng: random.Random) -> Exercise:
    """A question under a system message that asks for the bare object: `Paris`."""
    relation, subject = _draw(rng)
    template = rng.choice(relation.questions)
    system = rng.choice(("Answer in one word.", "Answer with one word only.", "Be brief. Answer in one word."))
    messages = (
        {"role": "system", "content": system},
        {"role": "user", "content": sentence(template, subject)},
        {"role": "assistant", "content": relation.facts[subject]},
    )
    return Exercise("fact", ("fact", relation.name, subject, template), messages, is_alone=True)


def yes_no(rng: random.Random) -> Exercise:
    """A yes/no question, true half of the time, answered with the bare verdict."""
    make = rng.choice((_about_kind, _about_pair, _about_pair, _about_flying, _about_legs, _about_numbers))
    text, is_true = make(rng, rng.random() < 0.5)
    prefix = rng.choice(("", "", "", "Yes or no: ", "True or not: "))
    return ask("yes/no", ("yes/no", prefix, text), prefix + text, "Yes." if is_true else "No.")


def checked(rng: random.Random) -> Exercise:
    """A yes/no question about a fact that is recalled between `<think>` marks before the verdict."""
    relation, subject, text, is_true = _pair(rng, rng.random() < 0.5)
    thoughts = sentence(relation.answer, subject, relation.facts[subject])
    verdict = "Yes." if is_true else "No."
    messages = (
        {"role": "user", "content": text},
        {"role": "assistant", "content": verdict, "reasoning_content": thoughts},
    )
    return Exercise("think", ("yes/no", "", text), messages, thinking=True)


def larger(rng: random.Random) -> Exercise:
    """Which of two numbers is the larger or the smaller one."""
    first, second = rng.sample(range(100), 2)
    word = rng.choice(("larger", "greater", "smaller", "less"))
    text = f"Which is {word}, {first} or {second}?"
    number = max(first, second) if word in ("larger", "greater") else min(first, second)
    return ask("larger", ("larger", text), text, f"{number}.")


def _draw(rng: random.Random) -> tuple[Relation, str]:
    (relation,) = rng.choices(RELATIONS, _WEIGHTS)
    return relation, rng.choice(list(relation.facts))


def _other(rng: random.Random, values: list[str], value: str) -> str:
    return rng.choice([candidate for candidate in dict.fromkeys(values) if candidate != value])


def _about_kind(rng: random.Random, is_true: bool) -> tuple[str, bool]:
    facts = phrasings.KINDS.facts
    animal = rng.choice(list(facts))
    kind = facts[animal] if is_true else _other(rng, list(facts.values()), facts[animal])
    return rng.choice(("Is {s} {o}?", "Would you say that {s} is {o}?", "Is it true that {s} is {o}?")).format(
        s=animal, o=kind
    ), is_true


_PAIR_QUESTIONS: tuple[tuple[Relation, tuple[str, ...]], ...] = (
    (phrasings.CAPITALS, ("Is {o} the capital of {s}?", "Is the capital of {s} {o}?",
    "Is it true that {o} is the capital of {s}?")),
    (phrasings.LANGUAGES, ("Do people in {s} speak {o}?", "Is {o} spoken in {s}?",
    "Is it true that people in {s} speak {o}?")),
    (phrasings.CONTINENTS, ("Is {s} in {o}?", "Does {s} lie in {o}?", "Is it true that {s} is in {o}?")),
    (phrasings.COLORS, ("Is {s} {o}?", "Is {o} the color of {s}?", "Is it true that {s} is {o}?")),
    (phrasings.OPPOSITES, ("Is {s} the opposite of {o}?", "Is {o} the opposite of {s}?")),
)  # fmt: skip


def _about_pair(rng: random.Random, is_true: bool) -> tuple[str, bool]:
    _, _, text, is_true = _pair(rng, is_true)
    return text, is_true


def _pair(rng: random.Random, is_true: bool) -> tuple[Relation, str, str, bool]:
    """A relation, a subject, and a question whether some object is its own, with the verdict."""
    relation, templates = rng.choice(_PAIR_QUESTIONS)
    subject = rng.choice(list(relation.facts))
    obj = relation.facts[subject]
    if not is_true:
        obj = _other(rng, list(relation.facts.values()), obj)
        if obj == subject:
            is_true, obj = True, relation.facts[subject]
    return relation, subject, rng.choice(templates).format(s=subject, o=obj), is_true


def _about_flying(rng: random.Random, is_true: bool) -> tuple[str, bool]:
    animal = rng.choice([name for name, row in world.ANIMALS.items() if row[3] is is_true])
    text = rng.choice(("Can {s} fly?", "Is {s} able to fly?", "Does {s} fly?", "Is it true that {s} can fly?"))
    return text.format(s=world.with_article(animal)), is_true


def _about_legs(rng: random.Random, is_true: bool) -> tuple[str, bool]:
    facts = phrasings.LEGS.facts
    animal = rng.choice(list(facts))
    legs = facts[animal] if is_true else _other(rng, list(facts.values()), facts[animal])
    text = rng.choice(("Does {s} have {o} legs?", "Is it true that {s} has {o} legs?", "Has {s} got {o} legs?"))
    return text.format(s=animal, o=legs), is_true


def _about_numbers(rng: random.Random, is_true: bool) -> tuple[str, bool]:
    low, high = sorted(rng.sample(range(100), 2))
    if rng.random() < 0.3:
        parity = "even" if (low % 2 == 0) is is_true else "odd"
        return f"Is {low} {parity}?", is_true
    word, larger_first = rng.choice(
        (("greater than", True), ("larger than", True), ("less than", False), ("smaller than", False))
    )
    first, second = (high, low) if larger_first is is_true else (low, high)
    return f"Is {first} {word} {second}?", is_true
