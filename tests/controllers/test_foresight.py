"""Tests of pure Python controllers, copies of which decide before a step's tokens are known. These copies must change
neither tokens nor logs of a controller."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import ClassVar

import pytest
from hypothesis import example, given

from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.engine.control.decision import Decision
from bridle.engine.interfaces import StoredValue
from bridle.sampling import AUTO_DRAFTS
from tests.engine.programs import VOCAB, RandomProgram
from tests.engine.random_labs import SEED, DraftedLab, guess, random_draft, random_lab, random_request, run_staggered
from tests.engine.support import Lab, Output, check_against_reference, check_output, make_request
from tests.fakes.controller_runtime import Reply, View


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits above which copies of a slow controller do not decide in advance."""
    monkeypatch.setattr("bridle.controllers.pool.SLOW_SECONDS", 60.0)
    monkeypatch.setattr("bridle.controllers.pool.ENOUGH_SECONDS", 60.0)


class Programmed(Controller):
    """A pure Python controller that runs a random program. The reference engine calls the object itself as the
    program."""

    is_pure = True

    def __init__(self, program: RandomProgram) -> None:
        self.program = program
        self.path: tuple[tuple[int, int], ...] = ()
        self.num_asks = -1

    def __call__(self, view: View) -> Reply:
        return self.program(view)

    def next(self, view: SequenceView) -> Decision:
        self.num_asks += 1
        reply = self.program(
            View(tuple(view.tokens), view.num_prompt, view.sampled, self.path, self.num_asks, view.candidates)
        )
        if reply.log:
            view._logs.append(reply.log)
        assert reply.decision is not None
        return reply.decision

    def fork(self, branch: int) -> Controller:
        child = super().fork(branch)
        assert isinstance(child, Programmed)
        child.path = (*self.path, (self.num_asks, branch))
        return child


@example(seed=138)  # ends by an answer that was foreseen
@given(seed=SEED)
def test_random_programs_are_drafted_for_and_nothing_changes(seed: int) -> None:
    random = Random(seed)
    pool = PythonControllerPool(VOCAB)
    lab = random_lab(random, random.choice(["paged", "sequences"]), pools=[pool])
    requests = []
    for number in range(random.randint(1, 5)):
        program = RandomProgram(random.randrange(1 << 30), verbs=random.choice(["s", "ssmb", "sssmbfnkrxwt"]))
        request = random_request(
            random,
            controller=Programmed(program),
            seed=number,
            max_tokens=14,
            speculate=random.choice([AUTO_DRAFTS, 2, 8]),
        )
        longest = max((one.tokens for one in lab.reference(request).values()), key=len)
        sampling = request.sampling.with_(prediction_ids=guess(random, longest))
        requests.append(replace(request, sampling=sampling))
    replays = run_staggered(lab, requests, random)
    for request in requests:
        check_against_reference(lab, request, replays[request.id])
    assert pool.is_empty


@given(seed=SEED)
def test_random_programs_under_a_draft_model_change_nothing(seed: int) -> None:
    """Draft tokens obey the masks, biases and parameters that copies of the controllers decide in advance."""
    random = Random(seed)
    pool = PythonControllerPool(VOCAB)
    share, draft = random.choice([1.0, 0.8, 0.0]), random_draft(random)
    make = partial(DraftedLab, share=share, draft=draft)
    lab = random_lab(random, random.choice(["paged", "sequences"]), make=make, pools=[pool])
    requests = []
    for number in range(random.randint(1, 5)):
        program = RandomProgram(random.randrange(1 << 30), verbs=random.choice(["s", "ssmb", "sssmbfnkrxwt"]))
        speculate = random.choice([AUTO_DRAFTS, None, 2, 8])
        controller = Programmed(program)
        requests.append(random_request(random, controller=controller, seed=number, max_tokens=14, speculate=speculate))
    replays = run_staggered(lab, requests, random)
    for request in requests:
        check_against_reference(lab, request, replays[request.id])
    assert pool.is_empty


