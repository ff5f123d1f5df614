"""Tests of constraints in an engine: they stop, force tokens, fork and fail, and do not affect other requests."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import Future
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.engine import Request
from bridle.engine.control.decision import Decision, mask_allows
from bridle.engine.interfaces import Ask
from bridle.engine.spec_decode.proposers import NgramProposer
from bridle.errors import ControllerError, InvalidRequest
from bridle.outputs import FinishReason, TokenEvent
from bridle.structured_output import (
    Choice,
    Constraint,
    ConstraintLimits,
    ConstraintPool,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    Substring,
)
from bridle.structured_output.mask_workers import Workers
from bridle.structured_output.matcher import Matcher
from bridle.testing.logits import ScriptedModel
from bridle.testing.scripted import ScriptedExecutor
from tests.conftest import IS_FULL
from tests.structured_output.kit import EOS, Lab, Output, matcher, spell, text_vocabulary, vocabulary
from tests.waiting import PATIENCE

PERSON = JsonSchema(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["the yes", "no name"]},
            "size": {"type": "integer", "minimum": 10, "maximum": 99},
            "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["name", "size", "flags"],
        "additionalProperties": False,
    }
)
#: Its enums are masked token after token.
MASKED = JsonSchema(PERSON.schema, scored=False)


def text(lab: Lab, output: Output) -> str:
    return spell(lab.vocab, output.tokens)


def reason(output: Output) -> FinishReason:
    assert output.finished is not None
    return output.finished.reason


def test_outputs_fit_and_end_where_the_grammar_ends() -> None:
    with Lab(text_vocabulary()) as lab:
        phone, person, choice = (Regex("[0-9]{3}-[a-f]{2}"), PERSON, Choice(["yes", "no", "name"]))
        outputs = [
            each[0] for each in lab.run(*(lab.request(each, max_tokens=200) for each in (phone, person, choice)))
        ]
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", text(lab, outputs[0]))
        assert set(json.loads(text(lab, outputs[1]))) == {"name", "size", "flags"}
        assert text(lab, outputs[2]) in ("yes", "no", "name")
        assert {reason(output) for output in outputs} == {FinishReason.CONTROLLER}
        assert not any(output.logs for output in outputs)


def test_a_model_may_end_where_the_grammar_allows_it() -> None:
    with Lab(text_vocabulary(), next_token=lambda prefix: EOS) as lab:
        output = lab.run_one(Regex("(ab)*"))
        assert output.tokens == [EOS]
        assert reason(output) is FinishReason.STOP


def num_passes(lab: Lab) -> int:
    """Return the number of forward passes that computed any rows."""
    return sum(bool(plan.rows) for plan in lab.executor.plans)


def test_a_text_without_a_choice_needs_no_forward() -> None:
    with Lab(text_vocabulary(), record=True) as lab:
        output = lab.run_one(Regex("the name"))
        assert text(lab, output) == "the name"
        assert all(output.forced)
        assert reason(output) is FinishReason.CONTROLLER
        assert num_passes(lab) == 0
        empty = lab.run_one(Regex(""))
        assert empty.tokens == [] and reason(empty) is FinishReason.CONTROLLER
        assert num_passes(lab) == 1  # only its mask tells that nothing but the end is left


def test_a_forward_pass_is_spent_on_choices_only() -> None:
    with Lab(text_vocabulary(), record=True) as lab:
        output = lab.run_one(MASKED, max_tokens=200)
        num_sampled = output.forced.count(False)
        assert output.forced.count(True) > num_sampled
        assert num_passes(lab) == num_sampled


class OneByOne(Controller):
    """A controller that applies the same constraint, with one forced token per step."""

    def __init__(self, start: Matcher) -> None:
        self.matcher, self.queue = start, []

    def __deepcopy__(self, memo: object) -> OneByOne:
        return OneByOne(self.matcher.copy())

    def next(self, view: SequenceView) -> Decision:
        if view.generated:
            self.matcher.commit(view.new_tokens)
        if self.matcher.is_complete:
            return Decision.stop()
        self.queue = self.queue or list(self.matcher.forced())
        if self.queue:
            return Decision.splice(0, [self.queue.pop(0)])
        return Decision.sample(self.matcher.mask())


@pytest.mark.parametrize(
    "constraint",
    [MASKED, JsonObject(), Regex("the (yes|no)[0-9] name: [a-z]{1,5} end"), Substring("yes the name is abc 12 true")],
    ids=lambda each: type(each).__name__,
)
def test_fast_forward_changes_no_greedy_answer(constraint: Constraint) -> None:
    vocab = text_vocabulary()
    for seed in range(4 if IS_FULL else 2):
        with Lab(vocab, pools=[PythonControllerPool(vocab.size)], seed=seed) as lab:
            at_once, one_by_one = (
                lab.run_one(steering, max_tokens=80) for steering in (constraint, OneByOne(matcher(vocab, constraint)))
            )
            assert at_once.tokens == one_by_one.tokens
            assert at_once.forced == one_by_one.forced


def test_neighbours_are_not_changed() -> None:
    vocab = text_vocabulary()
    plain = [lambda lab, i=i: lab.request(None, (3, 4 + i), max_tokens=30, ignore_eos=True) for i in range(4)]
    with Lab(vocab) as lab:
        alone = [lab.run(make(lab))[0][0].tokens for make in plain]
    with Lab(vocab) as lab:
        steered = [lab.request(each, max_tokens=50) for each in (PERSON, JsonObject(), Regex("[a-z]{9}"), Regex("(a"))]
        outputs = lab.run(*(make(lab) for make in plain), *steered)
        assert [each[0].tokens for each in outputs[:4]] == alone


def test_every_output_of_a_request_has_a_constraint_of_its_own() -> None:
    with Lab(text_vocabulary()) as lab:
        outputs = lab.run(lab.request(PERSON, n=5, temperature=1.0, max_tokens=200))[0]
        texts = [text(lab, output) for output in outputs.values()]
        assert len(texts) == 5 and len(set(texts)) > 1
        assert all(set(json.loads(each)) == {"name", "size", "flags"} for each in texts)


def test_a_hopeless_grammar_ends_its_own_request_only() -> None:
    with Lab(text_vocabulary()) as lab:
        bad, good = lab.run(lab.request(Regex("(a")), lab.request(Regex("[0-9]{2}")))
        assert reason(bad[0]) is FinishReason.ERROR
        assert bad[0].finished is not None and isinstance(bad[0].finished.error, InvalidRequest)
        assert len(text(lab, good[0])) == 2


def test_a_dead_end_ends_with_an_explanation() -> None:
    with Lab(vocabulary("abx")) as lab:
        output = lab.run_one(Regex("[ab]x(c|d)"))
        assert reason(output) is FinishReason.ERROR
        assert output.finished is not None and isinstance(output.finished.error, ControllerError)
        assert "the grammar allows 'c'-'d'" in str(output.finished.error)


def test_a_cut_off_text_says_so() -> None:
    with Lab(text_vocabulary()) as lab:
        output = lab.run_one(Regex("[a-z]{50}"), max_tokens=5)
        assert reason(output) is FinishReason.LENGTH
        assert output.logs == "the output ended after 5 tokens, before its constraint was satisfied\n"


def test_cancelling_at_any_moment_leaves_nothing() -> None:
    with Lab(text_vocabulary()) as lab:
        for num_steps in range(6):
            request = lab.request(Regex("[a-z]{40}x*"), max_tokens=50)
            lab.engine.add(request)
            for _ in range(num_steps):
                lab.engine.step()
            lab.engine.cancel(request.id)
            list(lab.events())
        lab.run_one(Regex("[a-z]{40}x*"))  # by now every opening is done
        assert not lab.pool.opened
        assert not lab.pool.under_way


def test_more_grammars_than_are_kept() -> None:
    limits = ConstraintLimits(cache_entries=8)
    with Lab(text_vocabulary(), limits=limits) as lab:
        requests = [lab.request(Choice([f"yes{i}", f"no{i}"])) for i in range(40)]
        outputs = lab.run(*requests)
        assert [text(lab, each[0]) in (f"yes{i}", f"no{i}") for i, each in enumerate(outputs)] == [True] * 40
        assert lab.pool.compiler.num_cached == 8


@pytest.mark.slow
def test_a_thousand_grammars_stay_within_the_cache() -> None:
    with Lab(text_vocabulary()) as lab:
        for start in range(0, 1000, 50):
            lab.run(*(lab.request(Choice([f"yes{i}", f"no{i}"])) for i in range(start, start + 50)))
        assert lab.pool.compiler.num_cached <= ConstraintLimits().cache_entries
        assert lab.pool.compiler.cached_bytes <= ConstraintLimits().cache_bytes


# -- the pool alone --------------------------------------------------------------------------------------------


def soon() -> float:
    return time.monotonic() + PATIENCE


def opened(pool: ConstraintPool, lab_like: Lab, constraint: Constraint, seq_id: int) -> None:
    request = lab_like.request(constraint)
    assert pool.open(request).result() == request.prompt
    pool.ask([Ask(seq_id, request=request)])


def decision(pool: ConstraintPool, seq_id: int) -> Decision:
    answer = pool.collect([seq_id], soon())[seq_id]
    assert answer.decision is not None, answer.error
    return answer.decision


def test_rewinding_gives_the_same_masks_again() -> None:
    with Lab(text_vocabulary()) as lab:
        opened(lab.pool, lab, Regex("[a-c][d-f][g-i]"), 7)
        first = decision(lab.pool, 7)
        for tokens in (lab.vocab.encode(b"a"), lab.vocab.encode(b"c")):
            lab.pool.ask([Ask(7, tokens=tuple(tokens))])
            second = decision(lab.pool, 7)
            lab.pool.ask([Ask(7, tokens=tuple(lab.vocab.encode(b"e")))])
            assert decision(lab.pool, 7) != second
            lab.pool.ask([Ask(7, backtrack=1)])
            assert decision(lab.pool, 7) == second
            lab.pool.ask([Ask(7, backtrack=1)])
            assert decision(lab.pool, 7) == first
        lab.pool.ask([Ask(7, backtrack=1)])
        error = lab.pool.collect([7], soon())[7].error
        assert "1 tokens cannot be rolled back; the constraint has read 0" in str(error)
        lab.pool.close([7])


def test_a_fork_starts_where_its_parent_was() -> None:
    with Lab(text_vocabulary()) as lab:
        opened(lab.pool, lab, Choice(["xa1", "xb2"], scored=False), 1)
        lab.pool.collect([1], soon())
        forced = tuple(lab.vocab.encode(b"x"))
        lab.pool.ask([Ask(1, tokens=forced)])
        decision(lab.pool, 1)
        a, b = (tuple(lab.vocab.encode(each)) for each in (b"a", b"b"))
        lab.pool.ask([Ask(1, tokens=a), Ask(2, tokens=b, parent=1, branch=1)])
        assert decision(lab.pool, 1).branches[0].splices[0].ff_tokens == tuple(lab.vocab.encode(b"1"))
        lab.pool.close([1])
        lab.pool.ask([Ask(2, tokens=tuple(lab.vocab.encode(b"2")))])
        assert decision(lab.pool, 2).is_stop
        lab.pool.close([2])


def test_answers_are_given_once_and_only_of_the_living() -> None:
    with Lab(text_vocabulary()) as lab:
        opened(lab.pool, lab, Regex("[a-z]+"), 3)
        assert set(lab.pool.collect([3], soon())) == {3}
        assert not lab.pool.collect([3], None)
        lab.pool.ask([Ask(3, tokens=tuple(lab.vocab.encode(b"q")))])
        lab.pool.close([3])
        assert not lab.pool.collect([3], soon())


def test_a_slow_sequence_is_handled_on_the_threads() -> None:
    with Lab(text_vocabulary()) as lab:
        opened(lab.pool, lab, Lark('start: "a" /[b-z]/ "end"'), 4)
        lab.pool.collect([4], soon())
        lab.pool.live[4].is_slow = True
        lab.pool.ask([Ask(4, tokens=tuple(lab.vocab.encode(b"a")))])
        assert decision(lab.pool, 4).branches[0].mask
        lab.pool.ask([Ask(4, tokens=tuple(lab.vocab.encode(b"x")))])
        assert decision(lab.pool, 4).is_forced
        lab.pool.close([4])


def test_an_opening_that_was_cancelled_leaves_nothing() -> None:
    with Lab(text_vocabulary()) as lab:
        compiled: Future[Matcher] = Future()
        lab.pool.compiler.compile = lambda constraint: compiled  # type: ignore[method-assign]
        request = lab.request(Regex("a"))
        future = lab.pool.open(request)
        assert future.cancel()
        compiled.set_result(matcher(lab.vocab, Regex("a")))
        assert not lab.pool.opened
        kept = lab.pool.open(request)
        assert kept.result() == request.prompt and lab.pool.opened
        lab.pool.abandon(request)
        assert not lab.pool.opened


def test_workers_do_everything_and_end() -> None:
    workers, done, lock = Workers(3), [], threading.Lock()
    everything = threading.Event()

    def work(number: int) -> None:
        with lock:
            done.append(number)
            if len(done) == 100:
                everything.set()

    for start in range(0, 100, 10):
        workers.submit([lambda n=n: work(n) for n in range(start, start + 10)])
    assert everything.wait(PATIENCE)
    workers.close()
    workers.close()
    assert sorted(done) == list(range(100))
    assert not any(thread.is_alive() for thread in workers._threads)


# -- drafts --------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1 << 30), error_rate=st.sampled_from([0.0, 0.2, 1.0]), drafts=st.sampled_from([1, 3, 8, -1]))
@settings(deadline=None)
def test_drafts_under_a_constraint_change_nothing(seed: int, error_rate: float, drafts: int) -> None:
    """Tokens, logs and end reasons are unchanged by any predicted tokens, whether tokens are forced or sampled."""
    random = Random(seed)
    constraint = random.choice(
        [PERSON, ANSWERS, Regex("[a-f]{4,9}( [0-9]{3})*"), Choice(["yes", "no name"]), JsonObject()]
    )
    fields: dict[str, object] = {"temperature": random.choice([0.0, 1.0]), "seed": seed, "max_tokens": 24}
    fields["repetition_penalty"] = random.choice([1.0, 1.3])
    with Lab(text_vocabulary()) as lab:
        plain = lab.run_one(constraint, **fields)
        told = [token if random.random() >= error_rate else random.randrange(lab.vocab.size) for token in plain.tokens]
        drafted = lab.run_one(constraint, speculate=drafts, prediction_ids=tuple(told), **fields)
        neighbours = lab.run(
            *(lab.request(constraint, speculate=8, prediction_ids=tuple(told), **fields) for _ in range(3))
        )
    for output in (drafted, *(each[0] for each in neighbours)):
        assert (output.tokens, output.forced, output.logs) == (plain.tokens, plain.forced, plain.logs)
        assert reason(output) == reason(plain)


def test_right_predictions_take_fewer_steps_under_a_constraint() -> None:
    with Lab(text_vocabulary()) as lab:
        plain = lab.run_one(Regex("[a-f0-9]{24}"), max_tokens=40)
        num_plain = lab.executor.num_forwards
        drafted = lab.run_one(Regex("[a-f0-9]{24}"), max_tokens=40, speculate=8, prediction_ids=tuple(plain.tokens))
        assert drafted.tokens == plain.tokens
        assert lab.executor.num_forwards - num_plain < num_plain / 2
        assert drafted.finished is not None
        assert drafted.finished.usage.accepted_tokens > 10


ANSWERS = JsonSchema(
    {
        "type": "array",
        "minItems": 6,
        "maxItems": 6,
        "items": {
            "type": "object",
            "properties": {"first": {"enum": ["yes", "no"]}, "second": {"enum": ["old", "new"]}},
            "required": ["first", "second"],
            "additionalProperties": False,
        },
    },
    scored=False,
)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("num_known", [None, 1, 2, 3])
def test_drafts_go_on_across_forced_tokens(num_known: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced tokens follow every sampled token, so drafts that ended before them would save nothing."""
    real = ConstraintPool.lookahead
    monkeypatch.setattr(ConstraintPool, "lookahead", lambda *given: real(*given)[:num_known])
    with Lab(text_vocabulary()) as lab:
        plain = lab.run_one(ANSWERS, max_tokens=400)
        num_plain = lab.executor.num_forwards
        told = tuple(plain.tokens)
        drafted = lab.run_one(ANSWERS, max_tokens=400, speculate=8, prediction_ids=told)
        num_drafted = lab.executor.num_forwards - num_plain
        assert (drafted.tokens, drafted.forced, drafted.logs) == (plain.tokens, plain.forced, plain.logs)
        assert reason(drafted) == reason(plain)
        assert drafted.finished is not None
        usage = drafted.finished.usage
        assert usage.accepted_tokens <= usage.drafted_tokens
        if num_known is None:
            assert usage.drafted_tokens <= usage.sampled_tokens  # what is forced is no guess
            assert num_drafted < num_plain / 2
            assert usage.accepted_tokens > 4


