"""Tests of keyword arguments of `LLM`'s methods: each has its meaning, and none is ignored."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bridle import LLM, InvalidRequest, Regex, SamplingParams
from bridle.errors import UnknownKeyword
from bridle.llm.kwargs import settle
from bridle.llm.options import RunOptions
from bridle.sampling import DEFAULT_SAMPLING
from tests.fakes.sampling_fields import OTHER
from tests.fakes.tiny_checkpoints import make_checkpoint

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = str(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))
    with LLM(folder, max_num_seqs=4, kv_memory=8 << 20) as loaded:
        yield loaded


def test_every_field_of_sampling_is_a_keyword() -> None:
    for field in dataclasses.fields(SamplingParams):
        value = OTHER[field.name]
        found, how = settle("generate", None, DEFAULT_SAMPLING, {field.name: value})
        assert (found, how) == (DEFAULT_SAMPLING.with_(**{field.name: value}), {})
        assert settle("generate", SamplingParams(), DEFAULT_SAMPLING, {field.name: value})[0] == found


def test_keywords_count_beside_sampling_for_all_prompts(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(seed=1), SamplingParams(seed=2)], max_tokens=3, ignore_eos=True)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    assert len(llm.generate("a", n_predict=2, ignore_eos=True)[0].outputs[0].token_ids) == 2
    assert llm.request("a", temperature=0.0, repeat_penalty=1.5).sampling.repetition_penalty == 1.5


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[x-z]{3}"}, "[x-z]{3}"),
    ({"choice": ["yes", "no"]}, "yes|no"),
    ({"json_schema": {"type": "boolean"}}, "true|false"),
    ({"grammar": 'start: "a" | "b"'}, "a|b"),
    ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}}, "7"),
    ({"guided_regex": "[0-9]"}, "[0-9]"),
    ({"structured_outputs": {"choice": ["up"]}}, "up"),
]


@pytest.mark.parametrize(("given", "pattern"), NAMED)
def test_a_constraint_by_its_name_holds_in_every_call(llm: LLM, given: dict[str, Any], pattern: str) -> None:
    texts = [
        llm.generate("Say", **given)[0].text,
        asyncio.run(llm.generate_async("Say", **given))[0].text,
        llm.stream("Say", **given).read(),
        llm.chat(HI, **given)[0].text,
        asyncio.run(llm.chat_async(HI, **given))[0].text,
        llm.session(**given).send("Hi"),
        asyncio.run(llm.session(**given).send_async("Hi")),
    ]
    assert all(re.fullmatch(pattern, text) for text in texts), texts


CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda llm, **given: llm.generate("a", **given),
    "generate_async": lambda llm, **given: asyncio.run(llm.generate_async("a", **given)),
    "stream": lambda llm, **given: llm.stream("a", **given),
    "chat": lambda llm, **given: llm.chat(HI, **given),
    "chat_async": lambda llm, **given: asyncio.run(llm.chat_async(HI, **given)),
    "session": lambda llm, **given: llm.session(**given),
    "parse": lambda llm, **given: llm.parse("a", bool, **given),
    "request": lambda llm, **given: llm.request("a", **given),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("temprature", "; did you mean 'temperature'?"),
        ("json_scheme", "; did you mean 'json_schema'?"),
        ("constrain", "; did you mean 'constraint'?"),
        ("timeot", "; did you mean 'timeout'?"),
        ("use_beam_search", ": LLM.beam_search searches beams"),
        ("user", ": API keys identify users"),
        ("frobnicate", ""),
    ],
)
def test_an_unknown_keyword_is_a_type_error_that_names_the_right_one(llm: LLM, call: str, name: str, told: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{call}() has no keyword {name!r}{told}")) as raised:
        CALLS[call](llm, **{name: 1})
    assert isinstance(raised.value, UnknownKeyword) and raised.value.param == name


@pytest.mark.parametrize("call", ["score", "embed"])
def test_calls_that_draw_nothing_say_so(llm: LLM, call: str) -> None:
    run: Any = getattr(llm, call)
    for name in ("temperature", "regex", "n_predict", "controller"):
        with pytest.raises(TypeError, match=f"{call}.. samples no tokens, so '{name}' has no effect"):
            run("a", **{name: 1})
    with pytest.raises(TypeError, match=f"{call}.. has no keyword 'timeot'; did you mean 'timeout'"):
        run("a", timeot=1)
    assert len(run("the quick", timeout=600.0, priority=1)) == 1


def test_settings_and_prompts_of_chats_are_checked_as_well(llm: LLM) -> None:
    with pytest.raises(TypeError, match="there is no setting 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM("nowhere", max_num_seq=3)
    with pytest.raises(TypeError, match=r"chat_prompt.. has no keyword 'tool'; did you mean 'tools'"):
        llm.chat_prompt(HI, tool=[])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"regex": "a", "choice": ["a"]}, "regex and choice were given"),
        ({"regex": "a", "constraint": Regex("a")}, "constraint and regex were both given"),
        ({"max_tokens": 3, "n_predict": 3}, "max_tokens was given twice, also as n_predict"),
        ({"temperature": None}, "temperature is None; must be a number"),
        ({"temperature": -1}, "temperature is -1; must be"),
        ({"regex": ["a"]}, "regex is"),
    ],
)
def test_what_does_not_go_together_is_refused(llm: LLM, given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        llm.generate("a", **given)


def test_what_calls_take_is_no_second_list() -> None:
    """No field of `RunOptions` has the name of a sampling parameter."""
    assert not set(RunOptions.__annotations__) & {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tempertaure", "; did you mean 'temperature'?"),
        ("max_new_tokens", "; here it is 'max_tokens'"),
        (
            "structured_outputs",
            ": structured_outputs is a keyword of calls, as in LLM.generate(..., structured_outputs",
        ),
        ("guided_decoding", ": guided_decoding is a keyword of calls, as in LLM.generate(..., structured_outputs=...)"),
        ("logits_processors", ": `controller` names a sandboxed program"),
        ("frobnicate", ""),
    ],
)
def test_an_unknown_parameter_of_sampling_names_the_right_one(name: str, told: str) -> None:
    with pytest.raises(UnknownKeyword, match=re.escape(f"SamplingParams has no field {name!r}{told}")) as raised:
        SamplingParams(**{name: 1})
    assert isinstance(raised.value, TypeError) and raised.value.param == name
    with pytest.raises(UnknownKeyword):
        SamplingParams().with_(**{name: 1})
    assert copy.copy(SamplingParams(n=2)) == copy.deepcopy(SamplingParams(n=2)) == SamplingParams(n=2)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"tensor_parallel_size": 2}, "there is no setting 'tensor_parallel_size': "),
        ({"gpu_memory_utilization": 0.5}, "there is no setting 'gpu_memory_utilization': "),
        ({"dtype": "half"}, "dtype is 'half'; must be one of auto, float32, bfloat16, float16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; must be one of auto, float32, bfloat16, int8"),
    ],
)
def test_settings_of_other_servers_are_refused_with_the_reason(setting: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        LLM("nowhere", **setting)


def test_a_final_message_goes_on(llm: LLM) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    plain = llm.chat_prompt(said[:1])
    begun = llm.tokenizer.encode("Well, ", add_special_tokens=False)
    for more in ({}, {"add_generation_prompt": False}):
        assert llm.chat_prompt(said, continue_final_message=True, **more) == [*plain, *begun]
    (output,) = llm.chat(said, max_tokens=1, continue_final_message=True)
    assert output.prompt_token_ids == [*plain, *begun]
    with pytest.raises(InvalidRequest, match="the last message must be an assistant text"):
        llm.chat(HI, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="add_generation_prompt is false"):
        llm.chat(HI, add_generation_prompt=False)
