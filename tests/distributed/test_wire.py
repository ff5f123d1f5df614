"""Tests of messages between processes: a round trip keeps messages equal, and oversized messages are refused with an
error."""

from __future__ import annotations

import math
import re
import struct
from array import array
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.distributed import media_calls
from bridle.distributed.codec.control_vectors import decode_vector, encode_vector
from bridle.distributed.codec.embeddings import decode_vectors, encode_vectors
from bridle.distributed.codec.errors import decode_failure, encode_failure
from bridle.distributed.codec.sample_batch import decode_batch, encode_batch
from bridle.distributed.codec.sampling_params import (
    MAX_SLOTS,
    SamplingNames,
    SamplingSlots,
    decode_sampling,
    encode_sampling,
)
from bridle.distributed.codec.step_plan import decode_plan, encode_plan
from bridle.distributed.codec.step_result import check_result, decode_result, encode_result
from bridle.distributed.media_calls import assembled, parts_of
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.control.vector_scales import VectorSpan
from bridle.engine.multimodal.multimodal_inputs import MediaArray, MultiModalItem, PlaceholderRange
from bridle.engine.sampling.padded_vocab import PaddedVocab
from bridle.engine.scheduling.step_plan import (
    BlockCopy,
    ForkRow,
    PlanRow,
    SampleBatch,
    SampleRow,
    ScoreRun,
    StepPlan,
    StepResult,
)
from bridle.errors import (
    BridleError,
    ControllerError,
    InternalError,
    MediaRefused,
    OutOfBlocks,
    ProtocolError,
    ShardUnavailable,
    UnsupportedFeature,
)
from bridle.outputs import Logprob
from bridle.sampling import SENT_WITH_DRAWS, SamplingParams
from bridle.sampling_values import Watermark
from bridle.traces import Draw, Odds
from tests.control_vectors.kit import directions
from tests.sources import ROOT

IDS = st.integers(0, 1 << 40)
SMALL = st.integers(0, 1 << 20)
NUMBERS = st.floats(allow_nan=False, width=64)
TOKENS = st.lists(SMALL, max_size=5).map(tuple)


def lists(element: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(element, max_size=6)


SIDES = st.integers(1, 1000)
RUNS = st.builds(
    PlaceholderRange,
    SMALL,
    SMALL,
    st.sampled_from([b"x" * 16, b"y" * 16]),
    SMALL,
    st.one_of(st.none(), st.tuples(SIDES, SIDES, SIDES)),
    st.booleans(),
    st.sampled_from([1.0, 0.16, 4.0]),
)
KEYS = st.sampled_from(["a#1", "b#2"])
SPANS = st.builds(VectorSpan, SMALL, SMALL, st.lists(st.tuples(KEYS, NUMBERS), min_size=1, max_size=3).map(tuple))
PROBES = st.lists(st.tuples(KEYS, st.none() | st.integers(0, 200)), max_size=3).map(tuple)
PLANS = st.builds(
    StepPlan,
    step=IDS,
    rows=lists(
        st.builds(
            PlanRow,
            IDS,
            SMALL,
            SMALL,
            SMALL,
            SMALL,
            TOKENS,
            SMALL,
            TOKENS,
            SMALL,
            st.sampled_from([None, "a", "b"]),
            st.lists(RUNS, max_size=3).map(tuple),
            vectors=st.lists(SPANS, max_size=3).map(tuple),
            probes=PROBES,
        )
    ),
    forks=lists(st.builds(ForkRow, IDS, IDS, SMALL, SMALL)),
    freed=lists(IDS),
    copies=lists(st.builds(BlockCopy, SMALL, SMALL)),
)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1000),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0.01, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(SMALL, st.one_of(st.floats(-1e9, 1e9), st.just(-math.inf)), max_size=4),
    logprobs=st.one_of(st.none(), st.integers(0, 100)),
    logprobs_mode=st.sampled_from(["raw", "processed"]),
    watermark=st.one_of(st.none(), st.builds(Watermark, st.floats(0.01, 1), st.floats(-100, 100))),
)
BIAS = st.lists(st.tuples(SMALL, NUMBERS), max_size=3).map(tuple)
MASKS = st.one_of(st.none(), st.sampled_from([b"\1\0\0\0", b"\2\0\0\0"]))


