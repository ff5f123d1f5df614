"""Calls are found in text that arrives in any pieces, in every format. A format's grammar accepts exactly its calls."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.chat.stream_deltas import CallArguments, CallRules, ParsedMessage, ToolCallStart
from bridle.chat.tool_parsers.call_reader import PYTHON_TAG
from bridle.chat.tool_parsers.formats import InferredFormat, ToolFormat, described_as, format_of
from bridle.chat.tool_parsers.grammar import Function
from bridle.chat.tool_parsers.mistral import Mistral
from bridle.chat.tool_parsers.presets import PRESETS
from bridle.errors import UnsupportedFeature
from bridle.http.anthropic.schemas import MessagesBody
from bridle.http.openai.responses.schemas import ResponsesBody
from bridle.structured_output import vocabulary_of
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.vocabulary import GrammarVocabulary
from bridle.tokenizer import Tokenizer
from bridle.tokenizer.chat_settings import ChatSettings
from bridle.tokenizer.chat_template import ChatTemplate

ARGUMENTS = '{"a": "<b> } </tool_call> \\" [", "c": [{"d": {}}]}'
OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = f'{OPEN}{{"name": "f", "arguments": {ARGUMENTS}}}{CLOSE}'
LAMA = f'{{"name": "f", "parameters": {ARGUMENTS}}}'
WANT = ("f", json.loads(ARGUMENTS))
HERMES, LLAMA = (InferredFormat(PRESETS[name], {}) for name in ("hermes", "llama3_json"))
FORMATS: list[ToolFormat] = [HERMES, LLAMA, Mistral(["</s>"])]


def read(kind: ToolFormat, pieces: list[str], is_open: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content and the tool calls of a text that arrives in pieces."""
    reader, found = kind.reader(is_open), ParsedMessage()
    for position, piece in enumerate(pieces):
        found.add(reader.push(piece, is_last=position == len(pieces) - 1))
    return found.content, [(call.name, _json(call.arguments)) for call in found.calls]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ("", "", []),
        (CALL, "", [WANT]),
        ("Let me see.\n" + CALL + "\n" + CALL + "\n", "Let me see.\n", [WANT] * 2),
        (CALL.removesuffix(CLOSE), "", [WANT]),
        (CALL + " done", " done", [WANT]),
        (CALL.removesuffix("}" + CLOSE) + "\n" + CLOSE, "", [WANT]),
        (CALL[: CALL.index(ARGUMENTS) + 9], "", [("f", ARGUMENTS[:9])]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", {"x": 1})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", {"x": 1})]),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ("<tool_call>[1]</tool_call>!", "<tool_call>[1]</tool_call>!", []),
        ('<tool_call>{"name": 5}</tool_call>!', '<tool_call>{"name": 5}</tool_call>!', []),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>", "<tool_call>", []),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
        ("<tool_call>" + "{" * 20_000, "<tool_call>" + "{" * 20_000, []),
    ],
)
def test_calls_between_tags(text: str, content: str, calls: list[Any]) -> None:
    assert read(HERMES, [text]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ("   ", "   ", []),
        (LAMA, "", [WANT]),
        ("<|python_tag|>" + LAMA, "", [WANT]),
        (f"\n{LAMA}; {LAMA}\n", "", [WANT] * 2),
        ('{"temperature": 5}', '{"temperature": 5}', []),
        ("Here: " + LAMA, "Here: " + LAMA, []),
        ("<|py", "<|py", []),
        (LAMA + " and so on", " and so on", [WANT]),
    ],
)
def test_calls_as_bare_json(text: str, content: str, calls: list[Any]) -> None:
    assert read(LLAMA, [text]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain</s>", "plain", []),
        (f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}]</s>', "", [WANT]),
        (f'Well.[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}, "id": "x"}}, {{"name": "g"}}]</s>', "Well.",
         [WANT, ("g", {})]),
        (f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}</s>", "", [WANT]),
        (f"[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{ARGUMENTS}[TOOL_CALLS]f{ARGUMENTS}</s>", "", [WANT] * 2),
        ("[TOOL_CALLS]never mind", "never mind", []),
    ],
)  # fmt: skip
def test_calls_after_a_token(text: str, content: str, calls: list[Any]) -> None:
    assert read(Mistral(["</s>"]), [text]) == (content, calls)


