"""Tests of steps that fail: the request that causes the failure ends with the reason, and others are not affected."""

from __future__ import annotations

import pytest

from bridle.engine.control.decision import Branch, Decision
from bridle.engine.scheduling.step_plan import StepPlan
from bridle.errors import BridleError, EngineClosed, InternalError, OutOfBlocks, ShardUnavailable
from bridle.outputs import FinishReason
from tests.engine.programs import always, script
from tests.engine.support import Lab, Output, check_against_reference, make_request

KEEPINGS = pytest.mark.parametrize("kv", ["paged", "sequences"])
KINDS = pytest.mark.parametrize("kind", ["faults", "sample_faults"])


def error_of(output: Output) -> BridleError | None:
    assert output.finished is not None
    return output.finished.error


@KEEPINGS
@KINDS
def test_a_passing_fault_costs_nobody_anything(kv: str, kind: str) -> None:
    lab = Lab(kv=kv, **{kind: {3: OutOfBlocks("hiccup")}})
    requests = [make_request((i, i + 1, i + 2), max_tokens=8, n=2) for i in range(3)]
    for request, got in zip(requests, lab.run(*requests), strict=True):
        check_against_reference(lab, request, got)
    assert lab.engine.statistics().num_failed_steps == 1


@KEEPINGS
@KINDS
@pytest.mark.parametrize("error", [BridleError("bad step"), ZeroDivisionError("our fault")])
def test_a_fault_of_a_lone_request_ends_it(kv: str, kind: str, error: Exception) -> None:
    lab = Lab(kv=kv, **{kind: {2: error}})
    got = lab.run_one(max_tokens=8)
    assert len(got.first.tokens) == 2
    reported = error_of(got.first)
    if isinstance(error, BridleError):
        assert reported is error
    else:
        assert isinstance(reported, InternalError)
        assert "our fault" in str(reported)
    lab.events.clear()
    after = make_request(max_tokens=8)
    check_against_reference(lab, after, lab.run(after)[0])


@KEEPINGS
def test_the_request_that_breaks_every_step_is_found(kv: str) -> None:
    """Token 31 cannot be computed. Only the request whose sequence gets this token ends."""
    lab = Lab(kv=kv)
    held: dict[int, set[int]] = {}

    def poison(plan: StepPlan) -> None:
        for row in plan.rows:
            held.setdefault(row.seq_id, set()).update(row.new_tokens)
            if 31 in held[row.seq_id]:
                raise BridleError("token 31 cannot be computed")

    lab.executor._on_forward = poison
    force = script(Decision.sample(), Decision.sample(), Decision.splice(0, (31,)))
    poisoned = make_request((9, 8, 7), controller=force, max_tokens=8)
    never = {31: float("-inf")}
    requests = [make_request((i, i + 1), max_tokens=12, n=2, logit_bias=never) for i in range(4)]
    got, *others = lab.run(poisoned, *requests)
    assert str(error_of(got.first)) == "token 31 cannot be computed"
    for request, other in zip(requests, others, strict=True):
        check_against_reference(lab, request, other)


@KEEPINGS
@KINDS
def test_forks_of_a_failed_step_never_were(kv: str, kind: str) -> None:
    program = script(Decision.sample(), Decision.fork([Branch(), Branch()]), Decision.fork([Branch(), Branch()]))
    lab = Lab(kv=kv, **{kind: {1: ShardUnavailable("gone"), 2: ShardUnavailable("gone"), 4: ShardUnavailable("gone")}})
    request = make_request(controller=program, n=2, max_tokens=7)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    assert len(got.outputs) == 2 * 4


@KEEPINGS
def test_a_device_that_stays_away_ends_the_requests_it_held(kv: str) -> None:
    lab = Lab(kv=kv, max_num_seqs=1, faults={number: ShardUnavailable("gone") for number in (2, 3, 4)})
    running, queued = make_request(max_tokens=5), make_request((4, 5), max_tokens=5)
    got, other = lab.run(running, queued)
    assert isinstance(error_of(got.first), ShardUnavailable)
    check_against_reference(lab, queued, other)


def test_a_stale_answer_is_our_bug_and_ends_the_request() -> None:
    lab = Lab()
    sample = lab.executor.sample

    def stale(batch):  # type: ignore[no-untyped-def]
        result = sample(batch)
        result.step -= 1
        return result

    lab.executor.sample = stale  # type: ignore[method-assign]
    got = lab.run_one(max_tokens=3)
    assert isinstance(error_of(got.first), InternalError)


def test_close_shuts_everything_down() -> None:
    lab = Lab()
    lab.engine.add(make_request(controller=always(Decision.sample())))
    lab.step()
    lab.engine.close()
    lab.engine.close()
    assert lab.executor.is_closed
    assert lab.pool.is_shut_down
    with pytest.raises(EngineClosed):
        lab.engine.add(make_request())


def test_cancel_ends_all_outputs_at_the_next_step() -> None:
    lab = Lab()
    request = make_request(controller=always(Decision.sample()), n=3, max_tokens=50)
    lab.engine.add(request)
    for _ in range(4):
        lab.step()
    lab.engine.cancel(request.id)
    lab.step()
    assert not lab.engine.has_work
    lab.check_empty()
    got = lab.drain()[request.id]
    assert [one.reason for one in got.outputs.values()] == [FinishReason.CANCELLED] * 3
    assert all(len(one.tokens) == 4 for one in got.outputs.values())
