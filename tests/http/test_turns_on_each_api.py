"""Tests that a turn with calls, thoughts and text is the same on every API, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle import LLM, SamplingParams
from bridle.errors import InvalidRequest
from bridle.serving import LoadedModel
from bridle.tokenizer import Tokenizer
from tests.covering import covering
from tests.http.harness import NAME, local_client, saying, scripted_model
from tests.http.parked_chats import THINKING, TOLD
from tests.http.routes import ROUTES, post, text_of
from tests.http.tool_calls import PARAMETERS, a_tokenizer
from tests.http.turn_apis import APIS, Turn
from tests.lmtp.harness import running

TOOLS = [{"name": "find", "parameters": PARAMETERS}, {"name": "stop", "parameters": {"type": "object"}}]
ASKED = [{"role": "user", "content": "Where?"}]
ROME, OSLO = ("find", {"city": "Rome", "day": 1}), ("find", {"city": 'Ös"lo</tool_call> 日', "day": -2})
#: The end of thoughts.
THOUGHT = "\n</think>\n\n"
#: No grammar of calls applies beside this.
FREE = {"regex": "(?s:.*)"}


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


BARE = json.dumps({"name": "find", "arguments": ROME[1]}, indent=2)
WRONG, BROKEN = call("remove", {"city": "Rome"}), call(*ROME).replace('": 1', '": ,')
#: What the model writes, fields of the request, and the turn that each API has to say it was.
TURNS: dict[str, tuple[str, dict[str, Any], Turn]] = {
    "text": ("It is <b> 1 < 2 <tool.", {}, Turn(content="It is <b> 1 < 2 <tool.")),
    "one call": (call(*ROME), {}, Turn(calls=(ROME,), end="calls")),
    "two calls": (f"{call(*ROME)}\n{call(*OSLO)}", {}, Turn(calls=(ROME, OSLO), end="calls")),
    "no arguments": (call("stop", {}), {}, Turn(calls=(("stop", {}),), end="calls")),
    "text, then a call": ("Let me see. " + call(*ROME), {}, Turn("", "Let me see. ", (ROME,), "calls")),
    "a call without tags": (f"```json\n{BARE}\n```", {}, Turn(calls=(ROME,), end="calls")),
    "thoughts": (f"<think>\nRome?{THOUGHT}In Rome.", {}, Turn("Rome?", "In Rome.")),
    "thoughts, then a call": (f"<think>\nRome?{THOUGHT}{call(*ROME)}", {}, Turn("Rome?", "", (ROME,), "calls")),
    "thoughts, text and a call": (f"<think>Hm.{THOUGHT}So: {call(*OSLO)}", {}, Turn("Hm.", "So: ", (OSLO,), "calls")),
    "a call in thoughts": (f"<think>{call(*ROME)}{THOUGHT}No.", {}, Turn(call(*ROME), "No.")),
    "a wrong name": (WRONG, FREE, Turn(content=WRONG)),
    "invalid JSON": (BROKEN, FREE, Turn(content=BROKEN)),
    "a wrong name, then a call": (WRONG + call(*ROME), FREE, Turn("", WRONG, (ROME,), "calls")),
    "tools that are not to be called": (call(*ROME), {"tools": None}, Turn(content=call(*ROME))),
}


class Script:
    """A model that writes one text."""

    def __init__(self) -> None:
        self.said = ""
        self.text = thinking()
        self.model: LoadedModel = scripted_model(text=self.text, next_token=self._next, max_model_len=1024)

    def _next(self, prefix: Any) -> int:
        return saying(self.said, self.text)(prefix)


@cache
def thinking() -> Tokenizer:
    """Return a tokenizer of a model that reasons, and writes calls between tags."""
    return a_tokenizer(TOLD + THINKING)


@pytest.fixture(scope="module")
def script() -> Iterator[tuple[Script, TestClient]]:
    made = Script()
    with local_client(made.model) as client:
        yield made, client


@pytest.mark.few(35)
@pytest.mark.parametrize(("case", "is_stream"), covering(product(APIS, TURNS), [False, True]), ids=str)
def test_every_api_says_the_same(script: tuple[Script, TestClient], case: tuple[str, str], is_stream: bool) -> None:
    api, name = case
    script[0].said, fields, expected = TURNS[name]
    fields = dict(fields)
    tools = fields.pop("tools", TOOLS) or []
    assert APIS[api].ask(script[1], ASKED, tools, is_stream, max_tokens=400, **fields) == expected


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_call_that_is_cut_off_is_told_so(script: tuple[Script, TestClient], api: str, is_stream: bool) -> None:
    """An incomplete call is reported as text by APIs whose arguments are text. Ollama's arguments are an object, like
    Anthropic's without streaming. The arguments object of an incomplete call is empty."""
    script[0].said = call(*ROME)
    text = '{"city": "Ro'
    length = len(thinking().encode(script[0].said.partition('me", ')[0], add_special_tokens=False))
    turn = APIS[api].ask(script[1], ASKED, TOOLS, is_stream, max_tokens=length)
    shown = {} if api == "ollama" or (api == "messages" and not is_stream) else text
    assert turn == Turn(calls=(("find", shown),), end="length")


