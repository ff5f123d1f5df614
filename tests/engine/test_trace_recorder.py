"""Tests of traces of outputs: the contents of each record, and the size limits of a trace. `engine_properties` tests
that records add up to the output and change no output."""

from __future__ import annotations

import math

import pytest

from bridle.engine.control.decision import Branch, Decision, Splice, mask_of
from bridle.errors import ControllerError
from bridle.outputs import FinishReason, Traced
from bridle.testing.text import PieceDecoder
from bridle.traces import (
    NUM_CANDIDATES,
    ChunkRecord,
    EndRecord,
    ForkRecord,
    LogRecord,
    PromptRecord,
    Record,
    ReplacedRecord,
    RewindRecord,
    StoredRecord,
    TokenRecord,
    WaitRecord,
)
from bridle.traces.replay_text import rebuild_records
from tests.engine.programs import always, script
from tests.engine.support import Lab, Replay, make_request
from tests.fakes.controller_runtime import FakeController, Program, Reply

VOCAB = 8
PIECES = list("abcdefgh")


def counting(prefix: tuple[int, ...]) -> int:
    """Return the next token of a scripted model that counts: the token n is followed by n + 1."""
    return (prefix[-1] + 1) % VOCAB


def lab(**options: object) -> Lab:
    return Lab(vocab_size=VOCAB, next_token=counting, decoder=PieceDecoder(PIECES), **options)


def run(program: Program | None = None, **fields: object) -> Replay:
    controller = None if program is None else FakeController(program)
    return lab().run_one((1, 2, 3), controller=controller, trace=True, temperature=0.0, **fields)


def of_kind(replay: Replay, kind: type[Record]) -> list[Record]:
    return [record for record in replay.records if type(record) is kind]


def test_nothing_is_recorded_unless_it_was_asked_for() -> None:
    made = lab(record=True)
    made.run_one((1, 2, 3), max_tokens=3)
    assert not any(isinstance(event, Traced) for event in made.events)
    assert not any(row.num_traced for batch in made.executor.batches for row in batch.rows)


def test_a_trace_of_a_plain_output_has_all_its_records() -> None:
    replay = run(max_tokens=3)
    first, chunk, *tokens, end = sorted(replay.records, key=lambda record: (not isinstance(record, PromptRecord), 0))
    assert isinstance(first, PromptRecord)
    assert (first.tokens, first.texts, first.num_cached) == ([1, 2, 3], ["b", "c", "d"], 0)
    assert isinstance(chunk, ChunkRecord)
    assert (chunk.start, chunk.num_tokens, chunk.num_again) == (0, 3, 0)
    assert isinstance(end, EndRecord)
    assert (end.reason, end.usage["sampled_tokens"], end.num_cut) == ("length", 3, 0)
    for place, token in enumerate(tokens):
        assert isinstance(token, TokenRecord)
        assert (token.at, token.token, token.text, token.forced) == (place, 4 + place, PIECES[4 + place], False)
        assert (token.step, token.by) == (place + 1, None)
        assert token.cost is not None
        assert token.cost.num_rows == 1
        assert token.draw is not None
        assert token.draw.after is None
        assert len(token.draw.before.top) == NUM_CANDIDATES
        assert token.draw.before.texts[0] == PIECES[4 + place]
        assert token.draw.gap == pytest.approx(60.0)


def test_a_mask_says_what_it_took_away() -> None:
    replay = run(always(Decision.sample(mask_of([0, 1], VOCAB))), max_tokens=1)
    (token,) = of_kind(replay, TokenRecord)
    assert isinstance(token, TokenRecord)
    assert token.draw is not None
    assert token.draw.after is not None
    assert token.draw.num_allowed == 2
    assert token.draw.taken == pytest.approx(1.0)
    assert token.draw.before.texts[0] == "e"  # what the model wanted
    assert token.draw.after.texts == ("a", "b")
    assert token.draw.after.logprob == pytest.approx(-math.log(2))


