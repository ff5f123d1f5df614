"""Whole requests under constraints, for the benchmark `canonical`: the constraint of each, and the text that it
generates.

They are tool calls with their schemas, times, texts of a small grammar, and quotes of an article. The texts are the
same in each run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from bridle.structured_output import Constraint, JsonSchema, Lark, Regex, Substring

_NUM_REQUESTS = 20
#: The arguments of calls; the type of each is that of its parameter.
_CALLS = """
{"city": "San Francisco", "days": 3, "metric": true}
{"query": "best ramen near Shibuya station", "max_results": 10, "open_now": true}
{"to": ["ada@example.com", "grace@example.org"], "subject": "Quarterly report", "body": "The figures are below."}
{"principal": 250000.0, "rate": 3.75, "years": 30}
{"origin": "LHR", "destination": "NRT", "date": "2025-03-14", "passengers": 2}
{"title": "Dentist appointment", "start": "2025-06-02T09:30", "minutes": 45, "guests": []}
{"symbol": "MSFT", "quantity": 15, "limit": 412.5}
{"language": "Python", "code": "print(sum(range(10)))", "timeout": 30}
{"artist": "Miles Davis", "album": "Kind of Blue", "shuffle": false}
{"latitude": 48.8584, "longitude": 2.2945, "radius": 1500}
{"patient": "Maria Gonzalez", "drug": "amoxicillin", "dose": 500, "times": [8, 14, 20]}
{"table": "orders", "columns": ["id", "customer", "total"], "condition": "total > 1000", "limit": 50}
{"text": "Where is the nearest train station?", "source": "English", "target": "German"}
{"width": 1024, "height": 768, "prompt": "a lighthouse at dusk, oil painting", "seed": 42}
{"base": 7, "height": 12.5}
{"path": "/var/log/nginx/access.log", "pattern": "POST /api/v2", "lines": 200, "ignore_case": false}
{"name": "Ada Lovelace", "age": 36, "skills": ["analysis", "poetry"], "email": "ada@example.com"}
{"recipe": "mushroom risotto", "servings": 4, "vegetarian": true, "exclude": ["cream", "garlic"]}
{"ticket": 48213, "priority": 2, "comment": "The customer cannot log in since the update on Monday."}
{"celsius": [21.5, 22.0, 19.75], "room": "server room B"}
"""
_ARTICLE = """\
The lighthouse on the northern cape was built in 1847, after three merchant ships had been lost on the reef within a
single winter. Its architect, Thomas Arkwright, had never seen the sea before he was given the commission. He spent
two months in a fisherman's hut, measuring the height of the waves with a knotted rope, and wrote to his brother that
"nothing I have learned of churches will be of any use here". The tower is 38 metres tall and stands on a ring of
granite blocks, each of which weighs more than four tonnes; they were brought across the bay on rafts at low tide. The
lamp burned rapeseed oil until 1889, paraffin until 1926 and has been electric since. During the storm of January 1953
the keeper, Margaret Hale, kept it alight for 61 hours alone, and was later awarded a medal that she is said to have
used as a doorstop. Today the light is automatic, but the keeper's cottage is rented to visitors from April to
October, and the stairs (217 steps) may be climbed on Sundays. A small museum shows the original lens, ship's logs,
and the rope with which Arkwright measured the waves.
"""
_WORDS = r"""start: size " " color " " fruit (" and " fruit)?
size: "small" | "smaller" | "large" | "larger" | "tiny"
color: "red" | "reddish" | "green" | "greenish" | "blue" | "bluish" | "yellow"
fruit: "apple" | "apples" | "apricot" | "apricots" | "banana" | "bananas" | "pineapple" | "cherry" | "cherries"
"""

Case = tuple[Constraint, str]


def requests() -> dict[str, list[Case]]:
    """Return the requests of each kind: pairs of a constraint and a text that satisfies it."""
    rng = random.Random(0)
    date = Regex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}")
    article = " ".join(_ARTICLE.split())
    return {
        "tool calls": [(JsonSchema(_schema(json.loads(line))), line) for line in _CALLS.split("\n") if line],
        "dates": [(date, each) for each in _dates(rng)],
        "words": [(Lark(_WORDS), each) for each in _phrases(rng)],
        "quotes": [(Substring(article), each) for each in _quotes(rng, article)],
    }


def _schema(value: Any) -> dict[str, Any]:
    """Return a JSON schema that `value` satisfies, in the usual form of a parameter's schema."""
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case float():
            return {"type": "number"}
        case str():
            return {"type": "string"}
        case list():
            return {"type": "array", "items": _schema(value[0]) if value else {"type": "string"}}
    properties = {name: _schema(each) for name, each in value.items()}
    required = [*properties]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _dates(rng: random.Random) -> Iterator[str]:
    for _ in range(_NUM_REQUESTS):
        day = f"{rng.randint(1900, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        yield f"{day}T{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"


def _phrases(rng: random.Random) -> Iterator[str]:
    rules = {line.split(": ")[0]: line.split('"')[1::2] for line in _WORDS.splitlines()[1:]}
    for number in range(_NUM_REQUESTS):
        size, color, fruit = (rng.choice(rules[name]) for name in ("size", "color", "fruit"))
        yield f"{size} {color} {fruit}" + (f" and {rng.choice(rules['fruit'])}" if number % 2 else "")


def _quotes(rng: random.Random, article: str) -> Iterator[str]:
    words = article.split(" ")
    for _ in range(_NUM_REQUESTS):
        start = rng.randrange(len(words) - 25)
        yield " ".join(words[start : start + rng.randint(5, 25)])
