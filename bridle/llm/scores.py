"""Log-probabilities of texts under a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bridle.llm.arguments import Prompt
from bridle.llm.options import RunOptions
from bridle.llm.requests import make_collectors
from bridle.outputs import Logprob, RequestOutput
from bridle.sampling import SamplingParams
from bridle.serving import LoadedModel, OutputCollector, raise_first_error


@dataclass(frozen=True, slots=True)
class TextScore:
    """Log-probabilities (natural logarithm) of the tokens of a text, each under the condition of the tokens before it.

    The first token of a text has None, because there is no token before it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob | None, ...]

    @property
    def total(self) -> float:
        """Return the log-probability of the text's tokens after the first one."""
        return sum(each.logprob for each in self.logprobs if each is not None)

    @property
    def mean(self) -> float:
        """Return the mean log-probability per token; 0 for a single token."""
        return self.total / max(len(self.token_ids) - 1, 1)

    @property
    def perplexity(self) -> float:
        """Return the perplexity, which is exp(-mean)."""
        return math.exp(-self.mean)


def score_of(output: RequestOutput) -> TextScore:
    """Return the score from the output of a request for log-probabilities of its prompt."""
    return TextScore(tuple(output.prompt_token_ids), tuple(output.prompt_logprobs or ()))


def scores_of(
    model: LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    top: int,
    how: RunOptions,
    run: Callable[[list[OutputCollector]], list[RequestOutput]],
) -> list[TextScore]:
    """Return the score of each text. With `top`, each position of a text has its `top` most probable tokens. Raises the
    first error of any text."""
    model.check_process()
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=top)
    outputs = run(make_collectors(model, prompts, sampling, None, how))
    for output in outputs:
        raise_first_error(output)
    return [score_of(output) for output in outputs]
