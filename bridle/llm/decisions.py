"""`LLM.decide`: which of several texts a model would write, with the probability of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from bridle.engine.sampling.choice_scoring import CHOICE
from bridle.outputs import RequestOutput
from bridle.serving import raise_first_error


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """One option: its probability among all options, and the log-probability of its text under the model."""

    text: str
    probability: float
    logprob: float


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """The chosen option, and all options in the order in which they were given."""

    choice: str
    options: tuple[ChoiceScore, ...]

    @property
    def probability(self) -> float:
        """The probability of the chosen option."""
        return self.probabilities[self.choice]

    @property
    def probabilities(self) -> dict[str, float]:
        """The probability of each option."""
        return {each.text: each.probability for each in self.options}


def decision_in(output: RequestOutput, options: Sequence[str]) -> ChoiceResult:
    """The decision in an output that was asked to choose with scores. Raises its error."""
    raise_first_error(output)
    told = json.loads(output.storage[CHOICE])
    scored = zip(dict.fromkeys(options), told["probabilities"], told["logprobs"], strict=True)
    return ChoiceResult(output.text, tuple(ChoiceScore(*each) for each in scored))
