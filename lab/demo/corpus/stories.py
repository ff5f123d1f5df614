"""Short stories made of scenes; long ones have more scenes.

The scenes of a story share its hero, friend, place and thing, so that a reader finds the same names
throughout.
"""

from __future__ import annotations

import random

from lab.demo.corpus import world
from lab.demo.corpus.document import Exercise

_HEROES = (
    "dog",
    "cat",
    "fox",
    "bear",
    "rabbit",
    "mouse",
    "owl",
    "duck",
    "frog",
    "goat",
    "horse",
    "turtle",
    "robin",
    "wolf",
)
_ADJECTIVES = ("little", "brave", "clever", "kind", "curious", "hungry", "young", "old", "shy", "cheerful")
_PLACES = (
    "forest",
    "garden",
    "village",
    "valley",
    "meadow",
    "castle",
    "harbor",
    "mountain",
    "island",
    "city",
)
_THINGS = ("key", "map", "lamp", "bell", "book", "boat", "kite", "drum", "ring", "basket", "hat", "letter")
_WEATHER = (
    "The sun was shining.",
    "It was raining.",
    "A cold wind was blowing.",
    "Snow was falling.",
    "The sky was full of stars.",
)
_SCENES = (
    'One morning, {N} found {a_thing} near the {place}. "Whose {thing} is this?" {N} asked. {weather}',
    '{N} went to see {F}. They sat down and ate {food}. "Let us look for the owner of the {thing}," said {F}.',
    "{weather} {N} and {F} walked through the {place}. They were tired, but they did not stop.",
    'On the way they met {third}. "Have you lost {a_thing}?" asked {N}. "No, but I will help you," was the answer.',
    "In the evening {N} was afraid of the dark. {F} took the {thing} and sang a song. Soon {N} was not "
    "afraid any more.",
    '{F} fell into the water. {N} was quick and pulled {F} out. "Thank you, {N}!" said {F}.',
    "They saw a light in the {place}. It was a small house. An old woman opened the door and gave them {food}.",
    "The next day {N} lost the {thing}. {F} looked everywhere. At last they found it under a tree.",
    '{N} had an idea. "We can share the {thing}," said {N}. {F} liked the idea very much.',
    '{weather} {N} counted the days until {day}. "On {day} we will have a party," said {F}.',
)
_ENDINGS = (
    "So {N} and {F} went home and were happy. The end.",
    "From that day on, {N} and {F} were best friends. The end.",
    "{N} put the {thing} on a shelf and fell asleep. The end.",
)
_FOODS = ("bread and cheese", "warm soup", "apples and nuts", "honey cake", "fresh berries")
_REQUESTS = ("Tell me a story about {a_hero} named {N}.", "Write a story about {a_hero} named {N}.",
"Tell me a story about {a_hero}.",
             "Write a short story about {a_hero}.", "Tell me a story.",
             "I would like to hear a story about {a_hero} named {N}.")  # fmt: skip


def story(rng: random.Random, num_scenes: int) -> tuple[str, dict[str, str]]:
    """A story and the words it was filled with."""
    words = _cast(rng)
    scenes: list[str] = []
    while len(scenes) < num_scenes:
        scenes += rng.sample(_SCENES, min(len(_SCENES), num_scenes - len(scenes)))
    opening = "Once upon a time there was a {adjective} {hero} named {N}. {N} lived in a {place}."
    paragraphs = [opening + " " + scenes[0], *scenes[1:], rng.choice(_ENDINGS)]
    filled = [
        text.format(
            weather=rng.choice(_WEATHER),
            food=rng.choice(_FOODS),
            day=rng.choice(world.SERIES["days"]),
            **words,
        )
        for text in paragraphs
    ]
    return "\n".join(filled), words


def request(rng: random.Random) -> Exercise:
    """A request for a story; short, or long if the user says so."""
    is_long = rng.random() < 0.1
    text, words = story(rng, rng.randrange(10, 16) if is_long else rng.randrange(2, 5))
    question = rng.choice(_REQUESTS).format(**words) + (" Make it long." if is_long else "")
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": text})
    return Exercise("story", ("story", words["N"], words["F"], words["hero"], words["thing"]), messages)


def _cast(rng: random.Random) -> dict[str, str]:
    hero, name, friend = rng.choice(_HEROES), *rng.sample(world.NAMES, 2)
    thing, place = rng.choice(_THINGS), rng.choice(_PLACES)
    return {
        "hero": hero, "a_hero": world.with_article(hero), "adjective": rng.choice(_ADJECTIVES),
        "N": name, "F": friend,
        "thing": thing, "a_thing": world.with_article(thing), "place": place,
        "third": world.with_article(rng.choice([other for other in _HEROES if other != hero])),
    }  # fmt: skip
