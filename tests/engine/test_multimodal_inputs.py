"""Tests of images in prompts, as the engine sees them. A sequence computes an image only after it is encoded, and no
cache takes one image for another. Everything else is scheduled like requests without images."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.control.decision import Decision
from bridle.engine.multimodal.multimodal_inputs import (
    MultiModalItem,
    PlaceholderRange,
    align_to_item,
    marks,
)
from bridle.engine.request import Request
from bridle.errors import InvalidRequest, MediaRefused, ShardUnavailable, UnsupportedFeature
from bridle.outputs import FinishReason
from tests.engine.media_lab import PAD, FakeMediaStore, MediaLab, make_medium
from tests.engine.programs import VOCAB
from tests.engine.random_labs import random_request
from tests.engine.support import Lab, Replay, make_request, more
from tests.fakes.controller_runtime import FakeController, Reply, View

SEED = st.integers(0, 1 << 40)


def seeing(random: Random, request: Request) -> Request:
    """Return `request` with images at some places of a longer prompt. Some images have two ranges, and some must not be
    split."""
    tokens, runs, media = list(request.prompt), [], {}
    for _ in range(random.randint(1, 3)):
        medium = make_medium(random.choice("xyz"), random.choice([1, 4, 5, 9]))
        medium = replace(medium, key=(medium.key.strip() + str(medium.num_rows).encode()).ljust(16))
        media[medium.key] = medium
        half = medium.num_rows // 2 if random.random() < 0.3 else 0
        is_mutual = random.random() < 0.4
        for offset, length in ((0, half), (half, medium.num_rows - half)):
            if length:
                runs.append(PlaceholderRange(len(tokens), length, medium.key, offset, is_mutual=is_mutual))
                tokens += [PAD] * length + [random.randrange(VOCAB)] * random.randint(0, 2)
    tokens.append(random.randrange(VOCAB))
    return replace(request, prompt=tuple(tokens), runs=tuple(runs), media=tuple(media.values()))


def outcome(replay: Replay) -> object:
    return {
        path: (output.tokens, output.logprobs, output.reason, str(output.finished and output.finished.error))
        for path, output in replay.by_path.items()
    }


@more(2)
@given(SEED)
def test_an_output_depends_on_its_request_alone(seed: int) -> None:
    """Each request with images gives the output that it gives alone, with all images present. It does so next to other
    requests, in chunks that split images, preempted, with the prefix cache, and with images being evicted."""
    random = Random(seed)
    store = FakeMediaStore(random, room=random.choice([1, 2, 4]))
    limits = {"vocab_size": VOCAB, "block_size": 4, "eos_token_ids": (13,), "max_forks": 100_000}
    lab = MediaLab(
        store,
        num_blocks=random.choice([24, 40, 90]),
        max_num_batched_tokens=random.choice([1, 3, 8, 40]),
        max_num_seqs=random.choice([1, 2, 5, 50]),
        max_model_len=80,
        **limits,
    )
    requests = []
    for number in range(random.randint(1, 6)):
        request = random_request(random, id=f"r{number}", adapter=None)
        requests.append(seeing(random, request) if random.random() < 0.8 else request)
        try:
            lab.engine.add(requests[-1])
        except InvalidRequest:
            requests.pop()
        for _ in range(random.choice([0, 0, 1, 3])):
            lab.step()
    replays = lab.drain()
    assert not store.users
    for request in requests:
        alone = MediaLab(FakeMediaStore(), num_blocks=400, max_model_len=80, **limits)
        assert outcome(replays[request.id]) == outcome(alone.run(request)[0])


def picture_request(medium: MultiModalItem, **fields: object) -> Request:
    prompt = [1, 2, *[PAD] * medium.num_rows, 4, 5, 6]
    fields.setdefault("temperature", 0.0)
    fields.setdefault("max_tokens", 6)
    return make_request(prompt, media=(medium,), runs=(PlaceholderRange(2, medium.num_rows, medium.key),), **fields)


def test_the_same_tokens_with_other_pictures_share_no_cache() -> None:
    store = FakeMediaStore()
    lab = MediaLab(store, vocab_size=VOCAB, block_size=4)
    one, again, other, text = lab.run(
        picture_request(make_medium("one", 9)),
        picture_request(make_medium("one", 9)),
        picture_request(make_medium("two", 9)),
        make_request([1, 2, *[PAD] * 9, 4, 5, 6], temperature=0.0, max_tokens=6),
    )
    assert one.first.tokens == again.first.tokens
    assert len({tuple(replay.first.tokens) for replay in (one, other, text)}) == 3
    later = [lab.run(picture_request(make_medium(name, 9)))[0].first for name in ("one", "two", "new")]
    assert [output.usage.cached_tokens for output in later] == [12, 12, 0]
    assert [output.tokens for output in later[:2]] == [one.first.tokens, other.first.tokens]
    assert lab.run(picture_request(make_medium("one", 9), tenant="t"))[0].first.usage.cached_tokens == 0


def test_a_picture_that_is_not_cut_goes_first_once_and_the_others_go_on() -> None:
    """Images of 6 rows run in steps of 6 tokens, next to outputs that need one token each. All requests end."""
    lab = MediaLab(FakeMediaStore(), vocab_size=VOCAB, block_size=4, max_num_batched_tokens=6)
    medium = make_medium("one", 6)
    run = PlaceholderRange(1, 6, medium.key, is_mutual=True)
    texts = [make_request([1, 2, number], temperature=0.0, max_tokens=20) for number in range(3)]
    sights = [
        make_request([number, *[PAD] * 6, 4], media=(medium,), runs=(run,), temperature=0.0, max_tokens=20)
        for number in range(3)
    ]
    for replay in lab.run(*texts, *sights):
        assert len(replay.first.tokens) == 20
    with pytest.raises(
        InvalidRequest, match=r"takes 7 tokens, .* at most 6 prompt tokens \(max_batch_prefill_tokens\)"
    ):
        lab.engine.add(replace(sights[0], runs=(replace(run, length=7),), media=(make_medium("one", 7),)))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.booleans())), st.integers(0, 40), st.integers(0, 40))
def test_no_chunk_ends_within_a_run_that_is_not_cut(
    parts: list[tuple[int, int, bool]], start: int, length: int
) -> None:
    position, runs = 0, []
    for gap, size, is_mutual in parts:
        runs.append(PlaceholderRange(position + gap, size, b"x", is_mutual=is_mutual))
        position = runs[-1].end
    end = align_to_item(tuple(runs), start, start + length)
    assert not any(run.is_mutual and run.position < end < run.end for run in runs)
    assert end > start or length == 0
    if not any(run.is_mutual and run.position < start + length < run.end for run in runs):
        assert end == start + length


def test_text_before_the_first_picture_is_shared() -> None:
    lab = MediaLab(FakeMediaStore(), vocab_size=VOCAB, block_size=2)
    lab.run(picture_request(make_medium("one")))
    assert lab.run(picture_request(make_medium("two")))[0].first.usage.cached_tokens == 2


def test_what_the_prefix_cache_holds_is_not_encoded_again() -> None:
    store = FakeMediaStore()
    lab = MediaLab(store, vocab_size=VOCAB, block_size=1)
    lab.run(picture_request(make_medium("one")))
    store.ready.clear()
    lab.run(picture_request(make_medium("one")))
    assert store.num_encoded == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.sampled_from("ab"), st.integers(0, 3))), SEED)
def test_marks_say_what_stands_where(parts: list[tuple[int, int, str, int]], seed: int) -> None:
    """Two blocks have equal marks exactly if they have the same rows of the same images at the same places."""
    random, position, runs = Random(seed), 0, []
    for gap, length, name, offset in parts:
        runs.append(PlaceholderRange(position + gap, length, name.encode().ljust(16), offset))
        position = runs[-1].end
    seen = {run.position + i: (run.key, run.offset + i) for run in runs for i in range(run.length)}
    starts = [random.randrange(position + 4) for _ in range(2)]
    found = [marks(tuple(runs), start, start + 4) for start in starts]
    wanted = [[seen.get(start + i) for i in range(4)] for start in starts]
    if found[0] == found[1]:
        assert wanted[0] == wanted[1]
    elif wanted[0] == wanted[1]:  # one run may be told as two that lie side by side, which only costs a hit
        assert len(found[0]) != len(found[1]) or len(found[0]) > 40


def test_the_same_frames_at_another_pace_stand_elsewhere() -> None:
    runs = [(PlaceholderRange(1, 4, b"x" * 16, 0, (2, 1, 2), pace=pace),) for pace in (1.0, 2.0, 0.5)]
    assert len({marks(each, 0, 4) for each in runs}) == 3


def test_a_picture_that_cannot_be_encoded_ends_its_request_alone() -> None:
    store = FakeMediaStore(Random(0), room=0)  # never ready
    lab = MediaLab(store, vocab_size=VOCAB)
    bad, good = picture_request(make_medium("bad")), make_request([1, 2], max_tokens=3)
    lab.engine.add(bad)
    lab.engine.add(good)
    for _ in range(4):
        lab.step()
    store.failures[make_medium("bad").key] = MediaRefused("it has the wrong size")
    replays = lab.drain()
    assert replays[bad.id].first.reason is FinishReason.ERROR
    assert "wrong size" in str(replays[bad.id].first.finished)
    assert replays[good.id].first.reason is FinishReason.LENGTH
    assert not store.users


def test_pictures_are_encoded_again_after_the_loss_of_a_device() -> None:
    fault = ShardUnavailable("gone")
    medium = make_medium("one", 9)
    want = MediaLab(FakeMediaStore(), vocab_size=VOCAB).run(picture_request(medium))[0]
    lab = MediaLab(FakeMediaStore(Random(1)), vocab_size=VOCAB, max_num_batched_tokens=4, faults={1: fault})
    assert outcome(lab.run(picture_request(medium))[0]) == outcome(want)


class Never(Random):
    """A random generator with which a fake media store decides that an image is never ready."""

    def random(self) -> float:
        return 1.0


def rewinding(count: int) -> FakeController:
    """Return a controller that replaces the last `count` tokens by one token, and then lets the model continue."""

    def program(view: View) -> Decision:
        return Decision.splice(count, (7,)) if not view.num_asks else Decision.sample()

    return FakeController(program)


def test_controllers_rewind_behind_and_before_pictures_but_not_into_one() -> None:
    lab = MediaLab(FakeMediaStore(), vocab_size=VOCAB)
    medium = make_medium("one")  # at 2 to 6 of 10 tokens
    behind, into, before = lab.run(*(picture_request(medium, controller=rewinding(n)) for n in (3, 4, 8)))
    assert [one.first.reason for one in (behind, before)] == [FinishReason.LENGTH] * 2
    assert into.first.reason is FinishReason.ERROR
    assert "a part of an image" in str(into.first.finished)
    whole = PlaceholderRange(0, 10, (prompt := make_medium("whole", 10)).key, is_mutual=True)
    sighted = {"media": (prompt,), "runs": (whole,), "temperature": 0.0, "max_tokens": 6}
    refused, taken = lab.run(*(make_request(range(10), controller=rewinding(n), **sighted) for n in (1, 0)))
    assert "of a prompt whose tokens attend to later ones" in str(refused.first.finished)
    assert taken.first.reason is FinishReason.LENGTH
    text = lab.run_one([1, 2], controller=rewinding(0), temperature=0.0, max_tokens=6)
    assert before.first.tokens[:6] == text.first.tokens  # what was seen is forgotten


def test_an_image_that_a_controller_removes_is_not_awaited() -> None:
    """The sequence waits for an image that is never encoded, until the controller removes the image."""
    lab = MediaLab(FakeMediaStore(Never()), vocab_size=VOCAB, max_num_batched_tokens=1)

    def program(view: View) -> Decision | Reply:
        return Decision.sample() if view.num_asks else Reply(Decision.splice(8, (7,)), delay=0.02)

    replay = lab.run(picture_request(make_medium("one"), controller=FakeController(program)))[0]
    assert replay.first.reason is FinishReason.LENGTH
    assert not lab.store.num_encoded


def test_a_prompt_with_pictures_is_not_replaced() -> None:
    lab = MediaLab(FakeMediaStore(), vocab_size=VOCAB)
    controller = FakeController(lambda view: Decision.sample(), prompt=(1, 2))
    replay = lab.run(picture_request(make_medium("one"), controller=controller))[0]
    assert "cannot be replaced" in str(replay.first.finished)


def test_runs_that_contradict_the_prompt_are_refused() -> None:
    lab = MediaLab(FakeMediaStore(), vocab_size=VOCAB)
    medium = make_medium("one")
    for runs, why in (
        ((PlaceholderRange(2, 5, b"?" * 16),), "that no image of the request has"),
        ((PlaceholderRange(2, 5, medium.key, 1),), "that no image of the request has"),
        ((PlaceholderRange(8, 5, medium.key),), "before 10"),
        ((PlaceholderRange(4, 2, medium.key), PlaceholderRange(2, 2, medium.key)), "they must be after"),
        ((PlaceholderRange(2, 0, medium.key),), "has the prompt positions"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            lab.engine.add(replace(picture_request(medium), runs=runs))
    assert not lab.engine.has_work


def test_pictures_are_refused_where_none_can_be_encoded() -> None:
    request = picture_request(make_medium("one"))
    with pytest.raises(UnsupportedFeature, match="served for text only"):
        Lab(vocab_size=VOCAB).engine.check(request)
    store = FakeMediaStore()
    store.refused.add(request.media[0].key)
    with pytest.raises(MediaRefused):
        MediaLab(store, vocab_size=VOCAB).engine.check(request)


def test_closing_an_engine_closes_its_store() -> None:
    store = FakeMediaStore()
    MediaLab(store).engine.close()
    assert store.is_closed
