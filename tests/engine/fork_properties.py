"""Properties of forks: they share KV blocks until one of them writes, need one prefill, and are limited in number."""

from __future__ import annotations

import pytest

from bridle.engine.control.decision import Branch, Decision, Splice
from bridle.engine.sequence import fork_key, root_key
from bridle.errors import ControllerError, InvalidRequest
from bridle.outputs import FinishReason, Forked
from tests.engine.programs import always, script
from tests.engine.support import Lab, check_against_reference, make_request
from tests.fakes.controller_runtime import View


@pytest.mark.parametrize("kv", ["paged", "sequences"])
@pytest.mark.parametrize("chunk", [3, 100])
def test_n_outputs_share_one_prefill(kv: str, chunk: int) -> None:
    lab = Lab(kv=kv, max_num_batched_tokens=chunk)
    request = make_request(range(10), n=4, max_tokens=5)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    assert lab.executor.num_computed_tokens == 10 + 4 * 4  # the last token of each is never computed
    assert len({tuple(one.tokens) for one in got.outputs.values()}) == 4


def test_n_outputs_are_announced_as_forks_of_the_first() -> None:
    lab = Lab()
    got = lab.run_one((1, 2, 3), n=3, max_tokens=2)
    forks = [event for event in lab.events if isinstance(event, Forked)]
    assert [(fork.index, fork.parent, fork.num_tokens, fork.text) for fork in forks] == [
        (1, 0, 0, ""),
        (2, 0, 0, ""),
    ]
    assert [one.usage.shared_tokens for one in got.outputs.values()] == [0, 3, 3]
    assert [one.usage.prompt_tokens for one in got.outputs.values()] == [3, 3, 3]


@pytest.mark.parametrize(("num_prompt", "num_copies"), [(8, 0), (9, 3), (11, 3)])
def test_a_fork_copies_nothing_until_someone_writes(num_prompt: int, num_copies: int) -> None:
    lab = Lab(num_blocks=32, block_size=4)
    lab.engine.add(make_request(range(num_prompt), n=4, max_tokens=4))
    free = lab.engine.statistics().num_free_blocks
    lab.step()
    statistics = lab.engine.statistics()
    assert statistics.num_running == 4
    assert statistics.num_copied_blocks == 0
    assert statistics.num_free_blocks == free - -(-num_prompt // 4)
    lab.step()
    assert lab.engine.statistics().num_copied_blocks == num_copies  # the last to write keeps the block
    lab.drain()


def test_branches_go_their_own_ways() -> None:
    ways = [
        Branch(),
        Branch(sample=False, splices=(Splice(0, (7, 8)),)),
        Branch(sample=False, splices=(Splice(2, (9,)),)),
    ]
    lab = Lab()
    request = make_request(
        (1, 2, 3), controller=script(Decision.sample(), Decision.sample(), Decision.fork(ways)), max_tokens=6
    )
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    first = got.first.tokens
    assert got.by_path[0,].tokens[:4] == [*first[:2], 7, 8]
    assert got.by_path[1,].tokens[:1] == [9]
    assert got.by_path[1,].usage.rewound_tokens == 2


def test_forks_of_forks() -> None:
    def program(view: View) -> Decision:
        return Decision.fork([Branch(), Branch()]) if len(view.tokens) < 6 else Decision.sample()

    lab = Lab(max_forks=64)
    request = make_request((1, 2, 3), controller=program, max_tokens=6)
    (got,) = lab.run(request)
    assert len(got.outputs) == 8
    check_against_reference(lab, request, got)
    assert lab.engine.statistics().num_forks == 7


def test_too_many_forks_end_the_branch_that_asks_for_them() -> None:
    lab = Lab(max_forks=5)
    bystander = make_request((4, 5), max_tokens=9)
    request = make_request((1, 2, 3), controller=always(Decision.fork([Branch(), Branch()])), max_tokens=9)
    got, other = lab.run(request, bystander)
    check_against_reference(lab, bystander, other)
    assert len(got.outputs) == 5
    for output in got.outputs.values():
        assert output.reason is FinishReason.ERROR
        assert output.finished is not None
        assert isinstance(output.finished.error, ControllerError)
        assert "at most 5" in str(output.finished.error)


def test_n_beyond_the_limit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="n is 6; at most 5"):
        Lab(max_forks=5).engine.add(make_request(n=6))


def test_forks_of_controlled_outputs_multiply_with_n() -> None:
    lab = Lab()
    request = make_request((1, 2), n=2, controller=script(Decision.fork([Branch(), Branch()])), max_tokens=3)
    (got,) = lab.run(request)
    assert len(got.outputs) == 4
    check_against_reference(lab, request, got)


def test_a_forced_start_is_shared_by_all_outputs() -> None:
    lab = Lab()
    request = make_request((1, 2), n=3, controller=script(Decision.splice(0, (5, 6))), max_tokens=4)
    (got,) = lab.run(request)
    check_against_reference(lab, request, got)
    assert [one.usage.forced_tokens for one in got.outputs.values()] == [2, 0, 0]
    assert all(one.tokens[:2] == [5, 6] for one in got.outputs.values())


def test_preempted_forks_come_back() -> None:
    lab = Lab(num_blocks=8, block_size=4, max_num_batched_tokens=9)
    requests = [make_request(range(i, i + 5), n=3, max_tokens=10) for i in range(3)]
    for request, got in zip(requests, lab.run(*requests), strict=True):
        check_against_reference(lab, request, got)
    assert lab.engine.statistics().num_preemptions > 0


def test_random_keys_of_all_forks_differ() -> None:
    """The random keys of all seeds, generations, fork numbers and branches differ, because equal keys would sample
    equal outputs."""
    roots = [root_key(seed) for seed in range(-20, 20)]
    ways = [(ordinal, branch) for ordinal in range(6) for branch in range(1, 6)]
    children = [fork_key(key, *way) for key in roots for way in ways]
    grandchildren = [fork_key(key, *way) for key in children for way in ways]
    keys = [*roots, *children, *grandchildren]
    assert len(set(keys)) == len(keys)
