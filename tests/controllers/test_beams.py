"""Tests that beam search finds transformers' results, has at most as many sequences as beams, and frees them at its
end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from bridle import LLM, SamplingParams
from bridle.controllers.beams import BEAMS, BeamPool, BeamSearch
from bridle.outputs import Stored
from tests.conftest import examples
from tests.engine.support import Lab, make_request
from tests.fakes.tiny_checkpoints import cached_checkpoint

PROMPTS = [[5, 6, 7], [9, 4], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46]]
CASES: list[dict[str, Any]] = [
    {"beam_width": 1, "max_tokens": 5},
    {"beam_width": 3, "max_tokens": 7},
    {"beam_width": 4, "max_tokens": 9, "early_stopping": True},
    {"beam_width": 5, "max_tokens": 8, "length_penalty": 0.0, "early_stopping": "never"},
    {"beam_width": 2, "max_tokens": 12, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 6, "max_tokens": 1},
]
#: Scores that differ by less are not told apart by float32.
_CLEAR = 1e-4


@pytest.fixture(scope="module")
def folder() -> str:
    return str(cached_checkpoint("llama"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, num_blocks=256, unnamed_ids=True) as made:
        yield made


@pytest.fixture(scope="module")
def original(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def theirs(model: Any, prompt: list[int], ends: list[int], case: dict[str, Any]) -> list[tuple[float, list[int]]]:
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=case["beam_width"],
        num_return_sequences=case["beam_width"],
        max_new_tokens=case["max_tokens"],
        length_penalty=case.get("length_penalty", 1.0),
        early_stopping=case.get("early_stopping", False),
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = found.sequences_scores if case["beam_width"] > 1 else torch.zeros(1)
    return [
        (float(score), _cut(sequence[len(prompt) :].tolist(), ends))
        for score, sequence in zip(scores, found.sequences, strict=True)
    ]


def _cut(tokens: list[int], ends: list[int]) -> list[int]:
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_texts_are_those_of_transformers(llm: LLM, original: Any, case: dict[str, Any]) -> None:
    ends = list(llm.info.eos_token_ids)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, **case, use_tqdm=False), strict=True):
        expected = theirs(original, prompt, ends, case)
        if case["beam_width"] == 1:
            assert output.outputs[0].token_ids == expected[0][1]
            continue
        mine = [(beam.score, beam.token_ids) for beam in output.outputs]
        assert [score for score, _ in mine] == pytest.approx([score for score, _ in expected], abs=1e-3)
        for i, ((_, tokens), (score, wanted)) in enumerate(zip(mine, expected, strict=True)):
            near = [other for j, (other, _) in enumerate(expected) if j != i and abs(other - score) < _CLEAR]
            assert tokens == wanted or near, (case, i)


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES[1:5], ids=str)
def test_texts_end_where_those_of_transformers_do(llm: LLM, original: Any, case: dict[str, Any]) -> None:
    """Every fifth token ends a text, so the beams end at many different lengths."""
    rest = {name: value for name, value in case.items() if name != "beam_width"}
    ends = list(range(1, llm.info.vocab_size, 5))[: 100 - case["beam_width"]]
    search = BeamSearch(case["beam_width"], ends=tuple(ends), **rest)
    sampling = SamplingParams(max_tokens=case["max_tokens"], temperature=0.0, ignore_eos=True)
    lengths: set[int] = set()
    for prompt in PROMPTS:
        (output,) = llm.generate([prompt], sampling, controller=search, use_tqdm=False)
        mine = json.loads(output.storage[BEAMS])
        expected = theirs(original, prompt, ends, case)
        assert [score for score, _, _ in mine] == pytest.approx([score for score, _ in expected], abs=1e-3)
        for i, ((_, tokens, logprobs), (score, wanted)) in enumerate(zip(mine, expected, strict=True)):
            near = [other for j, (other, _) in enumerate(expected) if j != i and abs(other - score) < _CLEAR]
            assert tokens == wanted or near, (case, i)
            assert len(logprobs) == len(tokens)
            lengths.add(len(tokens))
    assert len(lengths) > 1


# -- the property ------------------------------------------------------------------------------------------------------


def searched(lab: Lab, searches: list[tuple[tuple[int, ...], BeamSearch]], others: int) -> list[Any]:
    """Return the result of each search, run next to plain requests; `lab.drain` checks that no sequence is left."""
    asked = [
        make_request(prompt, controller=search, max_tokens=search.max_tokens, temperature=0.0, ignore_eos=True)
        for prompt, search in searches
    ]
    plain = [make_request((number + 1, 2), max_tokens=9, seed=number) for number in range(others)]
    for request in (*asked, *plain):
        lab.engine.add(request)
    lab.drain()
    stored = {event.request_id: event.value for event in lab.events if isinstance(event, Stored)}
    assert max(event.index for event in lab.events if event.request_id == asked[0].id) < searches[0][1].width
    return [json.loads(stored[request.id]) for request in asked]


_SEARCH = st.builds(
    BeamSearch,
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 9),
    ends=st.sampled_from([(), (13,), (3, 7, 13)]),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
)
_PROMPT = st.lists(st.integers(0, 15), min_size=1, max_size=9).map(tuple)


@given(
    st.lists(st.tuples(_PROMPT, _SEARCH), min_size=1, max_size=2),
    st.integers(0, 3),
    st.sampled_from([12, 16, 40]),
    st.sampled_from([5, 6, 40]),
    st.sampled_from([1, 3, 8, 40]),
)
@settings(max_examples=examples(30), deadline=None)
def test_what_is_found_depends_on_no_room_and_no_neighbour(
    searches: list[tuple[tuple[int, ...], BeamSearch]], others: int, blocks: int, seqs: int, step: int
) -> None:
    alone = [
        found
        for each in searches
        for found in searched(Lab(vocab_size=16, pools=[BeamPool()], num_blocks=200, block_size=4), [each], 0)
    ]
    cramped = Lab(
        vocab_size=16,
        pools=[BeamPool()],
        num_blocks=blocks,
        block_size=4,
        max_num_seqs=seqs,
        max_num_batched_tokens=step,
    )
    assert searched(cramped, searches, others) == alone
    for (_, search), found in zip(searches, alone, strict=True):
        scores = [score for score, _, _ in found]
        assert scores == sorted(scores, reverse=True) and 1 <= len(found) <= search.width
        for score, tokens, logprobs in found:
            assert score == pytest.approx(sum(logprobs) / len(tokens) ** search.length_penalty)


def test_a_search_that_is_left_gives_everything_back() -> None:
    lab = Lab(vocab_size=16, pools=[BeamPool()], num_blocks=40, block_size=4)
    request = make_request((1, 2, 3), controller=BeamSearch(4, 50), max_tokens=50, temperature=0.0, ignore_eos=True)
    lab.engine.add(request)
    for _ in range(7):
        lab.step()
    lab.engine.cancel(request.id)
    lab.drain()
    pool = lab.pools[0]
    assert isinstance(pool, BeamPool) and not pool.num_searches