class Counting(Controller):
    """A controller that logs each call's view and stores the number of calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def next(self, view: SequenceView) -> Decision:
        self.num_calls += 1
        view.log(f"{self.num_calls}: {view.new_tokens} {view.sampled} of {len(view.tokens)}")
        view.store("calls", b"%d" % self.num_calls)
        return Decision.sample(mask=view.mask_of(range(self.num_calls % 3, 32, 2)))

    def finish(self, view: SequenceView) -> None:
        view.log(f"ends after {self.num_calls}, {view.new_tokens}")


class Pure(Counting):
    is_pure = True


def run(
    controller: Controller, prediction: tuple[int, ...] = ()
) -> tuple[list[int], list[tuple[int, str]], list[tuple[str, bytes]], Lab]:
    lab = Lab(pools=[PythonControllerPool(32)])
    request = make_request(
        (1, 2), controller=controller, seed=3, max_tokens=9, ignore_eos=True, speculate=4, prediction_ids=prediction
    )
    output = lab.run(request)[0].first
    return output.tokens, output.said, output.stored, lab


@pytest.mark.parametrize("num_wrong", [0, 1, 9])
def test_copies_whose_tokens_are_drawn_take_their_controllers_place(num_wrong: int) -> None:
    tokens, logs, stored, plain = run(Counting())
    wrong = tuple((token + 1) % 32 for token in tokens[:num_wrong])
    drafted = run(Pure(), (*wrong, *tokens[num_wrong:]))
    assert drafted[:3] == (tokens, logs, stored)
    assert [value for _, value in stored] == [b"%d" % number for number in range(1, 10)]
    steps = drafted[3].executor.num_forwards
    assert steps == 3 if num_wrong == 0 else steps <= plain.executor.num_forwards


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_draws_under_the_masks_of_copies(temperature: float) -> None:
    """A draft model that always predicts right also does so under a controller's masks, so a step gives five tokens."""
    fields = {"seed": 3, "max_tokens": 16, "ignore_eos": True, "temperature": temperature}
    plain = Lab(pools=[PythonControllerPool(32)]).run_one((1, 2), controller=Counting(), **fields).first
    lab = DraftedLab(pools=[PythonControllerPool(32)])
    output = lab.run_one((1, 2), controller=Pure(), speculate=4, **fields).first
    assert (output.tokens, output.said, output.stored) == (plain.tokens, plain.said, plain.stored)
    assert (output.usage.drafted_tokens, output.usage.accepted_tokens) == (12, 12)
    assert lab.executor.num_forwards == 4


def test_copies_are_told_once_while_a_draft_is_made_and_verified() -> None:
    class Told(Pure):
        calls: ClassVar[list[int]] = []  # of all copies

        def next(self, view: SequenceView) -> Decision:
            self.calls.append(len(view.tokens))
            return super().next(view)

    lab = DraftedLab(pools=[PythonControllerPool(32)])
    lab.run_one((1, 2), controller=Told(), speculate=4, seed=3, max_tokens=16, ignore_eos=True)
    assert Told.calls == list(range(2, 2 + 16))


def test_an_answer_against_the_rules_ends_its_output_and_no_draft_model() -> None:
    class Wrong(Pure):
        def next(self, view: SequenceView) -> Decision:
            decision = super().next(view)
            return decision if self.num_calls < 3 else Decision.sample(mask=b"short")

    lab = DraftedLab(pools=[PythonControllerPool(32)])
    request = make_request((1, 2), controller=Wrong(), seed=3, max_tokens=9, ignore_eos=True, speculate=4)
    other = make_request((5, 6), seed=3, max_tokens=9, ignore_eos=True, speculate=4)
    output, free = (replay.first for replay in lab.run(request, other))
    assert output.finished is not None
    assert "the mask has 5 bytes" in str(output.finished.error)
    assert len(output.tokens) == 2
    check_output(free, lab.reference(other)[()], other)
    assert lab.drafter._num_failures == 0


def test_controllers_that_do_not_say_they_are_pure_are_not_drafted_for() -> None:
    tokens, _, _, lab = run(Counting())
    _, _, _, again = run(Counting(), tuple(tokens))
    assert again.executor.num_forwards == lab.executor.num_forwards == 9
    assert again.engine.statistics().num_drafted_tokens == 0


def test_a_controller_that_cannot_be_copied_any_more_goes_on_without_drafts() -> None:
    class Sticky(Pure):
        def next(self, view: SequenceView) -> Decision:
            self.held = (number for number in range(3))  # nothing copies a generator
            return super().next(view)

    tokens, logs, _, _ = run(Counting())
    assert run(Sticky(), tuple(tokens))[:2] == (tokens, logs)


def test_an_error_ahead_is_told_when_its_token_is_drawn() -> None:
    class Broken(Pure):
        def next(self, view: SequenceView) -> Decision:
            if self.num_calls == 3:
                raise ValueError("enough")
            return super().next(view)

    tokens, _, _, _ = run(Counting())
    lab = Lab(pools=[PythonControllerPool(32)])
    request = make_request(
        (1, 2), controller=Broken(), seed=3, max_tokens=9, ignore_eos=True, speculate=4, prediction_ids=tuple(tokens)
    )
    output = lab.run(request)[0].first
    assert output.tokens == tokens[:3]
    assert output.finished is not None
    assert "enough" in str(output.finished.error)
    assert output.stored == [StoredValue("calls", b"1")[:2], ("calls", b"2"), ("calls", b"3")]