def test_forced_tokens_are_drafted_in_the_place_of_wrong_guesses() -> None:
    """Predictions may lack forced tokens. A predicted token outside of the mask takes no batch row."""
    with Lab(text_vocabulary()) as lab:
        lab.engine.add(lab.request(ANSWERS, max_tokens=400, speculate=8))
        while not lab.pool.live:  # it is being compiled
            lab.engine.step()
        (seq_id,) = lab.pool.live
        instance = lab.pool.live[seq_id]
        lab.pool.collect([seq_id], time.monotonic() + 300)
        kept = instance.matcher.copy()
        kept.commit(kept.forced())
        mask = kept.mask()
        allowed = [token for token in range(lab.vocab.size) if mask_allows(mask, token)]
        wrong = next(token for token in range(lab.vocab.size) if not mask_allows(mask, token))
        instance.ahead = kept.copy()
        (part,), is_other = lab.pool.filter_draft(seq_id, [allowed[0], wrong])
        assert part[0] == allowed[0]
        assert len(part) > 1
        assert is_other
        instance.ahead = kept
        assert lab.pool.filter_draft(seq_id, [wrong, allowed[0]]) == ([], False)
        assert lab.pool.filter_draft(seq_id, [allowed[0]]) == ([], False)  # nothing is known behind what is wrong
        lab.engine.cancel(*lab.engine.request_ids)
        list(lab.events())


