"""Draft tokens change only the time: with any drafts, an output equals that of the reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine.control.decision import Branch, Splice
from bridle.engine.scheduling.scheduler import Scheduled
from bridle.engine.scheduling.step_plan import PlanRow
from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.cost_model import BaseStep, depth_worth
from bridle.engine.spec_decode.ngram_lookup import NGRAM, NgramIndex
from bridle.engine.spec_decode.proposers import Drafts, Wish
from bridle.engine.spec_decode.speculation import Speculation
from bridle.engine.spec_decode.step_cost import AcceptanceRate, StepCost
from bridle.engine.spec_decode.verifier import num_guessed
from bridle.outputs import Rewind, TokenEvent
from bridle.sampling import AUTO_DRAFTS
from tests.engine.random_labs import KEEPINGS, SEED, guess, random_lab, random_request, run_staggered
from tests.engine.support import Lab, check_against_reference, make_request, make_sequence, more, replay

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@KEEPINGS
@more(3)
@given(seed=SEED)
def test_predictions_change_nothing(seed: int, kv: str) -> None:
    random = Random(seed)
    lab = random_lab(random, kv)
    requests = []
    for _ in range(random.randint(1, 6)):
        request = random_request(random, speculate=random.choice([AUTO_DRAFTS, 1, 3, 8]), max_tokens=14)
        if request.sampling.seed is None:
            continue
        outputs = lab.reference(request).values()
        longest = max((one.tokens for one in outputs), key=len)
        sampling = request.sampling.with_(prediction_ids=guess(random, longest))
        requests.append(replace(request, sampling=sampling))
    replays = run_staggered(lab, requests, random)
    for request in requests:
        check_against_reference(lab, request, replays[request.id])


@KEEPINGS
def test_a_right_prediction_takes_one_step_for_many_tokens(kv: str) -> None:
    request = make_request([1, 2, 3], max_tokens=13, seed=5, ignore_eos=True)
    lab = Lab(kv=kv, block_size=4, num_blocks=20)
    truth = lab.reference(request)[()].tokens
    predicted = make_request(
        [1, 2, 3], max_tokens=13, seed=5, ignore_eos=True, speculate=4, prediction_ids=tuple(truth)
    )
    lab.engine.add(predicted)
    output = lab.drain()[predicted.id].first
    assert output.tokens == truth
    # The prompt's step draws one token, each of the others five; the last one three, since no more are wanted.
    assert lab.executor.num_forwards == 4
    assert (output.usage.drafted_tokens, output.usage.accepted_tokens) == (9, 9)
    assert lab.engine.statistics().num_accepted_tokens == 9


def test_a_wrong_prediction_costs_rows_and_no_step() -> None:
    request = make_request([1, 2, 3], max_tokens=8, seed=5, ignore_eos=True)
    lab = Lab()
    truth = lab.reference(request)[()].tokens
    wrong = tuple((token + 1) % 32 for token in truth)
    predicted = make_request([1, 2, 3], max_tokens=8, seed=5, ignore_eos=True, speculate=4, prediction_ids=wrong)
    lab.engine.add(predicted)
    output = lab.drain()[predicted.id].first
    assert output.tokens == truth
    assert lab.executor.num_forwards == 8
    assert output.usage.accepted_tokens == 0


def test_drafts_take_no_block_from_another() -> None:
    """If the pool has no more blocks than needed, draft tokens are left out, and no sequence is preempted."""
    lab = Lab(block_size=4, num_blocks=4, enable_prefix_caching=False)
    requests = [
        make_request([1] * 6, max_tokens=2, speculate=8, prediction_ids=(1,) * 8, seed=number) for number in range(2)
    ]
    for request in requests:
        lab.engine.add(request)
    replays = lab.drain()
    for request in requests:
        check_against_reference(lab, request, replays[request.id])
    assert lab.engine.statistics().num_preemptions == 0


def test_no_drafted_token_is_ever_sent() -> None:
    """Clients get only sampled tokens, and no rejected draft tokens."""
    request = make_request([1, 2, 3], max_tokens=12, seed=5, speculate=6, prediction_ids=(7, 7, 7, 7))
    lab = Lab()
    lab.engine.add(request)
    events = []
    while lab.engine.has_work:
        events += lab.step()
    assert not [event for event in events if isinstance(event, Rewind)]
    sent = [event.token for event in events if isinstance(event, TokenEvent)]
    assert sent == lab.reference(request)[()].tokens == replay(events)[request.id].first.tokens


def test_the_server_says_what_requests_leave_open() -> None:
    lab = Lab(config=EngineConfig(speculate=3))
    truth = lab.reference(make_request([1, 2], max_tokens=9, seed=1))[()].tokens
    for speculate, wants in ((None, True), (0, False), (2, True)):
        request = make_request([1, 2], max_tokens=9, seed=1, speculate=speculate, prediction_ids=tuple(truth))
        lab.engine.add(request)
        assert (lab.drain()[request.id].first.usage.drafted_tokens > 0) is wants


# -- looking things up -----------------------------------------------------------------------------------------


@given(steps=st.lists(st.tuples(TOKENS, st.integers(0, 6)), max_size=8), prediction=TOKENS)
def test_lookup_knows_what_a_fresh_one_knows(steps: list[tuple[list[int], int]], prediction: list[int]) -> None:
    """Tokens that were rolled back do not affect the lookup."""
    tokens: list[int] = []
    lookup = NgramIndex(prediction)
    for added, num_cut in steps:
        tokens += added
        lookup.follow(tokens, 0, 1 << 20)
        del tokens[max(len(tokens) - num_cut, 0) :]
        lookup.cut(len(tokens))
        fresh = NgramIndex(prediction)
        fresh.follow(tokens, len(tokens), 1 << 20)
        assert (lookup.text, lookup.latest, lookup.before) == (fresh.text, fresh.latest, fresh.before)


@given(tokens=TOKENS, limit=st.integers(1, 9))
def test_drafts_follow_an_earlier_copy_of_the_end(tokens: list[int], limit: int) -> None:
    lookup = NgramIndex()
    lookup.follow(tokens, len(tokens), 1 << 20)
    draft = lookup.draft(limit)
    ends = {tuple(tokens[i : i + NGRAM]): i + NGRAM for i in range(len(tokens) - NGRAM)}
    known = len(tokens) >= NGRAM and tuple(tokens[-NGRAM:]) in ends
    assert bool(draft) == known
    assert len(draft) == (limit if known else 0)  # a copy that reaches its own end repeats itself
    if known:
        grown = [*tokens, *draft]
        assert any(grown[len(tokens) - NGRAM :] == grown[i : i + NGRAM + limit] for i in range(len(tokens) - NGRAM))


def test_a_copy_goes_on_where_it_was() -> None:
    lookup = NgramIndex()
    text = [9, 8, 7, 1, 2, 3, 4, 5, 6, 9, 8, 7, 3, 3, 3]
    lookup.follow(text, len(text), 1 << 20)
    lookup.follow([*text, 9, 8, 7], len(text), 1 << 20)
    assert lookup.draft(2) == (3, 3)
    lookup.follow([*text, 9, 8, 7, 1, 2, 3], len(text), 1 << 20)  # it was the older place
    assert lookup.draft(3) == (4, 5, 6)


def test_long_prompts_are_indexed_a_part_at_a_time() -> None:
    lookup = NgramIndex()
    prompt = list(range(10_000))
    lookup.follow(prompt, len(prompt), 4096)
    assert len(lookup) == 4096


# -- what pays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0.0, 0.25, 2.0])
def test_costs_are_those_of_a_line(row: float) -> None:
    cost = StepCost()
    for number in range(200):
        num_tokens = 1 + number % 7
        cost.note(num_tokens, 3.0 + row * num_tokens)
    assert cost.of_row() == pytest.approx(row, abs=1e-6)
    assert cost.of_step(20) == pytest.approx(3.0 + 20 * row, rel=1e-6)


@pytest.mark.parametrize("other", [0.0, 0.05, 0.3])
def test_tokens_without_logits_do_not_make_rows_cheap(other: float) -> None:
    """New sequences add prompt tokens to a step, and only the last token of a prompt has logits."""
    cost = StepCost()
    for number in range(200):
        num_rows, num_others = 10 + number % 5, 11 * (number % 3 == 0)
        cost.note(num_rows, 3.0 + 0.4 * num_rows + other * num_others, num_others)
    assert cost.of_row() == pytest.approx(0.4, abs=1e-6)
    assert cost.of_step(20, 7) == pytest.approx(3.0 + 20 * 0.4 + 7 * other, rel=1e-6)


def test_rows_that_always_come_with_other_tokens_say_nothing_of_what_a_row_costs() -> None:
    cost = StepCost()
    for number in range(200):
        cost.note(number % 5, 1.0 + 2.0 * (number % 5), 3 * (number % 5))
    assert 0.0 < cost.of_row() < 1.0  # what is taken at first: not all of it


def spoken(speculation: Speculation, num_right: int, num_drafted: int) -> int:
    """Return the number of draft tokens per step after many steps that accepted `num_right` of `num_drafted`."""
    seq = make_sequence(0, [1, 2, 3, 1, 2, 3, 1, 2, 3], speculate=AUTO_DRAFTS)
    seq.draws.was_forked = True
    for _ in range(100):
        speculation.guessing.learn(seq, num_drafted, num_right)
    return len(speculation.draft([seq], 1, 64).get(0, ()))


def test_drafts_that_are_right_are_many_and_wrong_ones_few() -> None:
    speculation = Speculation()
    for number in range(50):
        speculation.cost.note(1 + number % 3, 1.0 + 0.1 * (number % 3))  # a row costs a tenth of a step
    assert spoken(speculation, 8, 8) == 16
    assert 1 <= spoken(speculation, 1, 4) <= 3
    assert spoken(speculation, 0, 4) == 0


def test_nothing_is_drafted_where_rows_cost_what_steps_do() -> None:
    speculation = Speculation()
    for number in range(50):
        speculation.cost.note(1 + number % 3, 1.0 * (1 + number % 3))
    assert spoken(speculation, 8, 8) == 0


class Guessing:
    """A draft model that predicts only zeros. It needs `cost` seconds for each token, and first `behind` seconds to
    catch up."""

    def __init__(self, cost: float, behind: float = 0.0) -> None:
        self.cost, self.behind = cost, behind

    def propose(self, wishes: Iterable[Wish]) -> Drafts:
        return {seq.id: (0,) * limit for seq, limit in wishes}

    def seconds(self, num_sequences: int) -> float:
        return self.cost * num_sequences

    def seconds_behind(self, seq: Sequence) -> float:
        return self.behind

    def cut(self, seq: Sequence) -> None: ...

    def forget(self, seq: Sequence) -> None: ...

    def close(self) -> None: ...


def guessed(cost: float, num_right: int | None = None, num_sequences: int = 1) -> int:
    """Return the number of tokens requested from a draft model for each of some new sequences. A batch row costs one
    tenth of a step. For other sequences `num_right` of four tokens were accepted."""
    speculation = Speculation(None, Guessing(cost))
    for number in range(50):
        speculation.cost.note(1 + number % 3, 1.0 + 0.1 * (number % 3))
    others = make_sequence(99, [1, 2])
    others.drafts.source = others.drafts.modelled
    for _ in range(50 if num_right is not None else 0):
        speculation.guessing.learn(others, 4, num_right or 0)
    sequences = [make_sequence(number, [1, 2, 3]) for number in range(num_sequences)]
    drafts = speculation.draft(sequences, num_sequences, 64)
    assert len({len(tokens) for tokens in drafts.values()}) <= 1
    return len(drafts.get(0, ()))


def test_a_draft_model_is_asked_as_far_ahead_as_it_is_worth_its_time() -> None:
    assert guessed(0.0) >= 3  # it is tried before anything is known of it
    assert guessed(0.1, 4) > guessed(0.1, 3) > guessed(0.1, 1) >= 0
    assert guessed(0.1, 0) == 0
    assert guessed(2.0, 4) == 0  # slower than the model
    assert guessed(0.05, 4, 1) >= guessed(0.05, 4, 8) >= guessed(0.05, 4, 40) == 0


def chosen(cost: float, behind: float = 0.0, copied: int = 0, max_len: int = 4096) -> tuple[int, ...]:
    """Return the draft tokens of a text that repeats itself. A draft model takes `cost` seconds for each token and was
    right seven times in eight. Copies were right `copied` times in eight. A step takes one second, and a batch row a
    tenth of a second."""
    speculation = Speculation(None, Guessing(cost, behind))
    for number in range(50):
        speculation.cost.note(1 + number % 3, 1.0 + 0.1 * (number % 3))
    seq = make_sequence(0, [1, 2, 3] * 3, max_len=max_len)
    seq.draws.was_forked = True
    for _ in range(50):
        for source, num_right in ((seq.drafts.modelled, 7), (seq.drafts.copied, copied)):
            seq.drafts.source = source
            speculation.guessing.learn(seq, 8, num_right)
    return speculation.draft([seq], 1, 64).get(0, ())


def test_a_copy_is_taken_where_a_draft_model_is_right_more_often_but_takes_longer() -> None:
    assert chosen(0.4, copied=5)[:3] == (1, 2, 3)
    assert set(chosen(0.001, copied=5)) == {0}, "a draft model that costs nothing is asked"
    assert set(chosen(0.3, copied=1)) == {0}, "and one that costs less than wrong copies"


def test_a_draft_model_reads_a_prompt_only_if_that_is_repaid() -> None:
    assert set(chosen(0.2, behind=5.0)) == {0}
    assert chosen(0.2, behind=500.0) == ()
    assert chosen(0.2, behind=5.0, max_len=14) == (), "few tokens are left"


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8), data=st.data())
def test_a_drafted_token_is_counted_once_and_a_forced_one_never(sizes: list[int], data: st.DataObject) -> None:
    """The counts are right for any number of draft tokens that fit, and of predicted controller decisions."""
    num_drafts = data.draw(st.integers(1, sum(sizes)))
    ends = list(accumulate(sizes))
    ways: list[Branch] = []
    for size, end in zip(sizes, ends, strict=True):
        if end <= num_drafts:
            ways += [Branch(sample=False, splices=(Splice(0, (7,) * (size - 1)),))] * (size > 1)
            ways.append(Branch())
    known = data.draw(st.sampled_from([0, *(i + 1 for i, way in enumerate(ways) if way.sample)]))
    seq = make_sequence(1, [1, 2, 3])
    seq.drafts.sizes = tuple(sizes)
    item = Scheduled(seq, PlanRow(1, 2, 1), 0, 3, (7,) * num_drafts)
    expected = sum(end - size < num_drafts for size, end in zip(sizes, ends, strict=True))
    assert num_guessed(item, ways[:known]) == expected


@pytest.mark.parametrize("wanted", [AUTO_DRAFTS, 4, 32])
def test_a_number_of_drafts_is_the_most_once_costs_are_known(wanted: int) -> None:
    """Until costs are known, the request gets this number. Later it gets as many as pay: none after only rejections,
    and none in a full batch."""

    def drafted(num_sequences: int, num_right: int) -> int:
        sequences = [
            make_sequence(number, [1, 2, 3] * 3, speculate=wanted, seed=number) for number in range(num_sequences)
        ]
        for seq in sequences:
            seq.draws.was_forked = True
            for _ in range(40):
                speculation.guessing.learn(seq, 4, num_right)
        return sum(map(len, speculation.draft(sequences, num_sequences, 256).values()))

    speculation = Speculation()
    assert wanted == AUTO_DRAFTS or drafted(1, 0) == wanted
    for number in range(50):
        speculation.cost.note(1 + number % 3, 1.0 + 0.1 * (number % 3))  # a row costs a tenth of a step
    assert drafted(1, 4) >= 4
    assert drafted(1, 0) == 0
    for number in range(500):
        speculation.cost.note(20 + number % 3, 20.0 + number % 3)  # a row costs its share
    assert drafted(20, 4) == 0


@pytest.mark.parametrize("is_right", [True, False])
def test_copies_that_are_too_doubtful_are_watched_until_they_are_right(is_right: bool) -> None:
    """Copied tokens are compared to sampled tokens even if they are not worth a batch row, so repetition is detected at
    no cost."""
    speculation = Speculation()
    for number in range(50):
        speculation.cost.note(1 + number % 3, 1.0 + 0.8 * (number % 3))
    seq = make_sequence(0, [1, 2, 3] * 3, speculate=AUTO_DRAFTS, max_len=512)
    seq.draws.was_forked = True
    for _ in range(100):
        speculation.guessing.learn(seq, 4, 0)
    assert not speculation.draft([seq], 1, 64)
    drafted = 0
    for number in range(400):
        seq.tokens.append(1 + len(seq.tokens) % 3 if is_right else 4 + number)
        drafted += sum(map(len, speculation.draft([seq], 1, 64).values()))
    assert bool(drafted) == is_right


def test_tokens_that_follow_a_guess_cost_rows_where_they_are_cheap_without_it() -> None:
    step = BaseStep(seconds=1.0, row=0.1, other=0.02, num_sure=1, room=64)
    assert step.cost(1, 0.7) == pytest.approx(0.1)
    assert step.cost(5, 0.0) == pytest.approx(0.5)  # the guess is wrong: all of it is in vain
    assert step.cost(5, 1.0) == pytest.approx(0.5 - 4 * 0.02)  # the rest would be computed anyway, but without logits


@given(chance=st.floats(0.0, 1.0), row=st.floats(0.001, 2.0), num_sure=st.integers(1, 64), num_alike=st.integers(1, 64))
def test_the_more_are_alike_the_less_deep_is_guessed(chance: float, row: float, num_sure: int, num_alike: int) -> None:
    step = BaseStep(1.0, row, 0.0, num_sure, 64)
    depth = depth_worth(chance, row, step, min(num_alike, num_sure))
    assert 0 <= depth_worth(chance, row, step, num_sure) <= depth <= depth_worth(chance, row / 2, step, 1) <= 16
    assert bool(depth) == (chance > step.margin * row * num_sure)


def test_one_bad_moment_does_not_keep_a_draft_model_out_for_ever() -> None:
    cost = StepCost()
    cost.note(4, 9.0)
    was = cost.of_step(4)
    for _ in range(50):
        cost.fade()
    assert 0.0 < cost.of_step(4) < was / 2
    for _ in range(8):
        cost.note(4, 1.0)
    assert cost.of_step(4) == pytest.approx(1.0, rel=0.3)


def test_steps_of_rest_end_when_somebody_else_comes() -> None:
    speculation = Speculation()
    for number in range(50):
        speculation.cost.note(1 + number % 3, 1.0 + 0.5 * (number % 3))
    sequences = [make_sequence(number, [1, 2, 3] * 3, speculate=AUTO_DRAFTS) for number in range(4)]
    rests = []
    for _ in range(40):
        assert not speculation.draft(sequences, 4, 64)
        rests.append(speculation.rest.left)
    assert max(rests) == 8 and rests.count(0) < 15
    sequences[-1] = make_sequence(9, [1, 2, 3] * 3, speculate=AUTO_DRAFTS)
    sequences[-1].draws.was_forked = True
    assert not speculation.rest.goes_on(sequences)
    assert speculation.draft(sequences[-1:], 1, 64)


def test_a_text_that_says_nothing_is_asked_less_often_until_it_does() -> None:
    speculation = Speculation()
    seq = make_sequence(0, list(range(20)), speculate=AUTO_DRAFTS)
    seq.draws.was_forked = True
    rests = []
    for _ in range(20):
        assert not speculation.draft([seq], 1, 64)
        rests.append(speculation.rest.left)
    assert max(rests) == 3 and rests.count(0) <= 6
    seq.tokens.extend(range(3))
    assert any(speculation.draft([seq], 1, 64) for _ in range(4))


@given(
    own=st.lists(st.booleans(), max_size=40),
    others=st.lists(st.booleans(), max_size=40),
    num_sequences=st.integers(1, 64),
    least=st.floats(0.0, 1.0),
)
def test_what_others_guessed_counts_in_a_batch_alone(
    own: list[bool], others: list[bool], num_sequences: int, least: float
) -> None:
    mine, theirs = AcceptanceRate(), AcceptanceRate()
    for tally, guesses in ((mine, own), (theirs, others)):
        for is_right in guesses:
            tally.note(1, int(is_right))
    expected = max(theirs.chance, least)
    chance = mine.chance_among(theirs, least, num_sequences)
    assert mine.chance_among(theirs, least, 1) == pytest.approx(mine.chance_from(expected))
    assert 0.0 <= chance <= max(mine.chance_from(expected), expected) + 1e-9


def test_a_lucky_sequence_in_a_batch_gets_no_more_than_the_others() -> None:
    lucky, theirs = AcceptanceRate(), AcceptanceRate()
    for number in range(40):
        theirs.note(1, number % 2)
    for _ in range(4):
        lucky.note(1, 1)
    assert lucky.chance_among(theirs, 0.2, 1) > 0.8
    assert lucky.chance_among(theirs, 0.2, 16) < 0.6


@given(text=st.lists(st.integers(0, 50), min_size=12, max_size=40, unique=True), data=st.data())
def test_a_copy_goes_on_behind_what_was_changed(text: list[int], data: st.DataObject) -> None:
    """After a token was replaced, removed or inserted, the text after the next known token is drafted again."""
    place = data.draw(st.integers(2, len(text) - 5))
    how = data.draw(st.sampled_from(["changed", "lost", "added"]))
    written = {
        "changed": [*text[:place], 99],
        "lost": [*text[:place], *text[place + 1 : place + 2]],
        "added": [*text[:place], 99, text[place]],
    }[how]
    lookup = NgramIndex(text)
    assert lookup.draft(3) == tuple(text[:3])
    lookup.follow(written, 0, 4096)
    rest = text[place + 2 :] if how == "lost" else text[place + 1 :]
    assert lookup.draft(3) == tuple(rest[:3])


def test_a_copy_that_is_wrong_again_and_again_ends() -> None:
    lookup = NgramIndex(list(range(20)))
    lookup.follow([0, 1, 90, 91, 92], 0, 4096)
    assert lookup.draft(3) == ()