class Proposing(Controller):
    """A controller that proposes the rest of one text as draft tokens at every step."""

    is_pure = True

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample(draft=self.text[len(view.generated) :])


def propose(text: list[int], **fields: object) -> tuple[Lab, Output]:
    lab = Lab(pools=[PythonControllerPool(32)])
    request = make_request((1, 2), controller=Proposing(text), seed=3, max_tokens=13, ignore_eos=True, **fields)
    return lab, lab.run(request)[0].first


def test_what_a_controller_proposes_is_drafted() -> None:
    truth = Lab().run_one((1, 2), seed=3, max_tokens=13, ignore_eos=True).first.tokens
    for text, speculate, most in ((truth, None, 6), (truth, 4, 4), (truth, 0, 13), ([], None, 13)):
        lab, output = propose(text, speculate=speculate)
        assert output.tokens == truth
        assert lab.executor.num_forwards <= most
        assert (output.usage.accepted_tokens > 0) is (most < 13)
    _, output = propose([(token + 1) % 32 for token in truth])
    assert output.tokens == truth


class Once(Controller):
    """A controller that proposes draft tokens only with its first answer."""

    is_pure = True

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample(draft=() if view.generated else self.text)


def test_a_proposal_holds_as_long_as_it_comes_true() -> None:
    truth = Lab().run_one((1, 2), seed=3, max_tokens=13, ignore_eos=True).first.tokens
    wrong = (truth[5] + 1) % 32
    for text, num_right in ((truth, 12), ([*truth[:5], wrong, *truth[6:]], 5)):
        lab = Lab(pools=[PythonControllerPool(32)])
        request = make_request((1, 2), controller=Once(text), seed=3, max_tokens=13, ignore_eos=True, speculate=3)
        output = lab.run(request)[0].first
        assert output.tokens == truth
        assert output.usage.accepted_tokens >= num_right - 3  # each step draws one that needs no draft
        assert lab.executor.num_forwards < 13 - output.usage.accepted_tokens + 2


@given(seed=SEED)
def test_proposals_of_random_programs_change_nothing(seed: int) -> None:
    """Proposed tokens do not change random programs with forks, rewinds, forced tokens, stops, waits and preemption."""
    random = Random(seed)
    pool = PythonControllerPool(VOCAB)
    lab = random_lab(random, random.choice(["paged", "sequences"]), pools=[pool])
    requests = []
    for number in range(random.randint(1, 4)):
        program = RandomProgram(random.randrange(1 << 30), verbs=random.choice(["s", "ssmb", "sssmbfnkrxwt"]))
        request = random_request(random, controller=Programmed(program), seed=number, max_tokens=14)
        longest = max((one.tokens for one in lab.reference(request).values()), key=len)
        sampling = request.sampling.with_(speculate=random.choice([None, AUTO_DRAFTS, 2, 8]))
        controller = Wishful(program, longest, random.randrange(1 << 30))
        requests.append(replace(request, controller=controller, sampling=sampling))
    replays = run_staggered(lab, requests, random)
    for request in requests:
        check_against_reference(lab, request, replays[request.id])


class Wishful(Programmed):
    """A random program that sometimes proposes draft tokens, most of which are right."""

    def __init__(self, program: RandomProgram, truth: list[int], seed: int) -> None:
        super().__init__(program)
        self.truth, self.seed = truth, seed

    def next(self, view: SequenceView) -> Decision:
        decision = super().next(view)
        random = Random(f"{self.seed} {len(view.tokens)}")
        if not decision.is_draw or len(decision.branches) > 1 or random.random() < 0.5:
            return decision
        draft = guess(random, self.truth[len(view.tokens) - view.num_prompt :])
        return replace(decision, branches=(replace(decision.branches[0], draft=draft),))


def test_a_proposal_that_is_too_long_ends_the_output_with_its_reason() -> None:
    _, output = propose([1] * 4097, speculate=4)
    assert output.finished is not None
    assert "draft has 4097 tokens; at most 4096" in str(output.finished.error)


def test_a_proposal_outside_the_vocabulary_ends_the_output_with_its_reason() -> None:
    lab, output = propose([1, 99], speculate=4)
    assert output.finished is not None
    assert "draft has token 99" in str(output.finished.error)
    assert lab.engine.statistics().num_failed_steps == 0