def answered(lab: Lab, request: Request) -> int:
    """Add the request, wait until its constraint is compiled and has answered, and return the id of its sequence."""
    lab.engine.add(request)
    while not lab.pool.live:
        lab.engine.step()
    (seq_id,) = lab.pool.live
    lab.pool.collect([seq_id], time.monotonic() + 300)
    return seq_id


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set long time limits, so that no work is left out on a slow machine."""
    for module in ("pool", "constrained_sequence"):
        monkeypatch.setattr(f"bridle.structured_output.{module}.SLOW_SECONDS", 60.0)
        monkeypatch.setattr(f"bridle.structured_output.{module}.SLOW_MASK_SECONDS", 60.0)


def draft_model(share: float, num_blocks: int = 1024) -> ScriptedExecutor:
    """Return a draft model that predicts like the model of a `Lab` after a `share` of all texts, and differs after
    others."""
    size = text_vocabulary().size
    right, wrong = ScriptedModel(size), ScriptedModel(size, seed=1)

    def guess(prefix: tuple[int, ...]) -> list[float]:
        model = right if Random(repr(prefix)).random() < share else wrong
        return [float(value) for value in model.row_after(prefix)]

    return ScriptedExecutor(size, num_blocks, 4, next_token=guess)


@given(
    seed=st.integers(0, 1 << 30),
    share=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    drafts=st.sampled_from([-1, 1, 3, 8]),
    num_blocks=st.sampled_from([3, 20, 1024]),
)
@settings(deadline=None, max_examples=settings().max_examples // 2)
def test_a_draft_model_under_a_constraint_changes_nothing(
    seed: int, share: float, drafts: int, num_blocks: int
) -> None:
    random = Random(seed)
    constraint = random.choice([PERSON, ANSWERS, Regex("[a-f]{4,9}( [0-9]{3})*"), Choice(["yes", "no name"])])
    fields: dict[str, object] = {"temperature": random.choice([0.0, 1.0]), "seed": seed, "max_tokens": 24}
    fields["repetition_penalty"] = random.choice([1.0, 1.3])
    fields["min_tokens"] = random.choice([0, 6])
    with Lab(text_vocabulary()) as lab:
        plain = lab.run_one(constraint, **fields)
    with Lab(text_vocabulary(), draft=draft_model(share, num_blocks)) as lab:
        drafted = lab.run(*(lab.request(constraint, speculate=drafts, **fields) for _ in range(3)))
    for output in (each[0] for each in drafted):
        assert (output.tokens, output.forced, output.logs) == (plain.tokens, plain.forced, plain.logs)
        assert reason(output) == reason(plain)


@pytest.mark.few(3)
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("constraint", [ANSWERS, Regex("[a-f0-9]{24}")])
def test_a_draft_model_draws_under_the_constraint(
    constraint: Constraint, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model that is always right is also right under a mask and across forced tokens. Without the mask, almost
    no draft token would be accepted. N-gram drafts are off, because they may be wrong and are preferred to a slow draft
    model."""
    monkeypatch.setattr(NgramProposer, "propose", lambda *given: {})
    fields: dict[str, object] = {"temperature": temperature, "max_tokens": 400}
    with Lab(text_vocabulary()) as lab:
        plain = lab.run_one(constraint, **fields)
        num_plain = lab.executor.num_forwards
    with Lab(text_vocabulary(), draft=draft_model(1.0)) as lab:
        drafted = lab.run_one(constraint, **fields, speculate=4)
        assert (drafted.tokens, drafted.forced, drafted.logs) == (plain.tokens, plain.forced, plain.logs)
        assert drafted.finished is not None
        usage = drafted.finished.usage
        assert usage.accepted_tokens == usage.drafted_tokens > 0
        assert lab.executor.num_forwards <= num_plain / 2


