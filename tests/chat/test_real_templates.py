"""Tests over the chat templates of real models. Calls come back exactly as the template writes them, however the text
is cut into pieces. A format's grammar accepts the calls that its template writes. It accepts nothing that the format's
parser reads as something else. Conversations in any roles render, or are refused with the template's message.

`BRIDLE_CHAT_TEMPLATES` names the folder. Without it, these tests are skipped. `tests/http/test_call_formats.py` has
tests over templates of our own.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridle.chat.stream_deltas import CallRules, ParsedMessage, ToolReader
from bridle.chat.tool_parsers.call_format import CallFormat, PythonArguments, QuotedArguments
from bridle.chat.tool_parsers.call_grammar import CallGrammar
from bridle.chat.tool_parsers.call_reader import CallFormatReader
from bridle.chat.tool_parsers.grammar import Form, Function
from bridle.chat.tool_parsers.mistral import MARK, MistralReader
from bridle.errors import InvalidRequest
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.vocabulary import GrammarVocabulary
from bridle.tokenizer.chat_template import prepare
from bridle.tokenizer.chat_template_quirks import fitted, rules_of
from tests.chat.real_templates import END, NAMES, PARAMETERS, TOOLS, VARIABLE, RealTemplate, files, real_template
from tests.chat.sampled_calls import CallSampler

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not files(), reason=f"{VARIABLE} names no folder of templates")]

RULES = CallRules(frozenset(NAMES), True, dict.fromkeys(NAMES, PARAMETERS))
FUNCTIONS = [Function(name, PARAMETERS) for name in NAMES]
#: Texts that no format could take for its own markup.
texts = st.text(st.sampled_from('aZ é日"\\.,:;!?-_&()/\n'), max_size=12).map(str.strip)
plain = st.text(st.sampled_from("aZ é日.:;!?-_&()/"), max_size=12).map(str.strip)


def arguments_of(form: CallFormat) -> Any:
    """Arguments in Python's format and quoted values have no escapes, so that some strings cannot be written."""
    own = plain if isinstance(form.arguments, (PythonArguments, QuotedArguments)) else texts
    others = {
        "days": st.integers(-999, 999),
        "kind": st.sampled_from(["day", "week end"]),
        "on": st.booleans(),
        "where": st.fixed_dictionaries({"street": plain.filter(bool)}),
        "tags": st.lists(plain.filter(bool), min_size=1, max_size=3),
    }
    return st.fixed_dictionaries({"city": own}, optional=others)


@pytest.fixture(params=files(), ids=lambda file: file.stem)
def real(request: pytest.FixtureRequest) -> RealTemplate:
    file: Path = request.param
    return real_template(file)


def written(real: RealTemplate, calls: list[Any]) -> tuple[CallFormat, str]:
    """Return the format of the calls, and their text without the turns around it."""
    if real.form is None:
        pytest.skip("writes no calls")
    form, text = real.form, real.calls(calls)
    if text is None:
        pytest.skip("refuses these calls")
    begin = form.section_open or form.opening or form.call[0].replace("{name}", NAMES[0])
    text = text[text.rindex(begin.strip(), 0, text.index(NAMES[0]) + len(NAMES[0])) :]
    end = form.section_close.strip() or form.closing.strip()
    last = max(text.rfind(name) for name in NAMES)  # a prompt may show the format once more behind the calls
    place = text.find(end, last) if re.search(r"[`<]", end) else text.rfind(end)
    cut = place + len(end) if end else 0
    cut = cut or min(_ends(text))
    return form, text[:cut].removeprefix(form.opening if form.is_prompted else "")


def _ends(text: str) -> list[int]:
    """Return the positions where turns end, for all marks with which templates end turns."""
    return [
        found.start() for found in re.finditer(re.escape(END) + r"|<\|[a-z_]*(?:end|eot|eom|call)[a-z_]*\|>", text)
    ] + [len(text)]


