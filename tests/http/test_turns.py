"""Reasoning and calls of an assistant's turn are separated for any pieces of the text. Budgets and grammars limit them,
even if a special token begins the calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from bridle import LLM, SamplingParams
from bridle.chat.reasoning import ReasoningReader, ThinkTags
from bridle.controllers.reasoning_gate import CompiledGrammar, ReasoningThenGrammar, compile_grammar
from bridle.outputs import FinishReason
from bridle.serving import LoadedModel
from bridle.structured_output import Regex
from bridle.tokenizer import Tokenizer
from tests.http.harness import saying, scripted_model, served, tokenizer, tokenizer_folder
from tests.leftovers import kept_folder

TAGS = ThinkTags("<think>", "</think>", 1, 2)


# -- thoughts in text --------------------------------------------------------------------------------------------


def read(pieces: list[str], is_open: bool) -> tuple[str, str]:
    reader = ReasoningReader(TAGS, is_open)
    parts = [reader.push(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    return "".join(thoughts for thoughts, _ in parts), "".join(text for _, text in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "thoughts", "answer"),
    [
        ("plain", False, "", "plain"),
        ("\n plain", False, "", "\n plain"),
        ("<think>\nwell\n\nso\n</think>\n\nyes", False, "well\n\nso", "yes"),
        ("well\n</think>yes\n", True, "well", "yes\n"),
        ("</think>\n\nyes", True, "", "yes"),
        ("<think>never ends\n", False, "never ends\n", ""),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<think>a</think>b</think>", False, "a", "b</think>"),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_thoughts_come_first_or_not_at_all(text: str, is_open: bool, thoughts: str, answer: str) -> None:
    assert read([text], is_open) == (thoughts, answer)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</thi", "a", "\n", "\n\n", " "]), max_size=8),
    st.lists(st.integers(0, 60), max_size=10),
    st.booleans(),
)
def test_thoughts_do_not_depend_on_how_the_text_arrives(parts: list[str], cuts: list[int], is_open: bool) -> None:
    text = "".join(parts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read([text[start:end] for start, end in pairwise(bounds)], is_open) == read([text], is_open)


# -- a free part, then a grammar ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(scripted_model(spread=16)) as llm:
        yield llm


def grammar_of(model: LoadedModel, pattern: str) -> CompiledGrammar:
    assert model.constraints is not None
    return asyncio.run(compile_grammar(model.constraints, Regex(pattern)))


@pytest.mark.few(5)
@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 5, 30, None])
def test_what_is_free_ends_and_the_rest_keeps_to_the_grammar(llm: LLM, budget: int | None, is_begun: bool) -> None:
    text = tokenizer()
    opening, end, *gap = text.encode("<#--", add_special_tokens=False)
    closing = (*text.encode("!", add_special_tokens=False), end)
    sampling = SamplingParams(max_tokens=400, n=3, temperature=1, seed=3)
    for number in range(3):
        controller = ReasoningThenGrammar(
            end,
            opening=None if is_begun else opening,
            budget=budget,
            closing=closing,
            gap=tuple(gap),
            then=grammar_of(llm.model, "[ab]{3}"),
            may_stop=False,
        )
        output = llm.generate(f"prompt {number}", sampling, controller=controller)[0]
        for each in output.outputs:
            tokens = list(each.token_ids)
            if not is_begun:
                if tokens[0] != opening:  # no free part at all
                    assert re.fullmatch("[ab]{3}", each.text)
                    continue
                tokens = tokens[1:]
            if budget is None and end not in tokens:
                assert each.finish_reason is FinishReason.LENGTH
                continue
            free, rest = tokens[: tokens.index(end)], tokens[tokens.index(end) + 1 :]
            assert budget is None or len(free) <= budget + 1
            assert not set(free) & set(text.eos_token_ids)
            assert re.fullmatch("--[ab]{3}", text.decode(rest))


def test_a_banned_phrase_goes_from_the_free_part_and_from_the_rest(llm: LLM) -> None:
    """The states of the reasoning and of the grammar are rolled back with the text, whether the phrase was in one or
    the other."""
    text = tokenizer()
    end, *gap = text.encode("#--", add_special_tokens=False)
    phrases = ("ba", "aa", *(chr(letter) for letter in range(ord("c"), ord("n"))))
    sampling = SamplingParams(max_tokens=400, n=3, temperature=1, seed=3, banned_phrases=phrases)
    num_rewound = 0
    for number in range(4):
        controller = ReasoningThenGrammar(
            end, budget=9, closing=(end,), gap=tuple(gap), then=grammar_of(llm.model, "[ab]{6}"), may_stop=False
        )
        for each in llm.generate(f"prompt {number}", sampling, controller=controller)[0].outputs:
            tokens = list(each.token_ids)
            free, rest = tokens[: tokens.index(end)], tokens[tokens.index(end) + 1 :]
            assert len(free) <= 9
            assert re.fullmatch("--[ab]{6}", text.decode(rest))
            assert not [phrase for phrase in phrases if phrase in each.text]
            num_rewound += each.usage.rewound_tokens
    assert num_rewound > 0


def test_a_budget_alone_leaves_the_rest_free_but_for_the_end_token(llm: LLM) -> None:
    text = tokenizer()
    (end,) = text.encode("#", add_special_tokens=False)
    sampling = SamplingParams(max_tokens=60, temperature=2, seed=5, ignore_eos=True)
    for number in range(8):
        output = llm.generate(
            f"prompt {number}", sampling, controller=ReasoningThenGrammar(end, budget=4, closing=(end,))
        )[0]
        tokens = list(output.outputs[0].token_ids)
        assert tokens.index(end) <= 4
        if tokens.index(end) == 4:
            assert tokens.count(end) == 1
        assert len(tokens) == 60


# -- thoughts between special tokens -----------------------------------------------------------------------------


@cache
def magistral() -> Tokenizer:
    """Return the default tokenizer of the tests with special tokens as tags, which are normally not in the text."""
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder())
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "[THINK]", "[/THINK]"]})
    fast.chat_template = str(fast.chat_template) + "{# thoughts: [THINK] [/THINK] #}"
    folder = kept_folder("bridle-http-tests-")
    fast.save_pretrained(folder)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("is_stream", [False, True])
def test_special_tokens_may_be_the_tags(is_stream: bool) -> None:
    model = scripted_model(text=magistral(), next_token=saying("[THINK]Hm.[/THINK]Yes.", magistral()))
    answer = ask(model, stream=is_stream)
    told = [chunk.choices[0].delta for chunk in answer] if is_stream else [answer.choices[0].message]
    assert "".join(getattr(each, "reasoning_content", None) or "" for each in told) == "Hm."
    assert "".join(each.content or "" for each in told) == "Yes."
    cut = ask(
        scripted_model(text=magistral(), next_token=saying("[THINK]Hm. Hm. Hm.[/THINK]Yes.", magistral())),
        extra_body={"thinking_budget": 2},
    )
    assert cut.usage.completion_tokens_details.reasoning_tokens == 5  # with tags and a line break


# -- calls after a special token ---------------------------------------------------------------------------------

CITIES = ["Rome", "Oslo"]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "find", "parameters": PARAMETERS, "strict": True}}
LOOSE: Any = {"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}
SAID = 'Well.[TOOL_CALLS][{"name": "find", "arguments": {"city": "Rome"}}]'


@cache
def mistral() -> Tokenizer:
    """Return the default tokenizer of the tests with a special token, and a template that uses this token."""
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder())
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]"]})
    fast.chat_template = str(fast.chat_template) + "{# calls: [TOOL_CALLS] #}"
    folder = kept_folder("bridle-http-tests-")
    fast.save_pretrained(folder)
    return Tokenizer.load(folder)


def ask(model: LoadedModel, **options: Any) -> Any:
    with served(model) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Where?"}]
        options = {"model": "", "messages": messages, "max_tokens": 200, "temperature": 0} | options
        answer: Any = client.chat.completions.create(**options)
        return list(answer) if options.get("stream") else answer


@pytest.mark.parametrize("tool", [TOOL, LOOSE])
def test_a_special_token_begins_calls(tool: Any) -> None:
    model = scripted_model(text=mistral(), next_token=saying(SAID, mistral()))
    message = ask(model, tools=[tool]).choices[0].message
    assert message.content == "Well."
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("find", '{"city": "Rome"}')
    ]


def test_strict_calls_after_a_special_token_are_right() -> None:
    said = SAID.replace("Rome", "Paris")
    wrong = ask(scripted_model(text=mistral(), next_token=saying(said, mistral())), tools=[LOOSE]).choices[0].message
    assert json.loads(wrong.tool_calls[0].function.arguments) == {"city": "Paris"}
    right = ask(scripted_model(text=mistral(), next_token=saying(said, mistral())), tools=[TOOL]).choices[0].message
    assert json.loads(right.tool_calls[0].function.arguments)["city"] in CITIES


def test_a_call_that_must_come_begins_in_the_prompt() -> None:
    model = scripted_model(text=mistral(), spread=16)
    options = {"tools": [LOOSE], "tool_choice": "required", "parallel_tool_calls": False}
    answer = ask(model, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES
    assert answer.choices[0].message.content is None


def test_a_constraint_beside_such_calls_is_refused() -> None:
    problem = "begins calls with a special token that constraints cannot contain"
    with pytest.raises(openai.BadRequestError, match=problem):
        ask(scripted_model(text=mistral()), tools=[TOOL], response_format={"type": "json_object"})