@pytest.mark.usefixtures("unhurried")
def test_a_draft_waits_for_the_thread_that_has_the_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without recent drafts, the mask of a sequence is computed in a thread, and draft tokens wait for it."""
    real, begin = Matcher.mask, threading.Event()

    def mask(held: Matcher) -> bytes:
        assert threading.current_thread() is threading.main_thread() or begin.wait(PATIENCE)
        return real(held)

    with Lab(text_vocabulary()) as lab:
        seq_id = answered(lab, lab.request(Regex("[a-f]{8}"), max_tokens=20))
        monkeypatch.setattr(Matcher, "mask", mask)
        lab.pool.ask([Ask(seq_id, (ord("a"),))])
        assert lab.pool.live[seq_id].ahead is None and seq_id in lab.pool.under_way
        threading.Timer(0.1, begin.set).start()
        found = lab.pool.draft_decision(seq_id, ())
        assert found == Decision.sample(real(lab.pool.live[seq_id].matcher))
        lab.engine.cancel(*lab.engine.request_ids)
        list(lab.events())


@pytest.mark.usefixtures("unhurried")
def test_what_is_guided_leaves_no_trace() -> None:
    with Lab(text_vocabulary()) as lab:
        seq_id = answered(lab, lab.request(Regex("[a-f]{8}"), max_tokens=20))
        instance = lab.pool.live[seq_id]
        instance.matcher = matcher(lab.vocab, Regex("[a-f]{3}xy[0-9]"))
        instance.forget_ahead()
        abc, digit = [ord(char) for char in "abc"], ord("7")
        first = lab.pool.draft_decision(seq_id, ())
        assert first == Decision.sample(instance.matcher.mask())
        forced = lab.pool.draft_decision(seq_id, abc)
        assert forced == Decision.splice(0, [ord("x"), ord("y")])
        last = lab.pool.draft_decision(seq_id, [*abc, ord("x"), ord("y")])
        assert last is not None
        assert last.is_draw
        assert lab.pool.draft_decision(seq_id, [*abc, ord("x"), ord("y"), digit]) == Decision.stop()
        assert lab.pool.draft_decision(seq_id, ()) == first
        parts, is_other = lab.pool.filter_draft(seq_id, abc)
        assert parts == [(abc[0],), (abc[1],), (abc[2], ord("x"), ord("y"))]
        assert is_other  # than the guess, which said nothing of them
        assert lab.pool.draft_decision(99, ()) is None
        lab.engine.cancel(*lab.engine.request_ids)
        list(lab.events())


@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_what_is_foreseen_in_part_is_enough(num_known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool may check only some draft tokens. The last right draft token is then computed again."""
    real = ConstraintPool.lookahead
    monkeypatch.setattr(ConstraintPool, "lookahead", lambda *given: real(*given)[:num_known])
    with Lab(text_vocabulary()) as lab:
        plain = lab.run_one(Regex("[a-f0-9]{24}"), max_tokens=40)
        request = lab.request(Regex("[a-f0-9]{24}"), max_tokens=40, speculate=8, prediction_ids=tuple(plain.tokens))
        lab.engine.add(request)
        tokens: list[int] = []
        num_idle = 0
        while lab.engine.has_work:
            events = lab.engine.step()
            tokens += [event.token for event in events if isinstance(event, TokenEvent)]
            num_idle = num_idle + 1 if tokens and not events else 0
            assert num_idle < 100_000, "the output does not go on"
        assert tokens == plain.tokens


