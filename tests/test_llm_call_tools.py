"""Tests of `LLM(tools=...)`: controllers of a real model call functions of the program."""

from __future__ import annotations

import pytest

from bridle import LLM, Controller, Decision, InvalidRequest, SequenceView, ToolFailed, ToolLimits
from bridle.controller_tools import Call


class Quotes(Controller):
    """A controller that writes the result of the tool `say`."""

    call: Call | None = None

    def next(self, view: SequenceView) -> Decision:
        if self.call is None:
            self.call = view.tool("say", {"word": "grün"})
        if not self.call.is_done:
            return Decision.wait_for(self.call)
        if view.generated:
            return Decision.stop()
        return Decision.splice(0, view.encode(self.call.text))


def test_a_function_answers() -> None:
    with LLM("demo", tools={"say": lambda word: f" said {word}."}, num_blocks=256) as llm:
        outputs = llm.generate(["One", "Two"], controller=Quotes(), max_tokens=20)
        assert [output.text for output in outputs] == [" said grün."] * 2
        usage = outputs[0].usage
        assert usage.sampled_tokens == 0
        assert usage.forced_tokens == usage.completion_tokens
        assert llm.model.tools is not None
        assert llm.model.tools.counts()["say"].num_calls == 2


def test_without_tools_a_call_fails_in_words() -> None:
    with LLM("demo", num_blocks=256) as llm:
        (output,) = llm.generate("One", controller=Quotes(), max_tokens=20)
        error = output.outputs[0].error
        assert isinstance(error, ToolFailed)
        assert str(error) == "tool 'say': unknown tool; available tools: none"
        with pytest.raises(InvalidRequest, match="leave out settings for the model"):
            LLM(llm.model, tools={"say": str})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"timeout": 0}, "timeout is 0; must be a number above 0"),
        ({"max_calls": 0.5}, "max_calls is 0.5; must be a number above 0"),
        ({"max_calls": 1.5}, "max_calls is 1.5; must be a whole number"),
        ({"timeout": 700}, "timeout is 700; must be at most max_timeout (600)"),
        ({"max_threads": "many"}, "max_threads is 'many'; must be a number above 0"),
    ],
)
def test_limits_are_checked(limits: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ToolLimits(**limits)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_tools_are_functions_with_names() -> None:
    with pytest.raises(InvalidRequest, match=r"tools: 'x' is 3; each value must be a function"):
        LLM("demo", tools={"x": 3})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequest, match=r"tools has the name ''; must have 1 to 128 printable characters"):
        LLM("demo", tools={"": str})
