"""The probabilities of the options of a choice. The engine has scored each option as a whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bridle.outputs import OPTIONS, RequestOutput
from bridle.structured_output.finite import finite_texts
from bridle.structured_output.spec import Constraint


@dataclass(frozen=True, slots=True)
class OptionScore:
    """One option of a choice: its probability relative to the other options, and the log-probability of its text under
    the model."""

    text: str
    probability: float
    logprob: float

    def to_dict(self) -> dict[str, Any]:
        """Return the score as plain data."""
        return {"text": self.text, "probability": self.probability, "logprob": self.logprob}


def option_scores(constraint: object, output: RequestOutput) -> tuple[OptionScore, ...]:
    """Return the scores of all options of a constraint, in the order of the options. If options were not scored, or if
    their scores were not requested, the result is empty."""
    if OPTIONS not in output.storage or not isinstance(constraint, Constraint):
        return ()
    told = json.loads(output.storage[OPTIONS])
    scored = zip(finite_texts(constraint), told["probabilities"], told["logprobs"], strict=True)
    return tuple(OptionScore(*each) for each in scored)
