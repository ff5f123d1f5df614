"""`LLM.decide`: chooses which of several texts a model would write, with the probability of each."""

from __future__ import annotations

from dataclasses import dataclass

from bridle.errors import UnsupportedFeature
from bridle.outputs import RequestOutput
from bridle.serving import raise_first_error
from bridle.serving.outputs.option_scores import OptionScore, option_scores
from bridle.structured_output.spec import Constraint


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """The chosen option, and all options in the order in which they were given."""

    choice: str
    options: tuple[OptionScore, ...]

    @property
    def probability(self) -> float:
        """Return the probability of the chosen option."""
        return self.probabilities[self.choice]

    @property
    def probabilities(self) -> dict[str, float]:
        """Return the probability of each option."""
        return {each.text: each.probability for each in self.options}


def decision_in(constraint: Constraint, output: RequestOutput) -> ChoiceResult:
    """Return the decision in an output of a scored choice. Raises the output's error."""
    raise_first_error(output)
    scores = option_scores(constraint, output)
    if not scores:
        raise UnsupportedFeature(
            "choice: the model reasons before it answers, so options cannot be scored. Turn reasoning off.", "choice"
        )
    return ChoiceResult(output.text, scores)
