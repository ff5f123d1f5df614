"""The tags around reasoning follow from what a chat template writes, for answers or for calls alone."""

from __future__ import annotations

import pytest

from bridle.chat.reasoning import infer_thoughts
from bridle.chat.stream_deltas import CallRules, ParsedMessage
from bridle.chat.tool_parsers.harmony import HarmonyReader
from bridle.tokenizer.chat_template import ChatTemplate

_TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>THOUGHTS{{ m.content and 'LEAD' ~ m.content ~ 'TAIL' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|end|>{% endfor %}"
)


def template(thoughts: str, condition: str = "true", lead: str = "", tail: str = "") -> ChatTemplate:
    written = f"{{% if m.reasoning_content and {condition} %}}{thoughts}{{% endif %}}"
    return ChatTemplate(_TURNS.replace("THOUGHTS", written).replace("LEAD", lead).replace("TAIL", tail), {})


ANSWERED = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


@pytest.mark.parametrize(
    ("made", "tags"),
    [
        (template("<think>\n{{ m.reasoning_content }}\n</think>\n"), ("<think>", "</think>", "", "")),
        (template("<think>{{ m.reasoning_content }}</think>", "m.tool_calls"), ("<think>", "</think>", "", "")),
        (template("<think>{{ m.reasoning_content }}</think>", "enable_thinking"), ("<think>", "</think>", "", "")),
        (template("<|channel>thought\n{{ m.reasoning_content }}\n<channel|>", "m.tool_calls"),
         ("<|channel>thought", "<channel|>", "", "")),
        (template("<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>", "m.tool_calls", *ANSWERED),
         ("<|START_THINKING|>", "<|END_THINKING|>", *ANSWERED)),
        (template("{{ m.reasoning_content }}"), None),
        (template("", "false"), None),
    ],
)  # fmt: skip
def test_tags_are_those_that_the_template_writes(made: ChatTemplate, tags: tuple[str, ...] | None) -> None:
    assert infer_thoughts(made) == tags


@pytest.mark.parametrize(("tells", "thoughts", "content"), [(True, "why", "Oslo"), (False, "", "why\n\nOslo")])
def test_analysis_is_content_where_nobody_wants_reasoning_apart(tells: bool, thoughts: str, content: str) -> None:
    text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Oslo<|return|>"
    for pieces in ([text], list(text)):
        reader, found = HarmonyReader(CallRules(), tells), ParsedMessage()
        for piece in pieces:
            found.add(reader.push(piece))
        assert (found.thoughts, found.content) == (thoughts, content)