def test_slow_masks_are_not_foreseen_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits while a pool checks draft tokens, so the pool stops after a limit of processor time."""
    seconds = iter(range(1_000_000))
    with Lab(text_vocabulary()) as lab:
        seq_id = answered(lab, lab.request(Regex("[a-f]{8}"), max_tokens=20))
        mask = lab.pool.live[seq_id].matcher.mask()
        likely = [token for token in range(lab.vocab.size) if mask_allows(mask, token)][:1] * 4
        monkeypatch.setattr("bridle.structured_output.pool.time", SimpleNamespace(thread_time=lambda: next(seconds)))
        assert len(lab.pool.lookahead(seq_id, likely)) == 1
        assert lab.pool.lookahead(seq_id, likely) == []
        monkeypatch.undo()
        lab.engine.cancel(*lab.engine.request_ids)
        list(lab.events())


def test_what_is_foreseen_leaves_no_trace() -> None:
    with Lab(text_vocabulary()) as lab:
        seq_id = answered(lab, lab.request(Regex("[a-f]{8}"), max_tokens=20))
        before = lab.pool.live[seq_id].matcher.mask()
        likely = [token for token in range(lab.vocab.size) if mask_allows(before, token)][:1] * 3
        foreseen = lab.pool.lookahead(seq_id, likely)
        assert [decision.is_draw for decision in foreseen] == [True] * 3
        assert lab.pool.lookahead(seq_id, likely) == foreseen
        assert lab.pool.lookahead(99, [5]) == []
        assert lab.pool.live[seq_id].matcher.mask() == before
        lab.engine.cancel(*lab.engine.request_ids)
        list(lab.events())
