"""Extract dates, weights and amounts from a text: the model selects the words, and code converts them.

    bridle run examples/recipes/extract.py

Code finds all dates, weights and amounts in the text. The model chooses among them, as they are written in the text.
Code converts each chosen text to an ISO date, kilograms or a number, and replaces it by JSON.
"""

import json
import re
from datetime import date

import pyaici.server as aici
from pyaici.constraints import HostConstraint

TEXT = "Ordered on 3 March 2024. Delivered on 17 March 2024: one box of 25 lb. Deposit 20.00, to pay 130.50 EUR."
ASK = "Write as one line of JSON: delivered (ISO date), weight_kg (number of kilograms), to_pay (number)."
DAY = r"\d\d?(?:st|nd|rd|th)?"
MONTHS = [date(2000, month, 1).strftime("%B") for month in range(1, 13)]
MONTH = f"(?:{'|'.join(MONTHS)})"
KILOGRAMS = {"kg": 1, "g": 0.001, "t": 1000, "lb": 0.45359237, "oz": 0.028349523125}


def iso(text: str) -> str:
    """Return the ISO form of a date. Raises `ValueError` for a day that does not exist."""
    if "." in text:
        day, month, year = map(int, text.split("."))
    else:
        day, year = map(int, re.findall(r"\d+", text))
        month = MONTHS.index(re.search(MONTH, text)[0]) + 1
    return date(year, month, day).isoformat()


def kilograms(text: str) -> float:
    """Return a weight in kilograms."""
    number, unit = text.split()
    return round(float(number) * KILOGRAMS[unit], 3)


#: For each field: the text before the answer, the pattern of its value, and the conversion.
FIELDS = {
    "delivered": (
        "The text says: delivered on",
        rf"{DAY} (?:of )?{MONTH} \d{{4}}|{MONTH} {DAY}, \d{{4}}|\d\d\.\d\d\.\d{{4}}",
        iso,
    ),
    "weight_kg": ("The delivery weighs", r"\d+(?:\.\d+)? (?:kg|g|t|lb|oz)\b", kilograms),
    "to_pay": ("To pay are", r"(?<![.\d])\d+\.\d\d(?![.\d])", float),
}


async def main() -> None:
    if len(await aici.GetPrompt()) < 2:  # a request may have its own conversation
        await aici.chat(f"{TEXT}\n\n{ASK}")
    begin, record = aici.Label(), {}
    for name, (lead, pattern, meaning) in FIELDS.items():
        found = list(dict.fromkeys(re.findall(pattern, TEXT)))
        options = json.dumps([f" {each}" for each in found])
        await aici.FixedTokens(lead)
        chosen = await aici.gen_text(constraint=lambda: HostConstraint("choice", options), max_tokens=20)  # noqa: B023
        await aici.FixedTokens(".\n")
        record[name] = meaning(chosen.strip()) if found else None
    await aici.FixedTokens(json.dumps(record), following=begin)


aici.start(main())
