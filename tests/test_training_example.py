"""Tests the training example: its loop runs, and its adapter changes in each round while the model stays loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridle import LLM
from bridle.model import resolve_model
from dev.recipes import calculator

pytest.importorskip("peft", reason="PEFT is not here: pip install 'bridle-llm[bench]'")
from examples.training.improve_recipe import NAME, Learner, Plan, Sample, improve

PLAN = Plan(rounds=2, questions=3, samples=2, held_out=2)
#: Answers of the demo model seldom solve anything; those with an even number of characters are about a half.
TASK = replace(calculator.RECIPE, max_tokens=24, is_right=lambda case, text: len(text) % 2 == 0)


class Watched(Learner):
    """A learner that records its training samples and its saved adapters."""

    def __init__(self, out: Path) -> None:
        super().__init__(str(resolve_model("demo")), out, learning_rate=1e-2, batch=2)
        self.saved: list[bytes] = []
        self.taught: list[Sample] = []

    def learn(self, samples: Any) -> float:
        self.taught += samples
        loss = super().learn(samples)
        self.saved.append((self.out / "adapter_model.safetensors").read_bytes())
        return loss


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", control=True, adapters={}, num_blocks=512) as loaded:
        yield loaded


def score(llm: LLM, samples: list[Sample], adapter: str | None) -> float:
    """Return the summed log-probability of all answers after their prompts."""
    prompts = [[*sample.prompt, *sample.answer] for sample in samples]
    outputs = llm.generate(prompts, max_tokens=1, prompt_logprobs=0, adapter=adapter, use_tqdm=False)
    parts = [
        (output.prompt_logprobs or [])[len(sample.prompt) :] for output, sample in zip(outputs, samples, strict=True)
    ]
    return sum(one.logprob for part in parts for one in part if one is not None)


def test_the_loop_trains_and_replaces_an_adapter(llm: LLM, tmp_path: Path) -> None:
    learner, lines = Watched(tmp_path / "adapter"), list[str]()
    before, after = improve(llm, learner, TASK, PLAN, lines.append)
    assert 0 <= before <= 1 and 0 <= after <= 1
    assert [line.partition(":")[0] for line in lines] == ["before", "round 1", "round 2", "after"]
    assert len(learner.saved) == 2 and learner.saved[0] != learner.saved[1]
    assert [info.name for info in llm.adapters] == [NAME]
    assert learner.taught and all(sample.is_right for sample in learner.taught)
    taught = learner.taught
    assert score(llm, taught, NAME) > score(llm, taught, None), "what was taught is no likelier than before"


def test_a_task_without_right_answers_is_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="round 1: none of 6 answers is right; take an easier recipe"):
        improve(llm, Watched(tmp_path), replace(TASK, is_right=lambda case, text: False), PLAN, list[str]().append)