@pytest.mark.parametrize("file", files(), ids=lambda file: file.stem)
@given(data=st.data())
def test_calls_come_back_exactly(file: Path, data: st.DataObject) -> None:
    real = real_template(file)
    if real.form is None:
        pytest.skip("writes no calls")
    calls = data.draw(st.lists(arguments_of(real.form), min_size=1, max_size=real.form.max_calls or 3))
    form, text = written(real, calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    readers: list[ToolReader] = [CallFormatReader(form, RULES)]
    if form.trigger == MARK:
        readers.append(MistralReader((END,), rules=RULES))  # the one that Mistral's models get
    for reader in readers:
        found = ParsedMessage()
        for start, end in pairwise([0, *sorted(cuts), len(text)]):
            found.add(reader.push(text[start:end]))
        found.add(reader.push("", is_last=True))
        read = [(call.name, json.loads(call.arguments)) for call in found.calls]
        assert (found.content.strip(), read) == ("", [(NAMES[n % 2], each) for n, each in enumerate(calls)])


FIRST, SECOND = {"city": "Rome"}, {"city": "Bern <b>", "days": 3, "kind": "week end", "on": True, "tags": ["x", "y"]}


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("calls", [[FIRST], [SECOND], [FIRST, SECOND]])
def test_the_grammar_accepts_what_the_template_writes(real: RealTemplate, calls: list[Any], has_tokens: bool) -> None:
    form, text = written(real, calls[: real.form.max_calls if real.form else 1])
    marks = {
        mark for each in form.literals() for mark in re.findall(r"<[|｜][^<>]*[|｜]>|<\|[^<>]*>|\[[A-Z_]+\]", each)
    }
    specials = {mark: 257 + number for number, mark in enumerate(sorted(marks))} if has_tokens else {}
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(mark.encode() for mark in specials)]
    vocabulary = GrammarVocabulary(tokens, [256], [256, *specials.values()], lambda each: list(each.encode()))
    grammar = CallGrammar(form, specials)
    for made in (grammar.must_call(FUNCTIONS, 4), grammar.may_call(FUNCTIONS)):
        matcher = Matcher(vocabulary, grammar_of(Form(made, bool(specials)).constraint()))
        assert _passes(matcher, text, specials), text
    must = Matcher(vocabulary, grammar_of(Form(grammar.must_call(FUNCTIONS, 4), bool(specials)).constraint()))
    assert not _passes(must, text.replace(NAMES[0], "get_wether"), specials)
    assert not _passes(must, "plain text", specials)


def _passes(matcher: Matcher, text: str, specials: dict[str, int]) -> bool:
    twin = matcher.copy()
    pieces = re.split("(" + "|".join(map(re.escape, specials)) + ")", text) if specials else [text]
    for piece in pieces:
        for token in [specials[piece]] if piece in specials else piece.encode():
            if not twin.mask()[token >> 3] >> (token & 7) & 1:
                return False
            twin.commit([token])
    return twin.is_accepting


@cache
def sampler_of(file: Path) -> CallSampler:
    form = real_template(file).form
    assert form is not None
    return CallSampler(form, FUNCTIONS)


@pytest.mark.parametrize("file", files(), ids=lambda file: file.stem)
@given(seed=st.integers(0, 1 << 20))
def test_calls_that_the_grammar_allows_come_back(file: Path, seed: int) -> None:
    """The template must write the same calls again, if its format can spell all strings."""
    real = real_template(file)
    if real.form is None:
        pytest.skip("writes no calls")
    text = sampler_of(file).sample(seed)
    assume(text is not None)
    reader = CallFormatReader(real.form, RULES)
    found = ParsedMessage().add(reader.push(text or "", is_last=True))
    assert (found.content.strip(), bool(found.calls)) == ("", True), text
    for call in found.calls:
        assert call.name in NAMES
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)


def said(*turns: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, _, content in (turn.partition(" ") for turn in turns)]


CONVERSATIONS = [
    said("system zsa", "user zua"),
    said("developer zsa", "user zua"),
    said("system zsa", "system zsb", "user zua"),
    said("system zsa", "developer zsb", "user zua"),
    said("system zsa", "user zua", "assistant zaa", "system zsb", "user zub"),
    said("user zua", "assistant zaa", "user zub", "system zsb"),
    said("user zua", "user zub"),
    said("user zua", "assistant zaa", "assistant zab", "user zub"),
    said("system zsa"),
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda messages: "-".join(m["role"] for m in messages))
def test_every_conversation_reaches_the_prompt_whole(real: RealTemplate, messages: list[dict[str, Any]]) -> None:
    text = real.template.render(fitted(prepare(messages), rules_of(real.template)), None, None, {})
    assert [word for word in re.findall(r"z[sua][ab]", json.dumps(messages)) if word not in text] == []


@pytest.mark.parametrize("behind", [[], said("user zub"), said("assistant zaa", "user zub")])
@pytest.mark.parametrize("result", ["zra", [{"type": "text", "text": "zra"}]])
def test_results_of_tools_reach_the_prompt(real: RealTemplate, behind: list[dict[str, Any]], result: Any) -> None:
    if real.prober is None:
        pytest.skip("writes no calls")
    call = {"id": "callid000", "type": "function", "function": {"name": NAMES[0], "arguments": '{"city": "Rome"}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "callid000", "name": NAMES[0], "content": result}
    messages = [*said("user zua"), turn, answer, *behind]
    text = real.template.render(fitted(prepare(messages), rules_of(real.template)), TOOLS, None, {})
    assert [word for word in re.findall(r"z[sura][ab]", json.dumps(messages)) if word not in text] == []


def test_what_cannot_be_rendered_is_refused_in_the_templates_words(real: RealTemplate) -> None:
    messages = fitted(prepare(said("assistant zaa", "user zua")), rules_of(real.template))
    if rules_of(real.template).alternates:
        with pytest.raises(InvalidRequest, match="must alternate"):
            real.template.render(messages, None, None, {})
    else:
        assert "zua" in real.template.render(messages, None, None, {})
