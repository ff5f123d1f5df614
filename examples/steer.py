"""Steer a model with plain Python: let it fill in a form.

    python examples/steer.py demo

The controller writes the fixed parts of a JSON record itself, without asking the model. The model writes only the
values between these parts: letters up to a quotation mark, or digits. The result is valid JSON with any model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from bridle import LLM, Controller, Decision, SamplingParams
from bridle.controllers import SequenceView
from bridle.tokenizer import Tokenizer

PARTS = ['{"name": "', '", "age": ', ', "city": "', '"}']  # the parts before, between and after the fields
FIELDS = ["text", "number", "text"]
ENDS = {"text": '"', "number": ","}  # the tokens with which the model ends a field
MAX_FIELD_TOKENS = 6


class Form(Controller):
    """Writes the fixed parts and masks the tokens that the model may write into each field."""

    max_rewind = 1  # the token that ends a field is rolled back

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = dict(readable_tokens(tokenizer))
        self.parts = [tokenizer.encode(part, add_special_tokens=False) for part in PARTS]
        self.inside = {
            "text": [token for token, text in texts.items() if text.replace(" ", "").isalpha()],
            "number": [token for token, text in texts.items() if text.isascii() and text.isdigit()],
        }
        self.first = {kind: [t for t in self.inside[kind] if texts[t][0] not in " 0"] for kind in self.inside}
        self.ends = {kind: [t for t, text in texts.items() if text.startswith(ENDS[kind])] for kind in ENDS}
        self.part = -1  # index of the last part that was written
        self.begin = 0  # the begin of the current field

    def next(self, view: SequenceView) -> Decision:
        """Return the next fixed part if the current field is complete, otherwise a token of the field; stop after the
        last part."""
        if self.part == len(FIELDS):
            return Decision.stop("the form is complete")
        if self.part < 0:
            return self.write_part(view, backtrack=0)
        kind, length = FIELDS[self.part], len(view.tokens) - self.begin
        if length and view.tokens[-1] in self.ends[kind]:  # also after the last token of the field's limit
            return self.write_part(view, backtrack=1)
        if length == MAX_FIELD_TOKENS:
            return self.write_part(view, backtrack=0)
        return Decision.sample(view.mask_of(self.inside[kind] + self.ends[kind] if length else self.first[kind]))

    def write_part(self, view: SequenceView, backtrack: int) -> Decision:
        """Roll back the token that ended the field, and append the next fixed part without sampling."""
        self.part += 1
        part = self.parts[self.part]
        self.begin = len(view.tokens) - backtrack + len(part)
        return Decision.splice(backtrack, part)


def readable_tokens(tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Yield the tokens that consist of whole characters, with their text."""
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token)
        if token not in tokenizer.special_token_ids and text.strip() and "\ufffd" not in text:
            yield token, text


def main(model: str = "demo") -> None:
    """Fill the form three times, in one batch."""
    with LLM(model) as llm:
        form = Form(llm.tokenizer)  # every request works on a copy
        sampling = SamplingParams(max_tokens=80, temperature=0.8)
        for output in llm.generate(["A person as JSON:\n"] * 3, sampling, controller=form):
            usage = output.usage
            print(json.loads(output.text), f"({usage.forced_tokens} of {usage.completion_tokens} tokens were forced)")


if __name__ == "__main__":
    main(*sys.argv[1:])
