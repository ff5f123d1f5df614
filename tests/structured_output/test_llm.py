"""Tests of constraints on real models and tokenizers: texts match, forced tokens are canonical, and mistakes are
reported."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from bridle import LLM, Controller, Decision, SamplingParams
from bridle.controllers import SequenceView
from bridle.errors import InvalidRequest
from bridle.outputs import FinishReason
from bridle.structured_output import Choice, GrammarVocabulary, JsonObject, JsonSchema, Regex, Substring, vocabulary_of
from bridle.tokenizer import Tokenizer
from tests.pages import blocks_of, run_programs
from tests.sources import ROOT
from tests.structured_output.kit import matcher, tokens_of
from tests.tokenizer import kit

GREEDY = SamplingParams(temperature=0.0, max_tokens=80)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=512, num_blocks=256) as loaded:
        yield loaded


@pytest.fixture(scope="module", params=["demo", *kit.WITH_TABLE])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.load("demo") if request.param == "demo" else kit.make(request.param)


@pytest.fixture(scope="module")
def vocab(tokenizer: Tokenizer) -> GrammarVocabulary:
    return vocabulary_of(tokenizer, tokenizer.vocab_size + 7)


# -- banned phrases --------------------------------------------------------------------------------------------


def test_a_phrase_is_banned_under_a_constraint(llm: LLM) -> None:
    banned = GREEDY.with_(banned_phrases=("no", "ye"), n=2, temperature=1.0, seed=1)
    for each in llm.generate("Well?", banned, constraint=Choice(["no", "yes", "perhaps"]))[0].outputs:
        assert each.text == "perhaps"


def test_a_stream_never_shows_what_is_banned(llm: LLM) -> None:
    """No piece has a part of a banned phrase. The pieces add up to the text, and none is rolled back."""
    said = llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
    phrase = said[10:18]
    pieces = list(llm.stream("Once upon a time", GREEDY.with_(banned_phrases=(phrase,))))
    whole = llm.generate("Once upon a time", GREEDY.with_(banned_phrases=(phrase,)))[0].outputs[0]
    assert "".join(pieces) == whole.text and phrase not in whole.text and whole.text[:9] == said[:9]
    assert whole.usage.rewound_tokens > 0 and len(pieces) > 3


def test_a_controller_and_banned_phrases_exclude_each_other(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="banned_phrases"):
        llm.generate("x", GREEDY.with_(banned_phrases=("a",)), controller=Controller())


# -- tokenizers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["the quick brown fox", "dog, and numbers 1234567890 (in brackets)!", "sleeps  twice"])
def test_forced_tokens_are_what_the_tokenizer_would_write(
    tokenizer: Tokenizer, vocab: GrammarVocabulary, text: str
) -> None:
    walk = matcher(vocab, Choice([text]))
    tokens: list[int] = []
    while not walk.is_complete:
        forced = walk.forced()
        assert forced
        walk.commit(forced)
        tokens += forced
    assert vocab.text_of(tokens).decode() == text
    inside = tokenizer.encode("\n" + text, add_special_tokens=False)
    lead = tokenizer.encode("\n", add_special_tokens=False)
    assert tokens == inside[len(lead) :]


def test_no_special_token_is_ever_text(tokenizer: Tokenizer, vocab: GrammarVocabulary) -> None:
    allowed = tokens_of(matcher(vocab, Regex("(?s:.)*")).mask())
    assert allowed & tokenizer.special_token_ids <= set(vocab.eos)
    assert max(allowed) < tokenizer.vocab_size
    assert set(vocab.eos) <= allowed


def test_random_texts_are_the_models_own_text(tokenizer: Tokenizer, vocab: GrammarVocabulary) -> None:
    walk, rng, tokens = matcher(vocab, Regex("[a-z ,]{20,60}[.]")), random.Random(1), []
    while not walk.is_complete:
        tokens.append(rng.choice(sorted(tokens_of(walk.mask()))))
        walk.commit(tokens[-1:])
    lead = tokenizer.encode("\n", add_special_tokens=False)
    shown = tokenizer.decode([*lead, *tokens]).removeprefix(tokenizer.decode(lead))
    assert re.fullmatch("[a-z ,]{20,60}[.]", shown)


# -- generating ------------------------------------------------------------------------------------------------


def test_outputs_fit_their_constraints(llm: LLM) -> None:
    constraints = [Regex("[0-9]{2}"), Choice(["red", "blue"]), JsonSchema(PERSON), Substring("a cat and a dog"), None]
    outputs = llm.generate(["Say: "] * 5, GREEDY, constraint=constraints, use_tqdm=False)
    assert re.fullmatch("[0-9]{2}", outputs[0].text)
    assert outputs[1].text in ("red", "blue")
    assert set(json.loads(outputs[2].text)) == {"name", "age"}
    assert f" {outputs[3].text} " in " a cat and a dog "
    assert outputs[2].outputs[0].usage.forced_tokens > 0
    assert outputs[0].outputs[0].finish_reason is FinishReason.CONTROLLER
    assert outputs[4].text == llm.generate("Say: ", GREEDY, use_tqdm=False)[0].text


def test_plain_data_will_do_in_streams_and_chats(llm: LLM) -> None:
    pieces = list(llm.stream("Say: ", GREEDY, constraint={"regex": "(yes|no), [a-z]{5}"}))
    assert re.fullmatch("(yes|no), [a-z]{5}", "".join(pieces))
    assert len(pieces) > 1  # shown as it comes: nothing is ever taken back
    messages = [{"role": "user", "content": "Who?"}]
    answer = llm.chat(messages, GREEDY, constraint=JsonObject(), use_tqdm=False)[0].outputs[0]
    assert answer.finish_reason is FinishReason.LENGTH or isinstance(json.loads(answer.text), dict)


class Anything(Controller):
    def next(self, view: SequenceView) -> Decision:
        return Decision.sample()


class Hushed(Anything):
    """A controller that forbids capital letters."""

    max_rewind = 0

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample(bias=[(token, -float("inf")) for token in self.tokens])


def test_controllers_beside_a_constraint(llm: LLM) -> None:
    size = llm.model.tokenizer.vocab_size
    capitals = [token for token in range(size) if any(c.isupper() for c in llm.model.tokenizer.token_text(token))]
    crew = [Anything(), Hushed(capitals)]
    prompts = ["Say: ", "And: "]
    for output in llm.generate(prompts, GREEDY, controllers=crew, constraint=Regex("[A-Za-z]{6}"), use_tqdm=False):
        assert re.fullmatch("[a-z]{6}", output.outputs[0].text)
    each = llm.generate(prompts, GREEDY, controllers=[crew, None], constraint=Choice(["Yes", "no"]), use_tqdm=False)
    assert each[0].outputs[0].text == "no"
    alone = llm.generate("And: ", GREEDY, constraint=Choice(["Yes", "no"]), use_tqdm=False)[0]
    assert each[1].outputs[0].text == alone.outputs[0].text
    pieces = list(llm.stream("Say: ", GREEDY, controller=Hushed(capitals), constraint={"regex": "[A-Za-z]{6}"}))
    assert re.fullmatch("[a-z]{6}", "".join(pieces))
    messages = [{"role": "user", "content": "Who?"}]
    answer = llm.chat(messages, GREEDY, controllers=crew, constraint=Choice(["Yes", "no"]), use_tqdm=False)[0]
    assert answer.outputs[0].text == "no"


def test_controllers_that_cannot_be_reconciled(llm: LLM) -> None:
    output = llm.generate("Say: ", GREEDY, controllers=[Regex("a+"), Anything(), Regex("b+")], use_tqdm=False)[0]
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert re.match(
        r"controllers 1 \(regex\) and 3 \(regex\) cannot be reconciled at position \d+: no token is allowed by both",
        str(output.outputs[0].error),
    )


def test_mistakes_are_told(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="the request has 9 controllers; at most 8"):
        llm.generate("a", controllers=[Anything()] * 8, constraint=Regex("a"), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="controllers has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], controllers=[[Anything()]], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="controllers is 5; must be a list of controllers"):
        llm.generate("a", controllers=5, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="the constraint has none of regex"):
        llm.generate("a", constraint={"regexp": "a"}, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="constraint has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], constraint=[Regex("a")], use_tqdm=False)
    before = llm.statistics().num_requests
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unclosed group"):
            llm.generate(["a", "b"], constraint=[Regex("a"), Regex("(a")], use_tqdm=False)
        with pytest.raises(InvalidRequest, match="unclosed group"):
            llm.stream("a", constraint=Regex("(a"))  # at once, not when it is read
    assert llm.statistics().num_requests == before


async def test_mistakes_are_told_at_once_in_event_loops(llm: LLM) -> None:
    before = llm.statistics().num_requests
    for number in range(2):
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await llm.generate_async(["a", "b"], constraint=[Regex("a"), Regex(f"({number}")])
    assert llm.statistics().num_requests == before
    stream = llm.stream("a", constraint=Regex("(late"))  # must not hold up the loop
    with pytest.raises(InvalidRequest, match="unclosed group"):
        await anext(aiter(stream))


async def test_leaving_while_a_grammar_compiles_harms_nobody(llm: LLM) -> None:
    slow = JsonSchema({"enum": [f"value {i}" for i in range(3_000)]})
    leaving = asyncio.ensure_future(llm.generate_async("a", GREEDY, constraint=slow))
    await asyncio.sleep(0)  # it has asked for the grammar, and waits
    staying = asyncio.ensure_future(llm.generate_async("a", GREEDY, constraint=slow))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert json.loads((await staying)[0].text).startswith("value ")


def test_the_page_runs() -> None:
    page = ROOT / "docs" / "constraints.md"
    names: dict[str, Any] = {}
    printed = run_programs(blocks_of(page.read_text(encoding="utf-8")), str(page), names)
    number, color, person, decided, *others = printed.splitlines()
    assert re.fullmatch("[0-9]{1,3}", number)
    assert color in (" red", " blue")
    assert {"name", "age"} <= set(json.loads(person))
    assert decided == f"{color} 1.0"
    assert sorted(others) == ["1 2 ' apples' True", "apples"]
    names["llm"].close()