def test_calls_after_a_token_that_stood_in_the_prompt() -> None:
    text = f'[{{"name": "f", "arguments": {ARGUMENTS}}}]'
    assert read(Mistral(["</s>"]), [text], is_open=True) == ("", [WANT])


PARTS = [CALL, LAMA, "a", "<", OPEN, CLOSE, "<tool", "{}", "b <", "{", '"', "[TOOL_CALLS]", "[", "]", ",", "; ", "f",
         "[ARGS]", "</s", "</s>", "\n", '{"name": "f", ', '"arguments": {', "<|python_tag|>", "<|py", "}"]  # fmt: skip


@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(PARTS), max_size=7),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
)
def test_calls_do_not_depend_on_how_the_text_arrives(
    kind: ToolFormat, parts: list[str], cuts: list[int], is_open: bool
) -> None:
    text = "".join(parts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole_content, whole_calls = read(kind, [text], is_open)
    content, calls = read(kind, [text[start:end] for start, end in pairwise(bounds)], is_open)
    assert calls == whole_calls
    assert content.split() == whole_content.split()


@pytest.mark.parametrize(("kind", "text"), [(HERMES, CALL), (LLAMA, LAMA), (LLAMA, PYTHON_TAG + LAMA + "; " + LAMA)])
def test_calls_come_character_by_character(kind: ToolFormat, text: str) -> None:
    assert read(kind, list(text)) == ("", [WANT] * text.count('"name"'))


def test_a_call_streams_from_its_name_on() -> None:
    reader, seen = HERMES.reader(), []
    for char in CALL:
        seen.append(len(reader.push(char)))
    first = CALL.index(ARGUMENTS)
    assert not any(seen[:first])
    assert seen[first] == 2  # the call, and the first character of its arguments
    assert seen[first + 1 : first + len(ARGUMENTS)] == [1] * (len(ARGUMENTS) - 1)


def test_ids_differ_and_suit_every_template() -> None:
    found = ParsedMessage().add(HERMES.reader().push(CALL + CALL, is_last=True))
    first, second = (call.id for call in found.calls)
    assert first != second
    assert len(first) == 9
    assert first.isalnum()


def test_ids_go_back_to_templates_as_they_were_made() -> None:
    """Each API adds its own prefix to the ids, but some templates accept only ids of a certain length."""
    (made,) = ParsedMessage().add(HERMES.reader().push(CALL, is_last=True)).calls
    ask = {"role": "user", "content": "x"}
    use = {"type": "tool_use", "id": f"toolu_{made.id}", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{made.id}", "content": "y"}
    turns = [ask, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    anthropic, _ = MessagesBody.model_validate({"messages": turns, "max_tokens": 9}).to_chat("m")
    call = {"type": "function_call", "call_id": f"call_{made.id}", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": f"call_{made.id}", "output": "y"}
    openai = ResponsesBody.model_validate({"input": [ask, call, output]}).to_chat("m")
    for chat in (anthropic, openai):
        assert [call["id"] for message in chat.messages for call in message.get("tool_calls", ())] == [made.id]
        assert chat.messages[-1]["tool_call_id"] == made.id


# -- grammars ----------------------------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/C"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"C": {"enum": ["Rome", "Oslo"]}}}  # fmt: skip
FUNCTIONS = [Function("find", CITY), Function('odd "name"', None)]
GOOD = '{"name": "find", "%s": {"city": "Rome"}}'
ODD = '{"name": "odd \\"name\\"", "%s": {}}'
BAD = ['{"name": "find", "%s": {"city": "Paris"}}', '{"name": "fund", "%s": {}}', '{"name": "find", "%s": {}}']


@cache
def vocabulary() -> tuple[Tokenizer, GrammarVocabulary]:
    tokenizer = Tokenizer.load("demo")
    return tokenizer, vocabulary_of(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def passes(matcher: Matcher, text: str) -> bool:
    """Return whether a grammar accepts the whole text, and may end there."""
    tokenizer, _ = vocabulary()
    twin = matcher.copy()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not twin.mask()[token >> 3] >> (token & 7) & 1:
            return False
        twin.commit([token])
    return twin.is_accepting


def wrapped(kind: ToolFormat, *calls: str) -> str:
    """Return a text of calls as the format writes them."""
    if kind is HERMES:
        return "\n".join(f"{OPEN}\n{call % 'arguments'}\n{CLOSE}" for call in calls)
    if kind is LLAMA:
        return "; ".join(call % "parameters" for call in calls)
    return "[" + ", ".join(call % "arguments" for call in calls) + "]"


@pytest.mark.parametrize("kind", FORMATS)
def test_what_must_be_calls_is_nothing_else(kind: ToolFormat) -> None:
    form = kind.must_call(FUNCTIONS, 3)
    matcher = Matcher(vocabulary()[1], grammar_of(form.constraint()))
    for calls in ([GOOD], [ODD], [GOOD, ODD, GOOD]):
        text = wrapped(kind, *calls)
        assert passes(matcher, text), text
        content, found = read(kind, [text], is_open=True)
        assert content == ""
        assert [name for name, _ in found] == [json.loads(call % "x")["name"] for call in calls]
    for text in ("", "Hello", wrapped(kind, *[GOOD] * 4), *(wrapped(kind, bad) for bad in BAD)):
        assert not passes(matcher, text), text
    single = Matcher(vocabulary()[1], grammar_of(kind.must_call(FUNCTIONS[:1], 1).constraint()))
    assert passes(single, wrapped(kind, GOOD))
    assert not passes(single, wrapped(kind, GOOD, GOOD))
    assert not passes(single, wrapped(kind, ODD))


@pytest.mark.parametrize("kind", FORMATS[:2])
def test_what_may_be_calls_is_right_where_it_is(kind: ToolFormat) -> None:
    form = kind.may_call(FUNCTIONS)
    assert form is not None
    matcher = Matcher(vocabulary()[1], grammar_of(form.constraint()))
    for text in ("", "Hello.", " a { b", "<tool", "x\ny", wrapped(kind, GOOD), wrapped(kind, GOOD, ODD)):
        assert passes(matcher, text), text
    for bad in BAD:
        assert not passes(matcher, wrapped(kind, bad))
    if kind is HERMES:
        text = wrapped(kind, GOOD)
        assert passes(matcher, f"Well: {text} and {text}\nDone.")
        assert not passes(matcher, f"Well: {text} and {wrapped(kind, BAD[0])}")


# -- the choice of a format --------------------------------------------------------------------------------------


class Learned:
    """Fake tokenizer with the template and tokens of a model."""

    eos_token_ids = (2,)
    special_token_ids = frozenset({2})

    def __init__(self, template: str, *tokens: str) -> None:
        self.template_text, self._tokens = template, tokens
        self.chat_template = ChatTemplate(template, {})
        self.chat_settings = ChatSettings()

    def id_of(self, token: str) -> int | None:
        return 7 if token in self._tokens else None

    def token_text(self, token: int) -> str:
        return "</s>"


@pytest.mark.parametrize(
    ("learned", "name"),
    [
        (Learned("... <tool_call> ..."), "hermes"),
        (Learned("... [TOOL_CALLS] ..."), "mistral"),
        (Learned("", "[TOOL_CALLS]"), "mistral"),
        (Learned("", "<|python_tag|>"), "llama3_json"),
        (Learned('{"name": function name, "parameters": dictionary}'), "llama3_json"),
        (Learned("<|tool_call_start|>[f(x=1)]"), "lfm2"),
        (Learned(""), "hermes"),
    ],
)
def test_the_template_tells_the_format(learned: Any, name: str) -> None:
    assert described_as(format_of(learned))["name"] == name


def test_calls_that_are_not_understood_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The operator can still name the format. The template is read once."""
    odd = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{% endfor %}"
    learned: Any = Learned(odd)
    with caplog.at_level("INFO"):
        for _ in range(2):
            with pytest.raises(UnsupportedFeature, match="--tool-format"):
                format_of(learned)
    assert sum("requests with tools are refused" in record.getMessage() for record in caplog.records) == 1
    named: Any = Learned(odd)
    named.chat_settings = ChatSettings(tool_format="qwen3_coder")
    assert described_as(format_of(named))["name"] == "qwen3_coder"


def test_the_demo_model_writes_tags() -> None:
    assert described_as(format_of(vocabulary()[0]))["name"] == "hermes"


BROKEN = [
    '{"name": "g", "arguments": {"a": 1}}',  # never declared
    '{"name": "f", "arguments": {"a": }}',
    '{"name": "f", "arguments": {"a": <tool_call>}}',
    '{"name": "f", "arguments": {"a": "cut',
    '{"name": "f", "arguments": [1]}',
]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [(HERMES, OPEN, CLOSE), (LLAMA, "", ""), (Mistral(), "[TOOL_CALLS]", "")],
)
def test_what_is_no_call_is_content(kind: ToolFormat, before: str, after: str, text: str) -> None:
    """Without a grammar the model may write an undeclared name, or arguments that cannot be parsed. No limit truncates
    the text."""
    rules = CallRules(frozenset({"f"}), is_held=True, tells_cut=False)
    shown = "" if kind.opening_token else before
    for pieces in ([before + text + after], [*before, *text, *after]):
        reader, found = kind.reader(rules=rules), ParsedMessage()
        for position, piece in enumerate(pieces):
            found.add(reader.push(piece, is_last=position == len(pieces) - 1))
        assert (found.content, found.calls) == (shown + text + after, [])


@pytest.mark.parametrize(
    ("kind", "text"),
    [(HERMES, CALL), (LLAMA, LAMA), (Mistral(), f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}")],
)
def test_a_call_that_is_held_comes_whole(kind: ToolFormat, text: str) -> None:
    """The held call is returned as a whole, and exactly as the model wrote it."""
    reader = kind.reader(rules=CallRules(frozenset({"f"}), is_held=True))
    pieces = [piece for char in text for piece in reader.push(char)]
    begun, arguments = (*pieces, *reader.push("", is_last=True))
    assert isinstance(begun, ToolCallStart) and begun.name == "f"
    assert isinstance(arguments, CallArguments) and arguments.text == ARGUMENTS


def test_many_calls_that_begin_and_break_off_are_read_once() -> None:
    """Each tag is in a string of the previous call. No tag is scanned again if that call turns out to be invalid."""
    text = f'{OPEN}{{"a' * 20_000
    assert read(HERMES, [text]) == (text, [])


# -- calls without their tags ----------------------------------------------------------------------------------

BARE = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
UNTAGGED = [
    (BARE, "", [WANT]),
    (f"\n {BARE}\n", "", [WANT]),
    (f"```json\n{BARE}\n```", "", [WANT]),
    (f"```\n{BARE}\n```\n", "", [WANT]),
    ("{" + BARE + "}", "", [WANT]),
    ("{" + BARE + "}}", "", [WANT]),
    (f"```json\n{BARE}\n```\nDone.", "Done.", [WANT]),
    (f"{BARE}\n{CALL}", "", [WANT, WANT]),
    (BARE[:-1], BARE[:-1], []),  # cut off
    (f"```json\n{BARE[:-1]}", f"```json\n{BARE[:-1]}", []),
    (BARE.replace('"f"', '"g"'), BARE.replace('"f"', '"g"'), []),
    ('{"name": "f"}', "", [("f", {})]),
    ('{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": [1]}', []),
    ('{"name": "fa"}', '{"name": "fa"}', []),
    ('{"temperature": 5}', '{"temperature": 5}', []),
    ("```json\n", "```json\n", []),
    ("", "", []),
    ("Here: " + BARE, "Here: " + BARE, []),
    (CALL + BARE, BARE, [WANT]),
]


@pytest.mark.parametrize(("text", "content", "calls"), UNTAGGED)
@pytest.mark.parametrize("is_whole", [False, True])
def test_an_answer_may_begin_with_a_call_without_tags(
    text: str, content: str, calls: list[Any], is_whole: bool
) -> None:
    rules = CallRules(frozenset(("f", "other")), is_held=is_whole)
    for pieces in ([text], [*text, ""]):
        reader, found = HERMES.reader(rules=rules), ParsedMessage()
        for position, piece in enumerate(pieces):
            found.add(reader.push(piece, is_last=position == len(pieces) - 1))
        assert (found.content, [(call.name, _json(call.arguments)) for call in found.calls]) == (content, calls)


def test_text_that_cannot_become_such_a_call_is_told_at_once() -> None:
    reader = HERMES.reader(rules=CallRules(frozenset("f")))
    assert [ParsedMessage().add(reader.push(text)).content for text in ('{"na', 'mely": ', "5, ")] == [
        "",
        '{"namely": ',
        "5, ",
    ]
