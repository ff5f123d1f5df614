"""Stop outputs by your own criteria, in addition to `max_tokens` and stop strings.

    python examples/custom_stopping.py demo

A criterion is a function that is called after every token with all tokens so far and the number of prompt tokens. The
function returns a short reason to stop, or None. The same object serves many outputs at once, so it should use only the
tokens and have no state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bridle import LLM, SamplingParams
from bridle.engine import StopOnRepetition, StoppingCriteria
from bridle.tokenizer import Tokenizer


class Sentences:
    """A criterion that stops after `limit` sentences."""

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        self.limit = limit
        self.ends = {
            token
            for token in range(tokenizer.vocab_size)
            if tokenizer.token_text(token).rstrip().endswith((".", "!", "?"))
        }

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> str | None:
        """Count the sentences only if one has just ended, so that most tokens need only one look-up."""
        if tokens[-1] not in self.ends:
            return None
        count = sum(token in self.ends for token in tokens[num_prompt:])
        return f"{count} sentences" if count >= self.limit else None


def main(model: str = "demo") -> None:
    """Print two sentences of each story, and no story that repeats itself."""
    with LLM(model) as llm:
        criteria: list[StoppingCriteria] = [Sentences(llm.tokenizer, 2), StopOnRepetition(num_tokens=3, times=3)]
        prompts = ["Once upon a time", "There was a fox who"]
        for output in llm.generate(prompts, SamplingParams(max_tokens=200), stopping_criteria=criteria):
            reason = output.outputs[0].stop_reason  # a criterion's, or the end token
            print(f"{output.prompt}{output.text}")
            print("  stopped:", reason if isinstance(reason, str) else "end of the text")


if __name__ == "__main__":
    main(*sys.argv[1:])