@st.composite
def batches(draw: st.DrawFn) -> SampleBatch:
    samplings = draw(st.lists(SAMPLINGS, min_size=1, max_size=3))
    key = st.integers(0, (1 << 64) - 1)
    row = st.builds(SampleRow, IDS, SMALL, st.sampled_from(samplings), key, SMALL, MASKS, BIAS, num_traced=SMALL)
    run = st.builds(ScoreRun, IDS, SMALL, TOKENS, SMALL)
    return SampleBatch(draw(IDS), draw(lists(row)), draw(lists(run)), draw(st.sets(SMALL).map(PaddedVocab.of)))


TOP = st.lists(st.tuples(SMALL, NUMBERS), max_size=3).map(tuple)
ODDS = st.builds(Odds, NUMBERS, st.one_of(st.none(), st.integers(1, 1 << 20)), TOP)
PLAIN_DRAWS = st.builds(Draw, ODDS)
STEERED_DRAWS = st.builds(Draw, ODDS, ODDS, st.one_of(st.none(), st.integers(1, 1 << 20)), NUMBERS)
DRAWS = PLAIN_DRAWS | STEERED_DRAWS
LOGPROBS = st.builds(Logprob, SMALL, NUMBERS, TOP, st.one_of(st.none(), st.integers(1, 1 << 20)))


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    tokens = draw(lists(st.integers(-1, 1 << 20)))
    logprobs = [draw(st.one_of(st.none(), LOGPROBS)) for _ in tokens]
    draws = [draw(st.none() | DRAWS) for _ in tokens]
    traced = draws if any(draws) else []
    probes = [draw(st.lists(NUMBERS, max_size=3).map(tuple)) for _ in tokens] if draw(st.booleans()) else []
    return StepResult(draw(IDS), tokens, logprobs, draw(lists(lists(LOGPROBS))), draws=traced, probes=probes)


@given(PLANS)
def test_a_plan_survives_the_wire(plan: StepPlan) -> None:
    assert decode_plan(pb.Plan.FromString(encode_plan(plan).SerializeToString())) == plan


@given(st.lists(batches(), max_size=4))
def test_batches_with_names_that_outlive_them(made: list[SampleBatch]) -> None:
    names, slots = SamplingNames(num_slots=2), SamplingSlots()
    for batch in made:
        message = encode_batch(batch, names)
        assert decode_batch(pb.Batch.FromString(message.SerializeToString()), slots) == batch


@given(results())
def test_results_survive_the_wire(result: StepResult) -> None:
    assert decode_result(pb.Result.FromString(encode_result(result).SerializeToString())) == result


@given(st.integers(1, 5), st.integers(0, 4), st.data())
def test_vectors_survive_the_wire(size: int, count: int, data: st.DataObject) -> None:
    numbers = st.lists(st.floats(width=32, allow_nan=False), min_size=size, max_size=size)
    vectors = [array("f", data.draw(numbers)) for _ in range(count)]
    message = pb.Vectors.FromString(encode_vectors(3, size, vectors).SerializeToString())
    assert decode_vectors(message, count, size) == vectors
    assert not message.values or message.values[:4] == struct.pack("<f", vectors[0][0])


def test_a_shard_reads_no_field_that_is_not_sent() -> None:
    """The executor's code is the same in a shard, so every field that it reads must be in the message."""
    text = "".join(path.read_text() for path in (ROOT / "bridle/model").rglob("*.py"))
    unsent = {field.name for field in fields(SamplingParams)} - set(SENT_WITH_DRAWS)
    assert not unsent & set(re.findall(r"sampling\.(\w+)", text.replace("bridle.model.sampling.", "")))


