"""Tests of vLLM's Python names, old and new: `LLM` and `SamplingParams` accept each name, or the error names the
replacement."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable

import pytest

from bridle import LLM, SamplingParams
from bridle.compat.request_fields import FIELDS
from bridle.compat.vllm_calls import of_keyword, of_method, of_setting
from bridle.config import EngineConfig, ModelConfig
from bridle.errors import UnknownKeyword
from bridle.llm import pooling
from bridle.llm.arguments import split_settings
from bridle.llm.kwargs import settle
from bridle.llm.options import ChatOptions
from bridle.sampling import DEFAULT_SAMPLING
from dev.coming_from import listed, names
from tests.fakes.sampling_fields import OTHER

VLLM = listed("vLLM")
ROWS = {row.name: row for row in FIELDS if "vLLM" in row.systems}
OF_SAMPLING = names(VLLM, "sampling")
WORDS = names(VLLM, "words")
#: Settings by the names of flags, and those that are none.
SETTINGS = [flag[2:].replace("-", "_") for flag in names(VLLM, "flags") if flag.startswith("--")] + [
    word[4:-2] for word in WORDS if word.startswith("LLM(")
]
OWN = inspect.signature(LLM).parameters
FOUND = set(ModelConfig.__slots__) | set(EngineConfig.__slots__)


def refusal(call: Callable[..., object], *given: object, **named: object) -> str:
    """Return the error for an unknown keyword; empty if the keyword is known."""
    try:
        call(*given, **named)
    except UnknownKeyword as error:
        return str(error)
    return ""


def test_a_field_of_sampling_is_taken_or_refused_with_the_reason() -> None:
    for name in OF_SAMPLING:
        row, value = ROWS[name], OTHER.get(name, ROWS[name].example)
        told = refusal(SamplingParams, **{name: value})
        if name in OTHER:
            assert not told and SamplingParams(**{name: value}) != SamplingParams()
        else:
            meant = (f"here it is {row.here!r}", f"(..., {row.here}=...)") if row.here else (row.why,)
            assert any(each in told for each in meant), name


def test_a_setting_is_taken_or_refused_with_the_reason() -> None:
    for name in SETTINGS:
        if name in OWN or name in FOUND:
            continue
        begin, _, told = refusal(split_settings, {name: 1}).partition(repr(name))
        assert begin == "there is no setting " and "did you mean" not in told
        if told.startswith("; here it is "):
            assert told.removeprefix("; here it is ").strip("'") in FOUND
        else:
            assert told.startswith(": ") and len(told) > 10


def test_reasons_name_settings_rather_than_flags() -> None:
    for name, told in (
        ("max_loras", "; here it is 'max_step_adapters'"),
        ("gpu_memory_utilization", ": set `kv_memory` in bytes; by default, the server measures the free memory"),
        ("mamba_config", f": {of_setting('mamba_config')}"),
        ("ubatch_size", ": the server chooses kernels automatically; kernels do not change the output"),
        ("tensor_parallel_size", ": `bridle serve` has --shards"),
        ("kv_cache_dtyp", "; did you mean 'kv_cache_dtype'?"),
    ):
        assert refusal(split_settings, {name: 1}) == f"there is no setting {name!r}{told}"


def test_a_keyword_of_calls_is_taken_or_refused_with_the_reason() -> None:
    calls = (LLM.generate, LLM.chat, LLM.beam_search, LLM.embed, LLM.score, LLM.classify, LLM.chat_prompt)
    taken = {name for call in calls for name in inspect.signature(call).parameters}
    taken |= {*ChatOptions.__annotations__, *pooling.READING}
    refused = 0
    for name in (word[:-1] for word in WORDS if word.endswith("=")):
        if name in taken:
            continue
        told = refusal(settle, "generate", None, DEFAULT_SAMPLING, {name: 1})
        assert told == (f"generate() has no keyword {name!r}: {of_keyword(name)}" if of_keyword(name) else "")
        refused += bool(told)
    assert refused >= 8


def test_a_method_is_there_or_told_of() -> None:
    nobody = LLM.__new__(LLM)
    told = 0
    for name in (word[4:] for word in WORDS if word.startswith("LLM.")):
        if not hasattr(LLM, name):
            with pytest.raises(AttributeError) as raised:
                getattr(nobody, name)
            assert str(raised.value) == f"LLM has no {name!r}: {of_method(name)}" and of_method(name)
            told += 1
    assert told >= 20
    with pytest.raises(AttributeError, match=r"^LLM has no 'frobnicate'$"):
        operator.attrgetter("frobnicate")(nobody)
