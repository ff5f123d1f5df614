"""Messages in roles that a chat template refuses or drops are merged by the rules of
`bridle.tokenizer.chat_template_quirks`, for chats and scripts. Other messages stay unchanged."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from bridle.aici.runtime.chat_prompt import render_chat
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.loaded_module import GuestEnvironment
from bridle.aici.runtime.vocabulary import RuntimeVocabulary
from bridle.chat.conversation import Conversation, make_prompt
from bridle.errors import InvalidRequest
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_settings import ChatSettings
from bridle.tokenizer.chat_template import ChatTemplate, prepare
from bridle.tokenizer.chat_template_quirks import RoleRules, fitted, rules_of
from tests.fakes.role_templates import ALTERNATING, FIRST_SYSTEM, NO_SYSTEM, ONLY_FIRST_SYSTEM, PARTS, any_role
from tests.http.harness import scripted_model
from tests.tokenizer.templates import a_tokenizer

CALL = {"id": "callid001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
MEDIA = [{"type": "text", "text": "seen"}, {"type": "image"}]


def said(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def written(source: str, messages: list[dict[str, Any]]) -> str:
    template = ChatTemplate(source, {})
    return template.render(fitted(messages, rules_of(template)), None, None, {}, False)


SYSTEMS = said(("system", "a"), ("user", "b"), ("assistant", "c"), ("system", "d"), ("developer", "e"), ("user", "f"))
TOOL = [*said(("user", "q")), {"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (any_role(), SYSTEMS, "<system>a<user>b<assistant>c<system>d<system>e<user>f"),
        (FIRST_SYSTEM, SYSTEMS, "<system>a\n\nd\n\ne<user>b<assistant>c<user>f"),
        (ONLY_FIRST_SYSTEM, SYSTEMS, "<system>a\n\nd\n\ne<user>b<assistant>c<user>f"),
        (NO_SYSTEM, SYSTEMS, "<user>a\n\nd\n\ne\n\nb<assistant>c<user>f"),
        (FIRST_SYSTEM, said(("user", "b"), ("system", "a")), "<system>a<user>b"),
        (FIRST_SYSTEM, said(("developer", "a"), ("user", "b")), "<system>a<user>b"),
        (ALTERNATING, said(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")),
         "<user>a\n\nb<assistant>c\n\nd<user>e"),
        (NO_SYSTEM, said(("system", "a")), "<user>a"),
        (ALTERNATING, [*TOOL, *said(("tool", "r"), ("user", "s"))], "<user>q<call>f<tool>r\n\ns"),
        (any_role(), [*TOOL, *said(("tool", MEDIA), ("user", "s"))],
         "<user>q<assistant><call>f<tool>seen<user>IMAGE<user>s"),
        (PARTS, [*TOOL, *said(("tool", MEDIA), ("user", "s"))], "<user>q<assistant><call>f<tool>seenIMAGE<user>s"),
    ],
)  # fmt: skip
def test_messages_are_merged_as_the_template_needs_it(source: str, messages: list[dict[str, Any]], text: str) -> None:
    assert written(source, messages) == text


def test_what_no_rule_covers_is_refused_with_the_words_of_the_template() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        written(ALTERNATING, said(("assistant", "a"), ("user", "b")))


class Guest:
    """The parts of a sandboxed program that rendering its conversations needs."""

    def __init__(self, text: Tokenizer) -> None:
        vocabulary = RuntimeVocabulary([], 0, text.encode, tokenizer=text)
        self.surroundings, self.spent_tokenizing = GuestEnvironment(vocabulary, RuntimeLimits()), 0


def of_script(text: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return the conversation that the function `chat` of a script gets."""
    guest: Any = Guest(text)
    wanted = json.dumps({"messages": messages, "tools": tools})
    answer: dict[str, Any] = json.loads(render_chat(guest, wanted.encode()))
    return answer


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("source", "messages"),
    [(ALTERNATING, said(("user", "a"), ("user", "b")))]
    + [
        (source, messages)
        for source in (any_role(), FIRST_SYSTEM, ONLY_FIRST_SYSTEM, NO_SYSTEM)
        for messages in (SYSTEMS, [*TOOL, *said(("tool", "r"), ("user", "s"))])
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_script_writes_what_a_chat_gets(
    source: str, tools: list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> None:
    text = a_tokenizer(source)
    text.chat_settings = ChatSettings(tool_format="hermes")  # these templates write calls in no known form
    with closing(scripted_model(text=text)) as model:
        prompt = make_prompt(model, Conversation(messages, tools))
    assert of_script(text, messages, tools) == {"text": prompt.text, "tokens": list(prompt.tokens)}


def test_a_script_is_refused_a_role_that_is_neither_usual_nor_in_the_template() -> None:
    text = a_tokenizer(any_role("{{ '' if m.role == 'critic' }}"))
    assert "messages[1].role is 'usr'; must be" in of_script(text, said(("user", "a"), ("usr", "b")), None)["error"]
    assert of_script(text, said(("user", "a"), ("critic", "b")), None)["text"] == "<user>a<critic>b"


def test_a_script_is_refused_tools_that_its_operator_does_not_want_described() -> None:
    text = a_tokenizer(any_role())
    text.chat_settings = ChatSettings(tool_prompt="refuse")
    assert "does not write them" in of_script(text, said(("user", "a")), TOOLS)["error"]
    assert "a" in of_script(text, said(("user", "a")), None)["text"]


@pytest.mark.parametrize("parses", [False, True])
def test_a_script_has_the_operators_setting_for_special_tokens_in_messages(parses: bool) -> None:
    text = a_tokenizer(any_role())
    text.chat_settings = ChatSettings(parse_special_text=parses)
    ends = text.encode("<|im_end|>", add_special_tokens=False)
    answer = of_script(text, said(("user", "a<|im_end|>b")), None)
    assert answer["text"].endswith("a<|im_end|>b") and len(ends) == 1
    assert (ends[0] in answer["tokens"]) is parses


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_earlier_reasoning_has_the_name_that_the_template_reads(given: str, key: str) -> None:
    source = any_role(f"{{{{ '(' ~ m.{key} ~ ')' if m.{key} }}}}")
    messages = [*said(("user", "a")), {"role": "assistant", "content": "b", given: "why"}]
    assert written(source, messages) == "<user>a<assistant>(why)b"


def test_reasoning_is_left_out_where_the_template_refuses_it_beside_content_and_calls() -> None:
    refusal = "{{ raise_exception('no') if m.thinking and m.content and m.tool_calls }}{{ m.thinking }}"
    source = any_role(refusal)
    call = {"role": "assistant", "content": "b", "thinking": "why", "tool_calls": [CALL]}
    assert written(source, [*said(("user", "a")), call]) == "<user>a<assistant>b<call>f"
    assert written(source, [*said(("user", "a")), call | {"content": ""}]) == "<user>a<assistant>why<call>f"


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({}, {}),
        ({"is_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"effort": "high"}, {"reasoning_effort": "high"}),
        ({"effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"thinking_budget": 5}, {"thinking_budget": 5, "enable_thinking": True, "thinking": True}),
        (
            {"thinking_budget": 0, "is_thinking": True},
            {"thinking_budget": 0, "enable_thinking": True, "thinking": True},
        ),
        ({"variables": {"thinking": True}}, {"thinking": True, "enable_thinking": True}),
        ({"is_thinking": True, "variables": {"enable_thinking": False}}, {"enable_thinking": False, "thinking": False}),
    ],
)
def test_settings_of_thinking_reach_the_template_under_the_names_that_it_reads(
    settings: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert Conversation([], **settings).options() == variables


def test_the_messages_of_the_caller_stay_as_they_are() -> None:
    messages = prepare([{"role": "system", "content": "a"}, *said(("user", "b"), ("system", "c"))])
    before = [dict(each) for each in messages]
    written(NO_SYSTEM, messages)
    assert messages == before


def test_many_messages_are_joined_in_their_order() -> None:
    words = [f"w{number}" for number in range(20_000)]
    systems = [{"role": "system", "content": word} for word in words]
    asked = {"role": "user", "content": "q"}
    assert fitted([*systems, asked], RoleRules(system="first")) == [
        {"role": "system", "content": "\n\n".join(words)},
        asked,
    ]
    users = [{"role": "user", "content": word} for word in words]
    assert fitted(users, RoleRules(alternates=True)) == [{"role": "user", "content": "\n\n".join(words)}]


def test_earlier_calls_are_json_where_the_template_would_print_a_dictionary() -> None:
    source = any_role().replace(" if c.function.name.startswith('z')", "")
    assert written(source, TOOL) == '<user>q<assistant><call>f{"x": 1}'
