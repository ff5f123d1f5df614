"""Tests of pools that get all sampled tokens as one mapping: controllers see and decide the same as with one request
for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.engine.control.decision import DRAW, Branch, Decision, Splice
from bridle.engine.interfaces import DRAWN, Answer, Ask, ControllerPool, DelegatingPool
from bridle.outputs import Event, Finished
from tests.conftest import examples
from tests.engine.support import Lab, make_request

ACTIONS = ("sample", "sample", "sample", "log", "replace", "force", "wait", "fork", "look", "fail", "stop")


class Acting(Controller):
    """A controller that does the next of its actions at each call, and logs its view."""

    def __init__(self, actions: Sequence[str]) -> None:
        self.actions = list(actions)

    def next(self, view: SequenceView) -> Decision:
        action = self.actions.pop(0) if self.actions else "sample"
        if action != "sample":
            view.log(f"{view.tokens} {view.new_tokens} {view.num_rewound} {view.sampled} {view.candidates}")
        match action:
            case "replace":
                return Decision.sample(splices=[Splice(1, (3, 4))])
            case "force":
                return Decision.splice(1, (5,))
            case "wait":
                return Decision.wait()
            case "fork":
                return Decision.fork([Branch(), Branch()])
            case "look":
                return Decision.sample(top_logprobs=2)
            case "fail":
                raise LookupError("as planned")
            case "stop":
                return Decision.stop("as planned")
        return Decision.sample()


class AskedSingly(PythonControllerPool):
    """A pool that gets one request for each token."""

    def ask_sampled(self, tokens: Mapping[int, int]) -> None:
        ControllerPool.ask_sampled(self, tokens)


class Counting(PythonControllerPool):
    """A pool that counts the requests, and the tokens that came without one."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.asked: list[Ask] = []
        self.sampled: list[dict[int, int]] = []

    def ask(self, asks: Sequence[Ask]) -> None:
        self.asked += asks
        super().ask(asks)

    def ask_sampled(self, tokens: Mapping[int, int]) -> None:
        self.sampled.append(dict(tokens))
        super().ask_sampled(tokens)


def events_of(pool: ControllerPool, programs: Sequence[Sequence[str]]) -> list[Event]:
    """Return the events of one request for each program. Errors are replaced by their texts, because errors never
    compare as equal."""
    lab = Lab(pools=[pool])
    requests = [
        make_request((1, 2, number), id=str(number), controller=Acting(actions), seed=number, max_tokens=8)
        for number, actions in enumerate(programs)
    ]
    lab.run(*requests)
    for event in lab.events:
        if isinstance(event, Finished):
            event.error = str(event.error)  # type: ignore[assignment]
            event.held = 0.0
    return lab.events


@settings(max_examples=examples(60))
@given(st.lists(st.lists(st.sampled_from(ACTIONS), max_size=6), min_size=1, max_size=4))
def test_controllers_see_and_do_the_same(programs: list[list[str]]) -> None:
    assert events_of(PythonControllerPool(32), programs) == events_of(AskedSingly(32), programs)
    assert Answer(DRAW) == DRAWN


def test_steps_that_only_sample_make_no_asks() -> None:
    pool = Counting(32)
    events_of(pool, [[], [], []])
    assert [ask.request is not None or ask.final for ask in pool.asked] == [True] * 6  # at the beginning and the end
    assert [list(tokens) for tokens in pool.sampled] == [[0, 1, 2]] * 7


def test_a_sample_next_to_other_news_comes_as_an_ask() -> None:
    """All requests of a step are in one call, so that forks are made before their parents continue."""
    pool = Counting(32)
    events_of(pool, [["sample", "fork"], []])
    child = next(ask for ask in pool.asked if ask.parent is not None)
    before = pool.asked[: pool.asked.index(child)]
    assert [ask.seq_id for ask in before[-2:]] == [0, 1]
    assert all(ask.tokens == (ask.sampled,) for ask in before[-2:])


def test_a_pool_that_changes_asks_gets_all_tokens_as_asks() -> None:
    class Watching(DelegatingPool):
        def ask(self, asks: Sequence[Ask]) -> None:
            seen.extend(ask.tokens for ask in asks if not ask.final and ask.request is None)
            super().ask(asks)

    seen: list[tuple[int, ...]] = []
    inner = Counting(32)
    events_of(Watching(inner), [[]])
    assert len(seen) == 7 and not inner.sampled
