"""Classes with calibrated probabilities.

    python examples/recipes/classify.py demo

`LLM.decide` scores each class as a whole. A model prefers some classes whatever the text is. The mean of its scores
over some texts without labels measures this preference. This mean is subtracted from the scores before the
probabilities are computed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import exp

from bridle import LLM

CLASSES = ("negative", "positive")
ASK = "Is the mood of this text {classes}? Answer with one word.\n\nText: {text}"


def scores(llm: LLM, texts: Sequence[str], classes: Sequence[str] = CLASSES) -> list[list[float]]:
    """Return the log-probabilities of all classes for each text. The requests are sent from threads, so that all texts
    run in one batch."""

    def one(text: str) -> list[float]:
        message = {"role": "user", "content": ASK.format(classes=" or ".join(classes), text=text)}
        return [option.logprob for option in llm.decide([message], classes).options]

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(one, texts))


def calibrated(found: Sequence[Sequence[float]], unlabelled: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the probabilities of all classes for each text, without the model's general preference."""
    mean = [sum(column) / len(unlabelled) for column in zip(*unlabelled, strict=True)]
    shares = [[exp(score - usual) for score, usual in zip(each, mean, strict=True)] for each in found]
    return [[share / sum(each) for share in each] for each in shares]


def main(model: str = "demo") -> None:
    texts = ["I love this film.", "The worst meal of my life.", "A quiet, warm and funny book.", "It broke at once."]
    with LLM(model) as llm:
        found = scores(llm, texts)
        for text, shares in zip(texts, calibrated(found, found), strict=True):
            best = max(shares)
            print(f"{CLASSES[shares.index(best)]} {best:.2f} {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