def test_a_sampling_object_is_sent_once() -> None:
    names, params = SamplingNames(), SamplingParams(temperature=0.5)
    rows = [SampleRow(i, i, params) for i in range(3)]
    assert [len(encode_batch(SampleBatch(step, rows), names).samplings) for step in range(3)] == [1, 0, 0]


def test_masks_that_are_equal_are_sent_once() -> None:
    rows = [SampleRow(i, i, SamplingParams(), mask=bytes([i % 2]) * 1000) for i in range(6)]
    assert len(encode_batch(SampleBatch(1, rows), SamplingNames()).mask_rows) == 2


def test_slots_are_bounded() -> None:
    names = SamplingNames(num_slots=3)
    slots = [names.name([SamplingParams()])[0][0] for _ in range(10)]
    assert set(slots) == {0, 1, 2}
    with pytest.raises(ProtocolError, match=f"slot {MAX_SLOTS}; slots go from 0"):
        SamplingSlots().learn(encode_sampling(SamplingParams(), MAX_SLOTS))


@pytest.mark.parametrize(
    "error",
    [
        BridleError("broken"),
        InternalError("bug"),
        OutOfBlocks("full"),
        ShardUnavailable("gone"),
        UnsupportedFeature("no", "adapter"),
        MediaRefused("odd", "image"),
    ],
)
def test_errors_keep_their_kind(error: BridleError) -> None:
    got = decode_failure(pb.Failure.FromString(encode_failure(3, error).SerializeToString()))
    assert (type(got), str(got), vars(got)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), ControllerError("not from here")])
def test_what_no_executor_raises_is_a_bug(error: Exception) -> None:
    assert isinstance(decode_failure(encode_failure(1, error)), InternalError)


def test_long_messages_are_cut() -> None:
    assert len(encode_failure(1, BridleError("x" * 100_000)).message) < 5_000


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            pb.Plan(step=7, seq_ids=[1, 2], starts=[0]),
            "plan of step 7: a list in the message has 1 entries for 2 batch rows",
        ),
        (pb.Plan(step=7, fork_parents=[1]), "a list in the message has 0 entries for 1 batch rows"),
        (pb.Plan(step=7, copy_sources=[1]), "a list in the message has 0 entries for 1 batch rows"),
        (pb.Plan(step=7, seq_ids=[], num_runs=[1]), "a list in the message has 1 entries for 0 batch rows"),
        (pb.Plan(step=7, new_tokens=[1]), "the batch rows need 0 entries in all, but the message has 1"),
    ],
)
def test_plans_that_do_not_fit(message: pb.Plan, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode_plan(message)


def one_row(**more: Any) -> pb.Batch:
    return pb.Batch(step=7, seq_ids=[1], logits_indexes=[0], slots=[0], keys=[1], draws=[0], **more)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (one_row(), "slot 0, which has no sampling parameters"),
        (one_row(samplings=[pb.Sampling(top_p=2.0)]), "sampling slot 0: top_p is 2.0"),
        (
            one_row(samplings=[encode_sampling(SamplingParams(), 0)], masks=[2], mask_rows=[b""]),
            "entry 2, but there are 2",
        ),
        (one_row(samplings=[encode_sampling(SamplingParams(), 0)], masks=[1, 1]), "2 entries for 1 batch rows"),
        (
            one_row(samplings=[encode_sampling(SamplingParams(), 0)], num_bias=[3]),
            "3 entries in all, but the message has 0",
        ),
        (pb.Batch(step=7, score_seq_ids=[1]), "0 entries for 1 batch rows"),
    ],
)
def test_batches_that_do_not_fit(message: pb.Batch, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode_batch(message, SamplingSlots())


def test_results_that_do_not_fit() -> None:
    with pytest.raises(ProtocolError, match="entry 5, but there are 1"):
        decode_result(
            pb.Result(
                tokens=[1], logprob_rows=[5], logprobs=pb.Logprobs(tokens=[1], logprobs=[0.0], ranks=[0], num_top=[0])
            )
        )


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (StepResult(1, [1], [None], [[]]), "has 1 entries for 2 batch rows"),
        (StepResult(1, [1, 9], [None, None], [[]]), "token ids from 1 to 9; the vocabulary has 9"),
        (StepResult(1, [-2, 1], [None, None], [[]]), "token ids from -2 to 1"),
        (StepResult(1, [1, -1], [None, None]), "has 0 entries for 1 batch rows"),
        (StepResult(1, [1, 2], [None, None], [[]], draws=[None]), "has 1 entries for 2 batch rows"),
        (StepResult(1, [1, 2], [None, None], [[]], probes=[()]), "has 1 entries for 2 batch rows"),
        (StepResult(1, [1, -1], [None, None], [[]]), "has 0 entries for 3 batch rows"),
    ],
)
def test_results_that_answer_another_batch(result: StepResult, why: str) -> None:
    rows = [SampleRow(number, number, SamplingParams()) for number in range(2)]
    with pytest.raises(ProtocolError, match=why):
        check_result(result, SampleBatch(1, rows, [ScoreRun(1, 0, (4, 5, 6), 0)]), 9)


