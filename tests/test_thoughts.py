"""Tests of thoughts with constraints: thoughts are unconstrained, and the text after them matches the constraint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from bridle import LLM, Choice
from bridle.chat.chat_request import prepare_chat
from bridle.chat.conversation import Conversation
from bridle.controllers.reasoning_gate import ReasoningThenGrammar
from bridle.sampling import SamplingParams
from bridle.serving.lifecycle.in_process import InProcessServing
from bridle.serving.requests.steering import Steering

HI = [{"role": "user", "content": "Hi"}]
FORM = Steering(constraint=Choice(["red", "blue"]))
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}A: "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_blocks=256) as loaded:
        yield loaded


def planned(llm: LLM, template: str | None, **variables: bool) -> Steering:
    said = Conversation(HI, template=template, variables=variables)
    return asyncio.run(prepare_chat(InProcessServing(llm.model), said, SamplingParams(), FORM)).steering


def test_a_model_may_open_thoughts_by_itself(llm: LLM) -> None:
    steering = planned(llm, PLAIN)
    assert steering.constraint is None and isinstance(steering.controller, ReasoningThenGrammar)
    assert steering.controller.opening == llm.tokenizer.id_of("<think>") and steering.controller.budget is None


def test_thoughts_that_are_switched_off_are_not_opened(llm: LLM) -> None:
    """The request or the template's default turns thoughts off. If they were on, the opening tag would be the most
    probable token."""
    assert (
        planned(llm, None) == planned(llm, PLAIN, enable_thinking=False) == planned(llm, None, thinking=False) == FORM
    )
    assert isinstance(planned(llm, None, enable_thinking=True).controller, ReasoningThenGrammar)
    (output,) = llm.chat([{"role": "user", "content": "A number?"}], regex="[0-9]{3}", max_tokens=80)
    assert output.text.isdigit(), output


def test_thoughts_that_the_prompt_closes_are_not_opened_again(llm: LLM) -> None:
    assert planned(llm, PLAIN + "<think>\n\n</think>\n\n") == FORM


def test_thoughts_that_the_prompt_opens_are_ended_first(llm: LLM) -> None:
    steering = planned(llm, PLAIN + "<think>\n")
    assert isinstance(steering.controller, ReasoningThenGrammar) and steering.controller.opening is None


@pytest.mark.parametrize("seed", range(3))
def test_what_follows_the_thoughts_has_the_form(llm: LLM, seed: int) -> None:
    for template in (PLAIN, PLAIN + "<think>\n", PLAIN + "<think>\n\n</think>\n\n", None):
        (output,) = llm.chat(
            HI, choice=["red", "blue"], chat_template=template, seed=seed, temperature=1.5, thinking_budget=None,
            logit_bias={token: 20.0 for token in [llm.tokenizer.id_of("</think>")] if token is not None},
        )  # fmt: skip
        assert output.message is not None and output.message.content in ("red", "blue"), output
