"""Exercises with records: people, animals and countries as JSON, asked for or to continue."""

from __future__ import annotations

import json
import random
from typing import Any

from lab.demo.corpus import world
from lab.demo.corpus.document import Exercise, ask, complete
from lab.demo.corpus.tools import invented_word

_REQUESTS = (
    "Write a JSON record for {who}.",
    "Make a JSON record for {who}.",
    "Turn this into JSON: {who}.",
    "Give me JSON for {who}.",
)


def person_request(rng: random.Random) -> Exercise:
    """A person described in words, to be written as JSON."""
    record = _person(rng)
    if rng.random() < 0.2:
        record["name"] = invented_word(rng).capitalize()
    described = f"{record['name']}, {record['age']} years old"
    if "city" in record:
        described += f", from {record['city']}"
    if "job" in record:
        described += f", a {record['job']}" if record["job"][0] not in "aeiou" else f", an {record['job']}"
    return _asked(rng, described, record)


def animal_request(rng: random.Random) -> Exercise:
    """What the world knows about an animal, as JSON."""
    animal, (kind, legs, food, _) = rng.choice(list(world.ANIMALS.items()))
    return _asked(rng, f"the animal {animal}", {"name": animal, "kind": kind, "legs": legs, "food": food})


def country_request(rng: random.Random) -> Exercise:
    """What the world knows about a country, as JSON."""
    country, (capital, language, continent) = rng.choice(list(world.COUNTRIES.items()))
    record = {"name": country, "capital": capital, "language": language, "continent": continent}
    return _asked(rng, f"the country {country}", record)


def any_request(rng: random.Random) -> Exercise:
    """One of the record exercises."""
    return rng.choice((person_request, person_request, animal_request, country_request))(rng)


def continuation(rng: random.Random) -> Exercise:
    """A record as plain text, to be continued from its first brace."""
    record = json.dumps(_person(rng))
    return complete("record", ("record", record), '{"name":', record.removeprefix('{"name":'))


def _person(rng: random.Random) -> dict[str, Any]:
    record: dict[str, Any] = {"name": rng.choice(world.NAMES), "age": rng.randrange(4, 100)}
    if rng.random() < 0.7:
        record["city"] = rng.choice(world.CITIES)
    if rng.random() < 0.5:
        record["job"] = rng.choice(list(world.JOBS))
    return record


def _asked(rng: random.Random, who: str, record: dict[str, Any]) -> Exercise:
    question = rng.choice(_REQUESTS).format(who=who)
    return ask("record", ("record", question), question, json.dumps(record, ensure_ascii=False))
