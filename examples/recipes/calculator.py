"""A calculator in the middle of a text: the model writes a calculation, and code writes the result.

    bridle run examples/recipes/calculator.py

After each `=`, the script reads the model's calculation, and appends the result before the model can guess it. Then the
model continues after the right number.
"""

import re
from fractions import Fraction

import pyaici.server as aici

QUESTION = "What is 23 + 45?"
MAX_TOKENS = 120


def value(text: str) -> str | None:
    """Return the value of the calculation at the end of a text, or None if there is no calculation."""
    text = re.sub(r"[,$A-Za-wyz]", "", text).replace("×", "*").replace("x", "*")  # units may be between the numbers
    found = re.search(r"\d[\d.]*(?:\s*[-+*/]\s*\d[\d.]*)+\s*$", text)
    if found is None:
        return None
    total = Fraction(0)
    for sign, product in re.findall(r"(^|[-+])([^-+]+)", found[0]):
        number = Fraction(1)
        for operator, factor in re.findall(r"(^|[*/])\s*([\d.]+)", product.strip()):
            factor = Fraction(factor.rstrip("."))
            if operator == "/" and not factor:
                return None
            number = number / factor if operator == "/" else number * factor
        total += -number if sign == "-" else number
    return str(total if total.denominator == 1 else round(float(total), 4))


async def main() -> None:
    if len(await aici.GetPrompt()) < 2:  # a request may have its own conversation
        await aici.chat(QUESTION)
    answer = aici.Label()
    while len(answer.tokens_since()) < MAX_TOKENS:
        part = await aici.gen(stop_at="=", max_tokens=MAX_TOKENS)
        result = value(part.text.rpartition("=")[0])
        if part.reason != "stop_at":
            break
        if result is not None:
            await aici.FixedTokens(f" {result}")
            behind = await aici.gen(regex=r"((\n| ?[^-+*/=\d\s])(?s:.)*)?", max_tokens=1)  # no digit and no operator
            if behind.reason == "end":
                break


aici.start(main())
