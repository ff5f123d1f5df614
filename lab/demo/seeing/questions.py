"""What is asked about a scene, and the one right answer: kinds of questions, each in several wordings.

A question that a scene leaves open is not asked: of two circles none is "the circle". Every answer is one sentence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lab.demo.seeing.scenes import COLORS, PLACES, SHAPES, Scene, Thing

NO_PICTURE = "I see no picture."
HELLO = "Hello! Ask me about a picture of shapes."
UNKNOWN = "I only know shapes, colors and places."
NUMBERS = ("None.", "One.", "Two.", "Three.", "Four.")


class Question(NamedTuple):
    """A question of some kind, and its answer."""

    kind: str
    text: str
    answer: str


def _place(rng: random.Random, scene: Scene) -> tuple[str, str]:
    place = rng.randrange(len(PLACES))
    asked = rng.choice(("What is in the {}?", "What is {}?", "What do you see in the {}?", "Which shape is in the {}?"))
    return asked.format(PLACES[place]), _named(scene[place])


def _color(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    """The color of the shape in a place, or of the only one of its shape."""
    word = rng.choice(("color", "color", "colour"))
    if rng.random() < 0.3:
        place, thing = _some_place(rng, scene)
        asked = rng.choice(("What {} is the shape in the {}?", "Which {} is in the {}?"))
        return asked.format(word, place), _sentence(thing.color) if thing else "Nothing is there."
    shape = _likely(rng, [thing.shape for thing in scene if thing], SHAPES)
    found = [thing for thing in scene if thing and thing.shape == shape]
    asked = rng.choice(("What {} is the {}?", "Which {} is the {}?", "What {} does the {} have?"))
    if len(found) > 1:
        return None
    return asked.format(word, shape), _sentence(found[0].color) if found else f"There is no {shape}."


def _where(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    """The place of the only shape, the only one of a color, or the only one of both."""
    wanted = _wanted(rng, scene)
    found = [place for place, thing in zip(PLACES, scene, strict=True) if thing and _fits(thing, wanted)]
    if len(found) > 1:
        return None
    asked = rng.choice(
        ("Where is the {}?", "Where is the {}?", "In which corner is the {}?", "Where do you see the {}?")
    )
    return asked.format(_words(wanted)), f"In the {found[0]}." if found else f"There is no {_words(wanted)}."


def _count(rng: random.Random, scene: Scene) -> tuple[str, str]:
    shape, color = _wanted(rng, scene) if rng.random() < 0.6 else ("", "")
    if shape and color:
        shape, color = rng.choice(((shape, ""), ("", color)))
    found = [thing for thing in scene if thing and _fits(thing, (shape, color))]
    asked = rng.choice(("How many {}s are there?", "How many {}s do you see?", "How many {}s are in the picture?"))
    return asked.format(_words((shape, color))), NUMBERS[len(found)]


def _yes_no(rng: random.Random, scene: Scene) -> tuple[str, str]:
    if rng.random() < 0.2:
        place, thing = _some_place(rng, scene)
        return rng.choice(("Is the {} empty?", "Is there nothing in the {}?")).format(place), _yes(thing is None)
    wanted = _wanted(rng, scene)
    found = any(thing is not None and _fits(thing, wanted) for thing in scene)
    return rng.choice(("Is there a {}?", "Do you see a {}?", "Is there a {} in the picture?")).format(
        _words(wanted)
    ), _yes(found)


def _describe(rng: random.Random, scene: Scene) -> tuple[str, str]:
    asked = rng.choice(
        (
            "What do you see?",
            "What is in the picture?",
            "Describe the picture.",
            "What is it?",
            "What is this?",
            "What is in this image?",
            "Describe this image.",
            "Which shapes are there?",
        )
    )
    seen = [f"a {thing} in the {place}" for place, thing in zip(PLACES, scene, strict=True) if thing]
    return asked, _sentence(", ".join(seen)) if seen else "Nothing."


Weights = Mapping[str, int]
"""How often questions of each kind are asked."""

KINDS: dict[str, Callable[[random.Random, Scene], tuple[str, str] | None]] = {
    "place": _place,
    "color": _color,
    "where": _where,
    "count": _count,
    "yes/no": _yes_no,
    "describe": _describe,
}
"""What makes the questions of a kind."""

WEIGHTS: Weights = {"place": 2, "color": 3, "where": 5, "count": 3, "yes/no": 3, "describe": 2}
STAGES: tuple[Weights, ...] = (
    {"place": 6, "color": 3, "where": 2, "count": 1, "yes/no": 1, "describe": 5},
    WEIGHTS,
    {"place": 1, "color": 3, "where": 3, "count": 7, "yes/no": 5, "describe": 1},
    {"place": 1, "color": 5, "where": 6, "count": 5, "yes/no": 4, "describe": 1},
    {"place": 2, "color": 3, "where": 4, "count": 6, "yes/no": 5, "describe": 5},
)
"""The same in the stages of training: first to know shapes, then to find them, and last what takes longest."""

_GREETINGS = ("Hello!", "Hi!", "Hello.", "Hi", "Hello", "Good morning!", "Who are you?", "What can you do?", "Help!")
_OTHER = (
    "What is the capital of France?",
    "How much is 2 + 3?",
    "12 + 34 =",
    "Tell me a story.",
    "What day is today?",
    "Name three fruits.",
    "Is a dog a mammal?",
    "Write a poem.",
    "What is your name?",
    "Where is Paris?",
    "How old are you?",
    "Do you like music?",
)


def ask(rng: random.Random, scene: Scene, kind: str) -> Question | None:
    """A question of a kind about a scene; None if the one that was drawn has no single answer."""
    found = KINDS[kind](rng, scene)
    return Question(kind, *found) if found else None


def any_question(rng: random.Random, scene: Scene, weights: Weights = WEIGHTS) -> Question:
    """A question as in training: of any kind, now and then written carelessly, or about something else."""
    if rng.random() < 0.04:
        return small_talk(rng)
    question = None
    while question is None:
        question = ask(rng, scene, rng.choices(tuple(weights), tuple(weights.values()))[0])
    return question._replace(text=_careless(rng, question.text))


def without_picture(rng: random.Random, scene: Scene) -> Question:
    """What may be asked where no picture was sent."""
    question = any_question(rng, scene)
    return question if question.kind == "talk" else Question("talk", question.text, NO_PICTURE)


def small_talk(rng: random.Random) -> Question:
    """A greeting, or a question that pictures do not answer."""
    if rng.random() < 0.5:
        return Question("talk", rng.choice(_GREETINGS), HELLO)
    return Question("talk", rng.choice(_OTHER), UNKNOWN)


def _careless(rng: random.Random, text: str) -> str:
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    return text[:-1] if rng.random() < 0.1 else text


def _wanted(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """A shape, a color or both: mostly such as the scene has, else near misses."""
    things = [thing for thing in scene if thing]
    if things and rng.random() < 0.65:
        shape, color = rng.choice(things)
    else:
        shape = _likely(rng, [thing.shape for thing in things], SHAPES)
        color = _likely(rng, [thing.color for thing in things], tuple(COLORS))
    return rng.choice(((shape, color), (shape, ""), ("", color)))


def _fits(thing: Thing, wanted: tuple[str, str]) -> bool:
    return wanted[0] in ("", thing.shape) and wanted[1] in ("", thing.color)


def _words(wanted: tuple[str, str]) -> str:
    return f"{wanted[1]} {wanted[0] or 'shape'}".strip()


def _likely(rng: random.Random, there: Sequence[str], all_of_them: Sequence[str]) -> str:
    return rng.choice(there if there and rng.random() < 0.7 else all_of_them)


def _some_place(rng: random.Random, scene: Scene) -> tuple[str, Thing | None]:
    place = rng.randrange(len(PLACES))
    return PLACES[place], scene[place]


def _named(thing: Thing | None) -> str:
    return f"A {thing}." if thing else "Nothing."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _yes(is_so: bool) -> str:
    return "Yes." if is_so else "No."