@pytest.mark.parametrize(("count", "size"), [(1, 2), (3, 2), (4, 1), (2, 3)])
def test_vectors_that_do_not_fit(count: int, size: int) -> None:
    with pytest.raises(
        ProtocolError, match=f"16 bytes of embeddings with 2 values each; expected {count} embeddings with {size}"
    ):
        decode_vectors(encode_vectors(3, 2, [array("f", [1, 0])] * 2), count, size)


def test_sampling_keeps_what_chooses_and_drops_the_rest() -> None:
    params = SamplingParams(top_k=3, stop=("x",), n=4, seed=9, logprobs=0)
    assert decode_sampling(encode_sampling(params, 0)) == SamplingParams(top_k=3, logprobs=0)


def plan_with_runs(**changed: Any) -> pb.Plan:
    one = {"num_new_tokens": [0], "num_new_blocks": [0], "num_kept_blocks": [0], "num_prompt": [9]}
    row = {"seq_ids": [1], "starts": [0], "num_scheduled": [9], "num_logits": [0], "num_kept": [0], **one}
    run = {"run_positions": [2], "run_lengths": [4], "run_offsets": [0], "run_media": [0], "run_grids": [1, 2, 2]}
    run["run_is_mutual"] = [True]
    return pb.Plan(**{"step": 7, "media": [b"x"], "num_runs": [1], **row, **run, **changed})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"run_grids": [1, 2]}, "a list in the message has 2 entries for 3 batch rows"),
        ({"run_lengths": []}, "a list in the message has 0 entries for 1 batch rows"),
        ({"run_media": [1]}, "refers to entry 1, but there are 1"),
        ({"run_paces": [1.0, 2.0]}, "a list in the message has 2 entries for 1 batch rows"),
        ({"num_runs": [2]}, "the batch rows need 2 entries in all, but the message has 1"),
    ],
)
def test_places_of_pictures_that_do_not_fit(changed: dict[str, Any], why: str) -> None:
    assert decode_plan(plan_with_runs()).rows[0].runs == (PlaceholderRange(2, 4, b"x", 0, (1, 2, 2), True),)
    with pytest.raises(ProtocolError, match=why):
        decode_plan(plan_with_runs(**changed))