@pytest.mark.few(4)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_who_wants_one_call_gets_one(script: tuple[Script, TestClient], api: str, is_stream: bool) -> None:
    script[0].said = call(*ROME) + call(*OSLO)
    once: dict[str, Any] = {"parallel_tool_calls": False}
    if api == "messages":
        once = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert APIS[api].ask(script[1], ASKED, TOOLS, is_stream, max_tokens=400, **once) == Turn(calls=(ROME,), end="calls")


@pytest.mark.parametrize("api", APIS)
def test_a_mistyped_role_is_refused_by_its_name(script: tuple[Script, TestClient], api: str) -> None:
    kind = APIS[api]
    given = kind.body([{"role": "usr", "content": "Hi"}], [])
    answer = script[1].post(kind.route, json={"model": NAME, kind.length: 9, **kind.further, **given})
    assert answer.status_code == 400, answer.text
    place = "input" if api == "responses" else "messages"
    assert f"{place}[0].role is 'usr'; must be" in answer.text
    assert "tool" in answer.text or api == "messages"  # Anthropic's API has no such role


def test_python_refuses_a_mistyped_role() -> None:
    said = r"messages\[1\]\.role is 'usr'; must be one of system, developer, user"
    with LLM(Script().model) as llm, pytest.raises(InvalidRequest, match=said):
        llm.chat([{"role": "user", "content": "a"}, {"role": "usr", "content": "b"}])


def test_python_says_the_same() -> None:
    script = Script()
    with LLM(script.model, sampling=SamplingParams(temperature=0.0, max_tokens=400)) as llm:
        for said, fields, expected in TURNS.values():
            script.said, tools = said, [] if "tools" in fields else TOOLS
            given = [{"type": "function", "function": each} for each in tools]
            (output,) = llm.chat(ASKED, tools=given or None, **{k: v for k, v in fields.items() if k != "tools"})
            found = output.message
            assert found is not None
            calls = tuple((each.name, json.loads(each.arguments)) for each in found.calls)
            assert (found.thoughts, found.content, calls) == (expected.thoughts, expected.content, expected.calls)


RAW = ("/v1/completions", "/generate", "/v1/run")


@pytest.mark.parametrize("route", RAW)
def test_routes_of_texts_show_calls_as_they_are_written(script: tuple[Script, TestClient], route: str) -> None:
    script[0].said = f"<think>Hm.</think>{call(*ROME)}"
    (length,) = [name for name in ROUTES[route][0] if name.startswith("max_")]
    fields = {length: 200} | ({} if route == "/generate" else {"temperature": 0.0})
    assert text_of(post(script[1], route, fields)) == script[0].said


async def test_lmtp_shows_calls_as_they_are_written() -> None:
    made = Script()
    made.said = f"<think>Hm.</think>{call(*ROME)}"
    async with running(made.model) as setup:
        found = await setup.connect().ask("GENERATE", prompt="x", text=True, max_tokens=200, temperature=0)
    assert "".join(each.get("text") or "" for each in found) == made.said


# -- what templates are told -----------------------------------------------------------------------------------------

#: Writes every role, and the variables that clients set.
SHOWN = (
    "{% for m in messages %}<{{ m.role }}{{ ' of a tool' if m.role == 'tool' }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}"
    "{{ '|think=' ~ enable_thinking if enable_thinking is defined }}"
    "{{ '|effort=' ~ reasoning_effort if reasoning_effort }}{{ '|tone=' ~ tone if tone }}"
    "{{ '<assistant>' if add_generation_prompt }}{# <think> </think> #}"
)


