"""A controller together with a JSON schema: the schema determines the form, and the controller checks what no schema
can express.

    python examples/distinct_digits.py

The schema and the controller work independently. A token is sampled only if both allow it.
"""

import json
import sys

from bridle import LLM, Controller, Decision, JsonSchema, SequenceView

FORM = {
    "type": "object",
    "properties": {
        "pin": {"type": "string", "pattern": "^[0-9]{4}$"},
        "code": {"type": "string", "pattern": "^[0-9]{3}$"},
    },
    "required": ["pin", "code"],
    "additionalProperties": False,
}


class Distinct(Controller):
    """Allows each digit only once in the whole text."""

    max_rewind = 0

    def __init__(self, texts: list[str]) -> None:
        self.digits = [[char for char in text if char.isdigit()] for text in texts]

    def next(self, view: SequenceView) -> Decision:
        used = [digit for token in view.generated for digit in self.digits[token]]
        fits = (token for token, own in enumerate(self.digits) if len({*used, *own}) == len(used) + len(own))
        return Decision.sample(view.mask_of(fits))


def main(model: str = "demo") -> None:
    with LLM(model) as llm:
        texts = [llm.tokenizer.token_text(token) for token in range(llm.tokenizer.vocab_size)]
        for output in llm.generate(
            ["A secret number: ", "Another one: "],
            controllers=[Distinct(texts)],
            constraint=JsonSchema(FORM),
            max_tokens=60,
            seed=7,
        ):
            print(json.dumps(json.loads(output.text)))


if __name__ == "__main__":
    main(*sys.argv[1:])
