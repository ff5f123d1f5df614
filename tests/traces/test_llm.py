"""Tests of `LLM` with `trace`: the trace of an output, the content of its file, and a replay of the file."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle import LLM, Controller, Decision, SamplingParams
from bridle.aici.client.reference import WasmController
from bridle.controllers import SequenceView
from bridle.errors import InvalidRequest, UnknownKeyword
from bridle.sampling_values import Watermark
from bridle.serving.tracing.trace_header import controller_form, controller_of, sampling_form, sampling_of
from bridle.structured_output import Regex
from bridle.traces import TraceHeader, decode_record, encode_record, read
from bridle.traces.replay_text import rebuild
from tests.engine.support import make_request
from tests.http.harness import scripted_model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(scripted_model(), sampling=SamplingParams(max_tokens=6, seed=3)) as loaded:
        yield loaded


class Restless(Controller):
    """A controller that forces, samples and rolls back tokens."""

    def next(self, view: SequenceView) -> Decision:
        match len(view.generated):
            case 0:
                return Decision.splice(0, (65, 66, 67))
            case 4:
                return Decision.splice(2, (68,))
            case _:
                return Decision.sample()


def test_a_trace_adds_up_to_its_output(llm: LLM) -> None:
    outputs = llm.generate(["one", "two"], n=2, trace=True, use_tqdm=False)
    for output in outputs:
        assert output.trace is not None
        rebuilt = rebuild(output.trace)
        assert [each.token_ids for each in rebuilt] == [each.token_ids for each in output.outputs]
        assert [each.text for each in rebuilt] == [each.text for each in output.outputs]
        header = output.trace.header
        assert (header.text, header.prompt, header.model) == (output.prompt, output.prompt_token_ids, llm.name)
        assert header.engine["vocab_size"] == llm.info.vocab_size


def test_a_controller_of_this_process_is_named(llm: LLM) -> None:
    (output,) = llm.generate("one", controller=Restless(), trace=True, use_tqdm=False)
    assert output.trace is not None
    assert output.trace.header.controller == {"name": "restless"}
    assert rebuild(output.trace)[0].token_ids == output.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="restless was Python code of the process that recorded"):
        controller_of(output.trace.header.controller)


def test_nobody_is_traced_who_does_not_ask(llm: LLM) -> None:
    plain, traced = (llm.generate("one", trace=trace, use_tqdm=False)[0] for trace in (False, True))
    assert plain.trace is None
    assert traced.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_file_has_the_traces_of_a_call(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    outputs = llm.generate(["one", "two"], trace=path, use_tqdm=False)
    assert list(read(path)) == [output.trace for output in outputs]
    (other,) = asyncio.run(llm.generate_async("three", trace=str(path)))
    assert list(read(path)) == [other.trace]
    stream = llm.stream("four", trace=path)
    text = "".join(stream)
    (streamed,) = read(path)
    assert streamed == stream.output.trace
    assert rebuild(streamed)[0].text == text


def test_what_is_no_trace_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="trace is 3; must be True, False or the name of a file"):
        llm.generate("one", trace=3)
    with pytest.raises(UnknownKeyword):
        llm.score("one", trace=True)


# -- headers -------------------------------------------------------------------------------------------------

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(0, 1 << 60),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-9, 9) | st.just(-math.inf), max_size=3),
    watermark=st.none() | st.just(Watermark(0.25, 1.5)),
    bad_words_ids=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 5),
)


@given(SAMPLINGS)
def test_sampling_comes_back(sampling: SamplingParams) -> None:
    header = decode_record(encode_record(TraceHeader("a", sampling=sampling_form(sampling))))
    assert sampling_of(header.sampling) == sampling


def test_many_biases_come_back() -> None:
    sampling = SamplingParams(logit_bias={token: token / 7 for token in range(1000)})
    header = decode_record(encode_record(TraceHeader("a", sampling=sampling_form(sampling))))
    assert dict(sampling_of(header.sampling).logit_bias) == dict(sampling.logit_bias)


@pytest.mark.parametrize("form", [{"temprature": 1}, {"temperature": "hot"}, {"logit_bias": 3}, {"temperature": -1}])
def test_sampling_that_is_none_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        sampling_of(form)


@pytest.mark.parametrize("controller", [Regex("a+"), WasmController("ab" * 32, "print(1)")])
def test_controllers_come_back(controller: object) -> None:
    form = controller_form(make_request(controller=controller))
    header = decode_record(encode_record(TraceHeader("a", controller=form)))
    assert controller_of(header.controller) == controller
    assert "auth" not in str(header.controller)


def test_a_controller_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot read the controller recorded"):
        controller_of({"name": "x", "y": {}})
