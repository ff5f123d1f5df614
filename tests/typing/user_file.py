"""A user's program for type checkers, which is never run. `test_user_file.py` checks that each line with `# wrong` is
an error, and that no other line is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_type

from bridle import LLM, Regex, SamplingParams
from bridle.llm import ChatSession, TextScore, TextStream
from bridle.outputs import RequestOutput

HI: list[Mapping[str, Any]] = [{"role": "user", "content": "Hi"}]


def generates(llm: LLM) -> None:
    assert_type(llm.generate("Hello", temperature=0.0, max_tokens=8, stop="\n"), list[RequestOutput])
    llm.generate(prompts=["a", "b"], sampling=[SamplingParams(seed=1), SamplingParams()], use_tqdm=False)
    llm.generate("a", SamplingParams(top_k=5), regex="[a-z]+", adapter=["poems"], priority=1, trace="trace.jsonl")
    llm.generate("a", constraint=[Regex("a"), None], logit_bias={3: -1.0, " no": 2.0}, watermark=True, seed=None)
    llm.generate("a", temprature=0.5)  # wrong
    llm.generate("a", temperature="hot")  # wrong
    llm.generate("a", max_tokens=1.5)  # wrong
    llm.generate("a", logprobs_mode="cooked")  # wrong
    llm.generate()  # wrong


def streams(llm: LLM) -> None:
    assert_type(llm.stream("Hello", json_schema={"type": "object"}, top_p=0.9), TextStream)
    llm.stream(prompt=[1, 2], sampling=SamplingParams(), speculate="auto", banned_phrases=["as an AI"])
    llm.stream("a", [SamplingParams()])  # wrong
    llm.stream("a", use_tqdm=False)  # wrong


def chats(llm: LLM) -> None:
    assert_type(llm.chat(HI, temperature=0.7, thinking_budget=100, tools=[], tool_choice="none"), list[RequestOutput])
    llm.chat(messages=[HI, HI], sampling_params=SamplingParams(), chat_template_kwargs={"enable_thinking": False})
    llm.chat(HI, tools="search")  # wrong
    llm.chat("Hi", max_tokens=3)  # wrong
    assert_type(llm.session("Be brief.", max_tokens=50, parallel_tool_calls=False), ChatSession)
    llm.session(max_token=50)  # wrong


def scores(llm: LLM) -> None:
    assert_type(llm.score(["a", "b"], top=2, adapter="poems"), list[TextScore])
    assert_type(llm.score("query", ["one", "two"], truncate_prompt_tokens=-1), list[float])
    llm.score("a", temperature=0.5)  # wrong
    llm.score("a", top="2")  # wrong


async def waits(llm: LLM) -> None:
    assert_type(await llm.generate_async("Hello", min_p=0.1), list[RequestOutput])
    assert_type(await llm.chat_async(HI, max_tokens=None, stop=["\n"]), list[RequestOutput])
    await llm.generate_async("a", min_q=0.1)  # wrong
    await llm.chat_async(HI, tool_choices="auto")  # wrong