def test_forced_tokens_name_the_controller() -> None:
    replay = run(script(Decision.splice(0, (6, 7))), max_tokens=3)
    first, second, third = of_kind(replay, TokenRecord)
    assert isinstance(first, TokenRecord)
    assert isinstance(second, TokenRecord)
    assert isinstance(third, TokenRecord)
    assert [each.forced for each in (first, second, third)] == [True, True, False]
    assert [each.by for each in (first, second, third)] == ["fake_controller", "fake_controller", None]
    assert first.draw is None
    assert third.draw is not None


def test_biases_are_told() -> None:
    replay = run(always(Decision.sample(bias=[(2, 1.5), (3, -math.inf)])), max_tokens=1)
    (token,) = of_kind(replay, TokenRecord)
    assert isinstance(token, TokenRecord)
    assert (token.biases, token.num_biases) == (((2, 1.5), (3, None)), 2)
    assert token.draw is not None
    assert token.draw.num_allowed == VOCAB - 1


def test_nothing_is_recorded_of_an_output_whose_controller_fails_while_it_is_computed() -> None:
    """The controller fails between the forward pass and sampling, and the trace does not include the costs of this
    step."""
    late = Reply(error=ControllerError("broken"), delay=0.01)
    failing, beside = make_request(controller=FakeController(lambda view: late), trace=True), make_request(trace=True)
    replay, _ = lab().run(failing, beside)
    assert replay.first.reason is FinishReason.ERROR
    assert not of_kind(replay, ChunkRecord)
    assert isinstance(replay.records[-1], EndRecord)


def test_what_is_taken_back_is_told() -> None:
    replay = run(script(Decision.sample(), Decision.sample(), Decision.splice(2, (0,))), max_tokens=3)
    (rewind,) = of_kind(replay, RewindRecord)
    assert isinstance(rewind, RewindRecord)
    assert (rewind.num_tokens, rewind.num_chars, rewind.num_prompt, rewind.by) == (2, 2, 0, "fake_controller")


def test_a_rewind_into_the_prompt_says_so() -> None:
    replay = run(script(Decision.splice(2, (5,))), max_tokens=2)
    (rewind,) = of_kind(replay, RewindRecord)
    assert isinstance(rewind, RewindRecord)
    assert (rewind.num_tokens, rewind.num_prompt) == (0, 2)


def test_a_replaced_draw_is_told() -> None:
    replay = run(script(Decision.sample(splices=[Splice(1, (0, 1))])), max_tokens=3)
    (replaced,) = of_kind(replay, ReplacedRecord)
    assert isinstance(replaced, ReplacedRecord)
    assert (replaced.token, replaced.spelled) == (4, "e")
    assert replaced.draw is not None
    assert [token.token for token in of_kind(replay, TokenRecord) if isinstance(token, TokenRecord)][:2] == [0, 1]


def test_forks_name_their_parents() -> None:
    branches = [Branch(mask=mask_of([token], VOCAB)) for token in (0, 1, 2)]
    replay = run(script(Decision.sample(), Decision.fork(branches)), max_tokens=3)
    forks = of_kind(replay, ForkRecord)
    assert [(fork.output, fork.parent, fork.num_tokens) for fork in forks if isinstance(fork, ForkRecord)] == [
        (1, 0, 1),
        (2, 0, 1),
    ]
    assert {index: output.token_ids[:2] for index, output in rebuild_records(replay.records).items()} == {
        0: [4, 0],
        1: [4, 1],
        2: [4, 2],
    }
    assert len(of_kind(replay, EndRecord)) == 3


def test_choices_are_forks() -> None:
    replay = run(n=2, max_tokens=2, seed=1)
    assert [(fork.output, fork.parent) for fork in of_kind(replay, ForkRecord) if isinstance(fork, ForkRecord)] == [
        (1, 0)
    ]