def said(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/v1/run")
CHAT, RESPONSES, MESSAGES, OLLAMA, RUN = CHATS
INPUTS = {RESPONSES: "input"}
LENGTHS = {RESPONSES: "max_output_tokens"}
FURTHER: dict[str, dict[str, Any]] = {RUN: {"controller": "none", "controller_arg": None}, OLLAMA: {"stream": False}}
SYSTEMS = said(("system", "a"), ("user", "b"), ("assistant", "c"), ("system", "d"), ("user", "e"))
DEVELOPER = said(("developer", "a"), ("user", "b"))
USER, BEGUN = said(("user", "b")), said(("user", "b"), ("assistant", "So"))
FUNCTION = {"name": "find", "arguments": '{"city": "Rome"}'}
CALLED = [*USER, {"role": "assistant", "content": "Hm", "tool_calls": [
    {"id": "call_c1", "type": "function", "function": FUNCTION}]}]  # fmt: skip
RESULT = '<user>b<assistant>Hm[find {"city": "Rome"}]<tool of a tool>sunny<assistant>'
OFF, HIGH = "<user>b|think=False<assistant>", "<user>b|think=True|effort=high<assistant>"
TONE: dict[str, Any] = {"chat_template_kwargs": {"tone": "warm", "enable_thinking": False}}
WARM = "<user>b|think=False|tone=warm<assistant>"
#: What is asked on which route, and the prompt that the template makes of it.
PROMPTS: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "several system messages": (
        {route: {"messages": SYSTEMS} for route in CHATS},
        "<system>a<user>b<assistant>c<system>d<user>e<assistant>",
    ),
    "instructions": (
        {
            CHAT: {"messages": said(("system", "a"), ("user", "b"))},
            RESPONSES: {"input": "b", "instructions": "a"},
            MESSAGES: {"messages": USER, "system": [{"type": "text", "text": "a"}]},
            OLLAMA: {"messages": USER, "system": "a"},
            "/api/generate": {"prompt": "b", "system": "a", "stream": False},
        },
        "<system>a<user>b<assistant>",
    ),
    "developer": (
        {route: {"messages": DEVELOPER} for route in (CHAT, RESPONSES, RUN)},
        "<system>a<user>b<assistant>",
    ),
    "a tool's result": (
        {
            CHAT: {"messages": [*CALLED, {"role": "tool", "tool_call_id": "call_c1", "content": "sunny"}]},
            RUN: {"messages": [*CALLED, {"role": "tool", "tool_call_id": "call_c1", "content": "sunny"}]},
            RESPONSES: {"input": [
                *said(("user", "b"), ("assistant", "Hm")),
                {"type": "function_call", "call_id": "call_c1", **FUNCTION},
                {"type": "function_call_output", "call_id": "call_c1", "output": "sunny"},
            ]},
            MESSAGES: {"messages": [
                *USER,
                {"role": "assistant", "content": [
                    {"type": "text", "text": "Hm"},
                    {"type": "tool_use", "id": "toolu_c1", "name": "find", "input": {"city": "Rome"}},
                ]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_c1", "content": "sunny"}]},
            ]},
            OLLAMA: {"messages": [
                *USER,
                {"role": "assistant", "content": "Hm", "tool_calls": [
                    {"function": {"name": "find", "arguments": {"city": "Rome"}}}]},
                {"role": "tool", "tool_name": "find", "content": "sunny"},
            ]},
        },
        RESULT,
    ),
    "the beginning of an answer": (
        {
            CHAT: {"messages": BEGUN, "continue_final_message": True},
            RUN: {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
            MESSAGES: {"messages": BEGUN},
        },
        "<user>b<assistant>So",
    ),
    "thoughts that are off": (
        {
            CHAT: {"messages": USER, "reasoning": {"enabled": False}},
            RESPONSES: {"messages": USER, "reasoning": {"enabled": False}},
            MESSAGES: {"messages": USER, "thinking": {"type": "disabled"}},
            OLLAMA: {"messages": USER, "think": False},
            RUN: {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}},
        },
        OFF,
    ),
    "how hard to think": (
        {
            CHAT: {"messages": USER, "reasoning_effort": "high", "reasoning": {"enabled": True}},
            RESPONSES: {"messages": USER, "reasoning": {"effort": "high", "enabled": True}},
            MESSAGES: {"messages": USER, "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}},
            OLLAMA: {"messages": USER, "think": "high"},
        },
        HIGH,
    ),
    "variables": ({route: {"messages": USER, **TONE} for route in CHATS}, WARM),
}  # fmt: skip


@pytest.fixture(scope="module")
def shown() -> Iterator[tuple[list[list[int]], Tokenizer, TestClient]]:
    prompts: list[list[int]] = []
    text = a_tokenizer(SHOWN)

    def note(prefix: Any) -> int:
        prompts.append(list(prefix))
        return text.eos_token_ids[0]

    with local_client(scripted_model(text=text, next_token=note, max_model_len=1024)) as client:
        yield prompts, text, client


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "route"), [(name, route) for name in PROMPTS for route in PROMPTS[name][0]])
def test_templates_are_told_the_same(
    shown: tuple[list[list[int]], Tokenizer, TestClient], name: str, route: str
) -> None:
    prompts, text, client = shown
    prompts.clear()
    bodies, expected = PROMPTS[name]
    fields = {INPUTS.get(route, key) if key == "messages" else key: value for key, value in bodies[route].items()}
    body = {"model": NAME, LENGTHS.get(route, "max_tokens"): 1, **FURTHER.get(route, {}), **fields}
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert text.decode(prompts[0], skip_special_tokens=False) == expected
