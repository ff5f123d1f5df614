"""Tests of plain Python controllers on a real engine: the interface `Controller`, and no leaked resources."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.controllers.composite_pool import with_composed
from bridle.engine.control.decision import Branch, Decision
from bridle.errors import ControllerError
from bridle.outputs import FinishReason
from tests.engine.support import Lab, check_against_reference, make_request


def python_lab(**options: object) -> tuple[Lab, PythonControllerPool]:
    pool = PythonControllerPool(32)
    return Lab(pools=[pool], **options), pool


def test_what_a_controller_sees() -> None:
    seen: list[tuple[object, ...]] = []
    decisions = [Decision.sample(), Decision.splice(1, (7, 8)), Decision.splice(3, (6,))]

    class Steps(Controller):
        def next(self, view: SequenceView) -> Decision:
            news = view.new_tokens, view.num_rewound, view.sampled
            seen.append((list(view.tokens), view.num_prompt, *news))
            return decisions[len(seen) - 1]

        def finish(self, view: SequenceView) -> None:
            view.log(f"ends with {view.generated}")

    lab, pool = python_lab(eos_token_ids=(6,))
    got = lab.run_one((1, 2), controller=Steps(), temperature=0.0, max_tokens=5)
    first = int(lab.executor.model.row_after((1, 2)).argmax())
    assert seen == [
        ([1, 2], 2, (1, 2), 0, None),
        ([1, 2, first], 2, (first,), 0, first),
        ([1, 2, 7, 8], 2, (7, 8), 1, None),
    ]
    assert got.first.tokens == [6]
    assert got.first.logs == "ends with [6]\n"
    assert pool.is_empty


def test_one_object_steers_many_requests() -> None:
    class Counting(Controller):
        calls = 0

        def next(self, view: SequenceView) -> Decision:
            self.calls += 1
            return Decision.splice(0, (self.calls,))

    lab, pool = python_lab()
    controller = Counting()
    replays = lab.run(*(make_request((5,), controller=controller, max_tokens=4) for _ in range(3)))
    assert [got.first.tokens for got in replays] == [[1, 2, 3, 4]] * 3
    assert pool.is_empty


def test_forks_copy_the_controller() -> None:
    class Forking(Controller):
        name = "root"

        def next(self, view: SequenceView) -> Decision:
            if len(view.tokens) == 2:
                return Decision.fork([Branch(), Branch(), Branch()])
            view.log(self.name)
            return Decision.sample()

        def fork(self, branch: int) -> Controller:
            child = super().fork(branch)
            child.name = f"{self.name}.{branch}"  # type: ignore[attr-defined]
            return child

    lab, pool = python_lab()
    got = lab.run_one((1, 2), controller=Forking(), max_tokens=3)
    assert [one.logs for one in got.outputs.values()] == ["root\n" * 2, "root.1\n" * 2, "root.2\n" * 2]
    assert pool.is_empty


def test_start_may_rewrite_the_prompt() -> None:
    class Rewriting(Controller):
        def start(self, prompt: tuple[int, ...]) -> list[int]:
            return [*prompt, 9]

        def next(self, view: SequenceView) -> Decision:
            view.store("prompt", bytes(view.tokens))
            return Decision.stop("seen")

    lab, pool = python_lab()
    got = lab.run_one((1, 2), controller=Rewriting())
    assert got.first.stored == [("prompt", bytes([1, 2, 9]))]
    assert got.first.reason is FinishReason.CONTROLLER
    assert pool.is_empty


class Failing(Controller):
    def __init__(self, where: str) -> None:
        self.where = where

    def maybe(self, where: str) -> None:
        if where == self.where:
            raise LookupError(f"failed in {where}")

    def start(self, prompt: tuple[int, ...]) -> None:
        self.maybe("start")

    def next(self, view: SequenceView) -> Decision:
        self.maybe("next")
        return Decision.fork([Branch(), Branch()]) if len(view.tokens) == 4 else Decision.sample()

    def fork(self, branch: int) -> Controller:
        self.maybe("fork")
        return super().fork(branch)

    def finish(self, view: SequenceView) -> None:
        self.maybe("finish")


@pytest.mark.parametrize(
    ("where", "reasons"),
    [
        ("start", ["error"]),
        ("next", ["error"]),
        ("fork", ["length", "error"]),
        ("finish", ["length", "length"]),
        ("nowhere", ["length", "length"]),
    ],
)
def test_exceptions_end_their_own_output(where: str, reasons: list[str]) -> None:
    lab, pool = python_lab()
    bystander = make_request((4, 5), max_tokens=6)
    got, other = lab.run(make_request((1, 2, 3), controller=Failing(where), max_tokens=4), bystander)
    check_against_reference(lab, bystander, other)
    assert [one.reason.value for one in got.outputs.values()] == reasons
    failed = [one.finished.error for one in got.outputs.values() if one.finished and one.finished.error]
    assert all(isinstance(error, ControllerError) and f"failed in {where}" in str(error) for error in failed)
    assert pool.is_empty


def test_an_answer_that_is_no_decision() -> None:
    class Wrong(Controller):
        def next(self, view: SequenceView) -> Decision:
            return None  # type: ignore[return-value]

    lab, pool = python_lab()
    got = lab.run_one(controller=Wrong())
    assert got.first.finished is not None
    assert "must return a Decision" in str(got.first.finished.error)
    assert pool.is_empty


@pytest.mark.parametrize("prompt", [(), (99,), (1,) * 10_000])
def test_a_refused_prompt_leaves_nothing_behind(prompt: tuple[int, ...]) -> None:
    class Rewriting(Controller):
        def start(self, old: tuple[int, ...]) -> tuple[int, ...]:
            return prompt

    lab, pool = python_lab()
    got = lab.run_one(controller=Rewriting())
    assert got.first.reason is FinishReason.ERROR
    assert pool.is_empty


def test_cancelled_requests_leave_nothing_behind() -> None:
    lab, pool = python_lab()
    requests = [make_request(controller=Controller(), n=2, max_tokens=40) for _ in range(4)]
    for number, request in enumerate(requests):
        lab.engine.add(request)
        if number % 2:
            lab.step()
        lab.engine.cancel(request.id)
    lab.drain()
    assert pool.is_empty


class _OldPool:
    """A pool with the old method names of `ControllerPool`, which does not derive from `ControllerPool`."""

    is_busy = False

    def foresee(self, seq_id: int, tokens: list[int]) -> list[Decision]:
        return []


def test_a_pool_that_derives_from_nothing_is_refused_with_what_to_do() -> None:
    for make in (lambda pool: Lab(pools=[pool]), lambda pool: with_composed([pool], 32)):
        with pytest.raises(TypeError, match=r"_OldPool.*bridle\.engine\.ControllerPool.*foresee is lookahead"):
            make(_OldPool())


def test_the_engine_calls_optional_methods_only_of_pools_that_list_them() -> None:
    asked: list[int] = []

    class Watched(PythonControllerPool):
        def lookahead(self, seq_id: int, tokens: Sequence[int]) -> list[Decision]:
            asked.append(seq_id)
            return super().lookahead(seq_id, tokens)

    class Modest(Watched):
        capabilities = frozenset()

    class Pure(Controller):
        is_pure = True

        def next(self, view: SequenceView) -> Decision:
            return Decision.sample(draft=(1, 2))

    for kind, is_asked in ((Modest, False), (Watched, True)):
        Lab(pools=[kind(32)]).run_one((1, 2), controller=Pure(), max_tokens=8)
        assert bool(asked) is is_asked