def plan_with_vectors(**changed: Any) -> pb.Plan:
    vectors = {"vector_keys": ["a#1"], "num_spans": [1], "span_offsets": [0], "span_lengths": [9], "num_scales": [1]}
    probes = {"num_probes": [1], "probe_vectors": [0], "probe_layers": [-1]}
    scales = {"scale_vectors": [0], "scales": [0.5]}
    return plan_with_runs(**{**vectors, **scales, **probes, **changed})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"span_lengths": []}, "a list in the message has 0 entries for 1 batch rows"),
        ({"num_spans": [2]}, "the batch rows need 2 entries in all, but the message has 1"),
        ({"scales": [1.0, 2.0]}, "a list in the message has 1 entries for 2 batch rows"),
        ({"scale_vectors": [1]}, "refers to entry 1, but there are 1"),
        ({"num_probes": [2]}, "the batch rows need 2 entries in all, but the message has 1"),
        ({"probe_vectors": [7]}, "refers to entry 7, but there are 1"),
        ({"probe_layers": []}, "a list in the message has 0 entries for 1 batch rows"),
    ],
)
def test_control_vectors_that_do_not_fit(changed: dict[str, Any], why: str) -> None:
    row = decode_plan(plan_with_vectors()).rows[0]
    assert (row.vectors, row.probes) == ((VectorSpan(0, 9, (("a#1", 0.5),)),), (("a#1", None),))
    with pytest.raises(ProtocolError, match=why):
        decode_plan(plan_with_vectors(**changed))


def test_directions_survive_the_wire() -> None:
    given = directions(4, 8)
    message = pb.ControlVector.FromString(encode_vector("a#1", given).SerializeToString())
    found = decode_vector(message, 8)
    assert list(found) == list(given) and all(found[layer].equal(given[layer]) for layer in given)
    with pytest.raises(ProtocolError, match="not the size of 3 layers of 7 values"):
        decode_vector(message, 7)


ITEMS = st.sampled_from(["float32", "int64", "bool", "float16"])


@st.composite
def media(draw: st.DrawFn) -> MultiModalItem:
    arrays = []
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
        dtype, shape = draw(ITEMS), tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        num_bytes = math.prod(shape) * {"float32": 4, "int64": 8, "bool": 1, "float16": 2}[dtype]
        arrays.append(MediaArray(name, dtype, shape, draw(st.binary(min_size=num_bytes, max_size=num_bytes))))
    return MultiModalItem(draw(st.binary(min_size=1, max_size=16)), tuple(arrays), draw(SMALL))


@given(media(), st.integers(1, 40))
def test_pictures_travel_in_parts_and_come_whole(medium: MultiModalItem, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media_calls, "PART_BYTES", size)
        messages = [part.SerializeToString() for part in parts_of(medium)]
    assert all(len(message) < size + 200 for message in messages)
    assert assembled(map(pb.MediumPart.FromString, messages)) == medium


HEAD = pb.MediumHead(key=b"x", num_rows=1, arrays=[pb.MediumArray(name="a", dtype="uint8", shape=[4])])


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "got no data of an image"),
        ([pb.MediumPart(data=b"1")], "before the message that begins"),
        ([pb.MediumPart(head=HEAD), pb.MediumPart(data=b"12")], "2 bytes of it are missing"),
        ([pb.MediumPart(head=HEAD), pb.MediumPart(data=b"12345")], "5 bytes of an image that lacks only 4"),
        ([pb.MediumPart(head=pb.MediumHead(key=b"x"))], "and 0 arrays"),
        ([pb.MediumPart(head=pb.MediumHead(arrays=HEAD.arrays))], "a key of 0 bytes"),
        ([pb.MediumPart(head=pb.MediumHead(key=b"x", arrays=[pb.MediumArray(dtype="object")]))], "of type 'object'"),
        (
            [pb.MediumPart(head=pb.MediumHead(key=b"x", arrays=[pb.MediumArray(dtype="int64", shape=[1 << 40])]))],
            f"1 to 16 arrays of at most {512 << 20}",
        ),
    ],
)
def test_pictures_that_do_not_fit(parts: list[pb.MediumPart], why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        assembled(parts)
