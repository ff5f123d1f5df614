"""Tests that draft tokens change no text of a real model, from a small model of the same family or from the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from bridle import LLM, SamplingParams
from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.proposer_selection import ProposerSelector
from tests.real.material import model_path, num_threads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CODE = """def total_price(items, rate):
    total = 0.0
    for item in items:
        total += item.price * item.count
    total += total * rate
    return round(total, 2)
"""
ASKED = [
    f"Rename the variable `total` to `amount` in this code. Answer with the code only.\n```python\n{CODE}```",
    "Write one sentence about the sea.",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    draft, large = model_path("qwen2.5-coder:0.5b"), model_path("qwen2.5-coder:1.5b")
    with LLM(str(large), draft_model=str(draft), num_threads=num_threads()) as loaded:
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_are_the_same_with_draft_tokens(llm: LLM, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, max_tokens=90, seed=3)
    chats = [[{"role": "user", "content": text}] for text in ASKED]
    plain, *drafted = [
        [answer for chat in chats for answer in llm.chat(chat, sampling, speculate=way)] for way in ("off", "auto", 4)
    ]
    for answers in drafted:
        assert [one.text for one in answers] == [one.text for one in plain]
        assert answers[0].usage.accepted_tokens > 0
    if not temperature:
        assert "return round(amount, 2)" in plain[0].text


def test_left_to_the_engine_copies_come_from_the_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `speculate="auto"` most accepted draft tokens are copied from the text; where nothing repeats, they come
    from the draft model."""
    accepted: Counter[str] = Counter()
    learn = ProposerSelector.learn

    def note(selection: ProposerSelector, seq: Sequence, num_drafted: int, num_right: int) -> None:
        accepted["model" if seq.drafts.source is seq.drafts.modelled else "text"] += num_right
        learn(selection, seq, num_drafted, num_right)

    monkeypatch.setattr(ProposerSelector, "learn", note)
    sampling = SamplingParams(temperature=0.0, max_tokens=90)
    copied, told = ([{"role": "user", "content": text}] for text in ASKED)
    llm.chat(copied, sampling, speculate="auto")
    assert accepted["text"] > accepted["model"]
    accepted.clear()
    llm.chat(told, sampling, speculate=4)
    assert accepted["model"] > accepted["text"]
