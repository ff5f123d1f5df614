"""Cases of the recipe `extract`: delivery notes with several dates, weights and amounts in several forms and units."""

from __future__ import annotations

import json
import re
from datetime import date
from random import Random
from typing import Any

from dev.recipes.recipe import Case, Recipe

_ASK = "Write as one line of JSON: delivered (ISO date), weight_kg (number of kilograms), to_pay (number)."
_EXAMPLE = [
    {
        "role": "user",
        "content": "The delivery weighs 9 oz, the empty box 40 g. Ordered on July 9th, 2014, delivered on 02.08.2014. "
        f"A deposit of 9.15 EUR has been paid; 71.40 EUR are to be paid by 30 October 2014.\n\n{_ASK}",
    },
    {"role": "assistant", "content": '{"delivered": "2014-08-02", "weight_kg": 0.255, "to_pay": 71.4}'},
]
_KILOGRAMS = {"kg": 1.0, "g": 0.001, "lb": 0.45359237, "oz": 0.028349523125, "t": 1000.0}
_FORM = {
    "json_schema": {
        "type": "object",
        "properties": {
            "delivered": {"type": "string", "format": "date"},
            "weight_kg": {"type": "number"},
            "to_pay": {"type": "number"},
        },
        "required": ["delivered", "weight_kg", "to_pay"],
        "additionalProperties": False,
    }
}


def cases(count: int, seed: int) -> list[Case]:
    """Return `count` cases, each with its own seed."""
    return [_case(f"{seed}-{number}") for number in range(count)]


def _case(key: str) -> Case:
    random = Random(key)
    days = sorted(random.sample(range(date(2015, 1, 1).toordinal(), date(2025, 12, 31).toordinal()), 3))
    ordered, delivered, due = (date.fromordinal(day) for day in days)
    (empty, _), (weight, kilograms) = _weight(random), _weight(random)
    deposit, to_pay = round(random.uniform(5, 60), 2), round(random.uniform(70, 900), 2)
    lines = [
        f"Ordered on {_written(random, ordered)}, delivered on {_written(random, delivered)}.",
        f"The delivery weighs {weight}, the empty box {empty}.",
        f"A deposit of {deposit:.2f} EUR has been paid; {to_pay:.2f} EUR are to be paid by {_written(random, due)}.",
    ]
    random.shuffle(lines)
    text = " ".join(lines)
    known = {"delivered": delivered.isoformat(), "weight_kg": kilograms, "to_pay": to_pay}
    return Case(key, [*_EXAMPLE, {"role": "user", "content": f"{text}\n\n{_ASK}"}], known, _FORM, {"TEXT": text})


def _written(random: Random, day: date) -> str:
    suffix = "th" if 10 < day.day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    forms = (f"{day.day} {day:%B %Y}", f"{day:%B} {day.day}{suffix}, {day.year}", f"{day:%d.%m.%Y}")
    return random.choice((*forms, f"the {day.day}{suffix} of {day:%B %Y}"))


def _weight(random: Random) -> tuple[str, float]:
    unit = random.choice(list(_KILOGRAMS))
    number = random.randint(2, 90) * (10 if unit == "g" else 1)
    return f"{number} {unit}", number * _KILOGRAMS[unit]


def is_right(case: Case, text: str) -> bool:
    """Return whether the first JSON object of the text has all three right values; the weight may differ by half a
    percent."""
    found: Any = None
    for place in re.finditer(r"\{", text):
        try:
            found, _ = json.JSONDecoder().raw_decode(text, place.start())
            break
        except json.JSONDecodeError:
            continue
    if not isinstance(found, dict) or found.get("delivered") != case.known["delivered"]:
        return False
    return _is_near(found.get("weight_kg"), case.known["weight_kg"]) and _is_near(
        found.get("to_pay"), case.known["to_pay"]
    )


def _is_near(found: Any, known: float) -> bool:
    return isinstance(found, (int, float)) and abs(found - known) <= max(0.005 * known, 0.001)


RECIPE = Recipe("extract.py", 90, cases, is_right)