def test_waits_are_told_with_what_they_waited_for() -> None:
    replay = run(script(Decision.wait((("x", 0),)), Decision.sample(), Decision.wait(), Decision.wait()), max_tokens=2)
    first, second = of_kind(replay, WaitRecord)
    assert isinstance(first, WaitRecord)
    assert isinstance(second, WaitRecord)
    assert (first.late, first.variables, first.num_steps) == (False, ("x",), 1)
    assert (second.late, second.variables, second.num_steps) == (False, (), 2)


def test_a_late_controller_is_told() -> None:
    made = lab(step_timeout=0.01, device_time=lambda plan: 0.01)
    late = FakeController(lambda view: Reply(Decision.sample(), delay=0.5))
    replay = made.run_one((1, 2, 3), controller=late, trace=True, max_tokens=1)
    (wait,) = of_kind(replay, WaitRecord)
    assert isinstance(wait, WaitRecord)
    assert wait.late
    (token,) = of_kind(replay, TokenRecord)
    assert isinstance(token, TokenRecord)
    assert token.answer == pytest.approx(0.5, abs=0.05)


def test_logs_and_variables_are_told() -> None:
    def speaks(view: object) -> Reply:
        return Reply(Decision.sample(), log="hello", stored=(("x", b"1", False),))

    replay = run(speaks, max_tokens=1)
    said, wrote = of_kind(replay, LogRecord), of_kind(replay, StoredRecord)
    assert [each.text for each in said if isinstance(each, LogRecord)][:1] == ["hello"]
    assert [(each.name, each.value) for each in wrote if isinstance(each, StoredRecord)][:1] == [("x", b"1")]


def test_what_is_computed_again_is_told() -> None:
    made = lab(num_blocks=6, block_size=4, max_num_seqs=2, enable_prefix_caching=False)
    requests = [make_request((1, 2, 3), max_tokens=13, trace=True) for _ in range(2)]
    replays = made.run(*requests)
    assert made.engine.statistics().num_preemptions > 0
    chunks = [chunk for replay in replays for chunk in of_kind(replay, ChunkRecord) if isinstance(chunk, ChunkRecord)]
    assert sum(chunk.num_again for chunk in chunks) > 0
    for replay in replays:
        assert rebuild_records(replay.records)[0].token_ids == replay.first.tokens


def test_records_are_bounded_and_the_missing_ones_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.engine.sequence_state.TraceBudget.__init__.__defaults__", (4, 3, 0, 0))
    replay = lab().run_one((1, 2, 3), trace=True, max_tokens=9)
    *records, end = replay.records
    assert len(records) == 4
    assert isinstance(end, EndRecord)
    assert end.num_cut == 9 + 2 - 4


def test_records_of_all_live_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.traces.MAX_LIVE_RECORDS", 12)
    made = lab()
    replays = made.run(*[make_request((1, 2, 3), trace=True, max_tokens=9) for _ in range(3)])
    ends = [replay.records[-1] for replay in replays]
    cuts = [end.num_cut for end in ends if isinstance(end, EndRecord)]
    assert sum(len(replay.records) for replay in replays) + sum(cuts) == 3 * 12
    assert all(cuts)
    assert len(made.run_one((1, 2, 3), trace=True, max_tokens=9).records) == 12  # the room was given back


def test_what_controllers_say_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.engine.sequence_state.TraceBudget.__init__.__defaults__", (100, 8, 0, 0))
    replay = run(lambda view: Reply(Decision.sample(), log="hello"), max_tokens=4)
    assert len(of_kind(replay, LogRecord)) == 1
    (end,) = of_kind(replay, EndRecord)
    assert isinstance(end, EndRecord)
    assert end.num_cut >= 3


def test_a_draft_that_was_drawn_is_marked() -> None:
    replay = run(max_tokens=20, speculate=4)
    tokens = [token for token in of_kind(replay, TokenRecord) if isinstance(token, TokenRecord)]
    assert any(token.drafted for token in tokens)
    assert all(token.draw is not None for token in tokens)
