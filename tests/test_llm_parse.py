"""Tests of `LLM.parse`, which returns objects instead of texts, complete or while they are generated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from bridle import LLM, InvalidRequest, SamplingParams
from bridle.errors import IncompleteOutput
from bridle.llm.structured_parse import ParsedType
from tests.conftest import examples
from tests.fakes.tiny_checkpoints import make_checkpoint


class Color(BaseModel):
    red: int = Field(ge=0, le=9)
    name: Literal["dark", "light"]


class Thing(BaseModel):
    size: int = Field(ge=1, le=99)
    is_new: bool
    colors: list[Color] = Field(max_length=2)
    note: Literal["none", "some"] | None = None


HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = str(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))
    with LLM(folder, max_num_seqs=4, num_blocks=256) as loaded:
        yield loaded


def test_one_prompt_gives_an_object_and_many_a_list(llm: LLM) -> None:
    one = llm.parse("A thing:", Thing, seed=1)
    assert isinstance(one, Thing) and 1 <= one.size <= 99
    many = llm.parse(["A", "B", "C"], Thing, SamplingParams(max_tokens=200), seed=2)
    assert [type(each) for each in many] == [Thing] * 3
    assert llm.parse("A thing:", Thing, seed=1) == one
    assert isinstance(llm.parse([5, 6, 7], bool), bool)
    assert llm.parse([[5, 6], [7]], Literal["up"]) == ["up", "up"]  # type: ignore[arg-type]


def test_conversations_and_other_types(llm: LLM) -> None:
    assert isinstance(llm.parse(HI, Thing), Thing)
    assert [type(each) for each in llm.parse([HI, HI], Color)] == [Color, Color]
    assert set(llm.parse("x", list[Literal["a"]], max_tokens=500, seed=3)) <= {"a"}


def test_in_an_event_loop(llm: LLM) -> None:
    async def run() -> tuple[Any, list[Any]]:
        first, second = await asyncio.gather(llm.parse_async("A", Thing), llm.parse_async([HI], Color))
        stream = llm.parse_stream("A", Thing, seed=5)
        return (first, second), [each async for each in stream]

    (first, second), growing = asyncio.run(run())
    assert isinstance(first, Thing) and [type(each) for each in second] == [Color]
    assert Thing.model_validate(growing[-1]) == growing[-1] == llm.parse("A", Thing, seed=5)


@pytest.mark.parametrize("prompt", ["A thing:", HI])
def test_a_stream_gives_parts_and_in_the_end_the_whole(llm: LLM, prompt: Any) -> None:
    growing = list(llm.parse_stream(prompt, Thing, seed=4))
    assert growing[-1] == llm.parse(prompt, Thing, seed=4) == Thing.model_validate(growing[-1].model_dump())
    assert all(isinstance(each, Thing) for each in growing)
    sizes = [each.size for each in growing if each.size is not None]
    assert sizes[-1] == growing[-1].size


def test_what_is_cut_off_is_an_error_with_its_text(llm: LLM) -> None:
    with pytest.raises(IncompleteOutput, match=r"the output ended after 3 tokens \(max_tokens or the context\)") as cut:
        llm.parse("A thing:", Thing, max_tokens=3)
    assert cut.value.text.startswith("{")
    with pytest.raises(IncompleteOutput):
        list(llm.parse_stream("A thing:", Thing, max_tokens=3))


def test_what_has_no_schema_or_two_constraints_is_refused(llm: LLM) -> None:
    class Odd:
        pass

    with pytest.raises(InvalidRequest, match="Odd has no JSON schema"):
        llm.parse("x", Odd)
    with pytest.raises(InvalidRequest, match="leave regex out, because the type is the constraint"):
        llm.parse("x", Thing, regex="a")


THINGS = st.builds(
    Thing,
    size=st.integers(1, 99),
    is_new=st.booleans(),
    colors=st.lists(st.builds(Color, red=st.integers(0, 9), name=st.sampled_from(["dark", "light"])), max_size=2),
    note=st.sampled_from(["none", "some", None]),
)


@given(THINGS, st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_part_agrees_with_the_whole(thing: Thing, data: st.DataObject) -> None:
    """The beginning of an object's text gives an object whose finished fields equal those of the whole object."""
    text = thing.model_dump_json()
    cut = data.draw(st.integers(0, len(text)))
    part = ParsedType(Thing).partial(text[:cut])
    if part is not None:
        assert part.is_new in (None, thing.is_new)
        assert part.colors is None or all(
            each.red in (None, whole.red) for each, whole in zip(part.colors, thing.colors, strict=False)
        )
    assert ParsedType(Thing).partial(text) == thing
