"""Tests of Python controllers that call tools: the output waits and keeps its KV, other outputs continue, and each
fault becomes an error."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest

from bridle.controller_tools import Call, ToolExecutor, ToolLimits, function_tools
from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.controllers.composition import compose
from bridle.engine import AsyncEngine, Engine
from bridle.engine.client import EventStream
from bridle.engine.control.decision import Branch, Decision
from bridle.engine.request import Request
from bridle.errors import ControllerError, ShardUnavailable, ToolFailed
from bridle.outputs import FinishReason
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.support import Replay, make_request
from tests.waiting import PATIENCE, until

VOCAB = 32


class Running:
    """An engine in a thread with a scripted model and tool functions. Resources that are left at the end are an
    error."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], faults: Any = None, **limits: Any) -> None:
        bounds = ToolLimits(**limits)
        self.desk = ToolExecutor(function_tools(functions, bounds), bounds)
        self.pool = PythonControllerPool(VOCAB, self.desk, lambda text: [ord(letter) % VOCAB for letter in text])
        self.executor = ScriptedExecutor(VOCAB, record=True, faults=faults)
        self.engine = Engine(self.executor, pools=composed(self.pool))
        self.client = AsyncEngine(self.engine)
        self.desk.watch(self.client.wake)
        self.client.start()

    def submit(self, controller: object, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> EventStream:
        return self.client.submit(make_request(prompt, controller=controller, **fields))

    def run(self, controller: object, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> Replay:
        return read(self.submit(controller, prompt, **fields))

    def close(self) -> None:
        self.client.close()
        self.desk.close()
        assert not self.executor.violations
        assert self.pool.is_empty
        assert all(not counts.num_running for counts in self.desk.counts().values())


def composed(pool: PythonControllerPool) -> Any:
    from bridle.controllers.composite_pool import with_composed

    return with_composed([pool], VOCAB)


def read(stream: EventStream) -> Replay:
    replay = Replay(stream.request_id)
    for events in stream:
        for event in events:
            replay.add(event)
    return replay


Make = Callable[..., Running]


@pytest.fixture
def running() -> Iterator[Make]:
    made: list[Running] = []

    def make(functions: Mapping[str, Callable[..., Any]], faults: Any = None, **limits: Any) -> Running:
        made.append(Running(functions, faults, **limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Asks(Controller):
    """A controller that calls a tool, waits, writes the result (or the error, if it may fail) as tokens, and stops."""

    def __init__(self, name: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> None:
        self.given = name, arguments, timeout
        self.may_fail = False
        self.pending: Call | None = None
        self.has_written = False

    def next(self, view: SequenceView) -> Decision:
        if self.has_written:
            return Decision.stop("answered")
        if self.pending is None:
            self.pending = view.tool(*self.given)
            return Decision.wait_for(self.pending)
        assert self.pending.is_done
        if self.may_fail and self.pending.error is not None:
            view.log(self.pending.error)
            return Decision.stop("failed")
        self.has_written = True
        return Decision.splice(0, view.encode(self.pending.text))


def failing(name: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Asks:
    controller = Asks(name, arguments, timeout)
    controller.may_fail = True
    return controller


def test_the_answer_is_written_and_only_its_tokens_are_computed(running: Make) -> None:
    lab = running({"add": lambda a, b: a + b})
    got = lab.run(Asks("add", {"a": 20, "b": 22}), max_tokens=8)
    assert got.outputs[0].tokens == [ord("4") % VOCAB, ord("2") % VOCAB]
    assert got.outputs[0].forced == [True, True]
    assert got.outputs[0].reason is FinishReason.CONTROLLER
    computed = [row.num_scheduled for plan in lab.executor.plans for row in plan.rows]
    assert sum(computed) <= 3 + 2  # the prompt, once, and what was written
    assert lab.desk.counts()["add"].num_calls == 1


def test_others_go_on_while_one_waits(running: Make) -> None:
    gate = threading.Event()
    lab = running({"slow": lambda: gate.wait(PATIENCE) and "done"})
    stream = lab.submit(Asks("slow"), max_tokens=8)
    until(lambda: lab.desk.counts()["slow"].num_running)
    others = [lab.run(None, (5, number), max_tokens=12) for number in range(3)]
    assert [len(other.outputs[0].tokens) for other in others] == [12] * 3
    assert lab.desk.counts()["slow"].num_running  # all of that was beside the call
    gate.set()
    assert len(read(stream).outputs[0].tokens) == 4


class DrawsAndAsks(Asks):
    """A controller that samples three tokens before the call and one after it, so that KV can be lost and is needed
    again."""

    def next(self, view: SequenceView) -> Decision:
        if len(view.generated) < 3 or (self.has_written and len(view.generated) < 6):
            return Decision.sample()
        return super().next(view)


def test_a_call_outlives_the_shard_that_is_lost_meanwhile(running: Make) -> None:
    """The KV is computed again, but the tool is not called again."""
    gate = threading.Event()
    lab = running({"slow": lambda: gate.wait(PATIENCE) and "ok"}, faults={6: ShardUnavailable("gone")})
    stream = lab.submit(DrawsAndAsks("slow"), max_tokens=8)
    until(lambda: lab.desk.counts()["slow"].num_running)
    other = lab.run(None, (5, 1), max_tokens=12)
    assert len(other.outputs[0].tokens) == 12
    gate.set()
    got = read(stream)
    begun = [row.seq_id for plan in lab.executor.plans for row in plan.rows if not row.start]
    assert begun.count(begun[0]) == 2  # the one that waits: before the loss, and after it
    assert got.outputs[0].tokens[3:5] == [ord("o") % VOCAB, ord("k") % VOCAB]
    assert got.outputs[0].reason is FinishReason.CONTROLLER and lab.desk.counts()["slow"].num_calls == 1


def test_a_wait_is_longer_than_idle_steps_allow(running: Make) -> None:
    """The engine does not call a controller that waits for a tool, so a long wait does not count as an endless loop."""
    gate = threading.Event()
    lab = running({"slow": lambda: gate.wait(PATIENCE) and "ok"})
    stream = lab.submit(Asks("slow"), max_tokens=8)
    until(lambda: lab.engine.is_parked and lab.desk.counts()["slow"].num_running)
    seq = next(iter(lab.engine._steering.sequences.values()))
    before = seq.control.num_idle_steps
    for number in range(20):  # steps, made by others
        lab.run(None, (7, number), max_tokens=4)
    assert seq.control.num_idle_steps == before
    gate.set()
    assert read(stream).outputs[0].reason is FinishReason.CONTROLLER


def test_several_tools_run_at_once(running: Make) -> None:
    together = threading.Barrier(3)

    def meet(name: str) -> str:
        together.wait(PATIENCE)  # none returns before all were called
        return name

    class Three(Controller):
        calls: ClassVar[list[Call]] = []

        def next(self, view: SequenceView) -> Decision:
            if not self.calls:
                self.calls = [view.tool("meet", {"name": name}) for name in "abc"]
            open_calls = [call for call in self.calls if not call.is_done]
            if open_calls:
                return Decision.wait_for(*open_calls)
            view.log("".join(call.text for call in self.calls))
            return Decision.stop()

    lab = running({"meet": meet})
    assert lab.run(Three(), max_tokens=4).outputs[0].logs == "abc\n"


def test_a_controller_goes_on_while_its_call_is_under_way(running: Make) -> None:
    gate = threading.Event()

    class Busy(Controller):
        call: Call | None = None

        def next(self, view: SequenceView) -> Decision:
            if self.call is None:
                self.call = view.tool("slow")
            if len(view.generated) < 5:
                return Decision.sample()
            gate.set()  # five tokens were drawn before the tool could answer
            if not self.call.is_done:
                return Decision.wait_for(self.call)
            return Decision.stop(self.call.text)

    lab = running({"slow": lambda: gate.wait(PATIENCE) and "late"})
    got = lab.run(Busy(), max_tokens=10)
    assert len(got.outputs[0].tokens) == 5
    assert got.outputs[0].finished is not None
    assert got.outputs[0].finished.stop == "late"


def test_forks_call_independently_and_share_what_was_under_way(running: Make) -> None:
    seen: list[str] = []

    def note(who: str) -> str:
        seen.append(who)
        return who

    class Forking(Controller):
        branch = 0
        shared: Call | None = None
        own: Call | None = None

        def next(self, view: SequenceView) -> Decision:
            if self.shared is None:
                self.shared = view.tool("note", {"who": "shared"})
                return Decision.fork([Branch(), Branch()])
            if self.own is None:
                self.own = view.tool("note", {"who": f"branch {self.branch}"})
            waiting = [call for call in (self.shared, self.own) if not call.is_done]
            if waiting:
                return Decision.wait_for(*waiting)
            view.log(f"{self.shared.text}, {self.own.text}")
            return Decision.stop()

        def fork(self, branch: int) -> Controller:
            child = super().fork(branch)
            assert isinstance(child, Forking)
            child.branch = branch
            return child

    got = running({"note": note}).run(Forking(), max_tokens=4)
    assert sorted(seen) == ["branch 0", "branch 1", "shared"]
    assert sorted(output.logs for output in got.outputs.values()) == ["shared, branch 0\n", "shared, branch 1\n"]


def test_controllers_beside_one_that_waits_are_held(running: Make) -> None:
    class Draws(Controller):
        def next(self, view: SequenceView) -> Decision:
            return Decision.sample()

    lab = running({"say": lambda: "hi"})
    got = lab.run(compose(Draws(), Asks("say")), max_tokens=6)
    assert got.outputs[0].tokens == [ord("h") % VOCAB, ord("i") % VOCAB]
    assert got.outputs[0].reason is FinishReason.CONTROLLER


# -- faults ----------------------------------------------------------------------------------------------------


def raises(**arguments: Any) -> str:
    raise ValueError("no such city")


def dies() -> str:
    raise SystemExit(3)


async def hangs() -> str:
    await asyncio.Event().wait()
    return "never"


@pytest.mark.parametrize(
    ("controller", "why"),
    [
        (failing("raises", {"city": "Oslo"}), "raised ValueError('no such city')"),
        (failing("dies"), "raised SystemExit(3)"),
        (failing("hangs", timeout=0.01), "did not answer within 0.01 seconds"),
        (failing("absent"), "unknown tool; available tools: raises, dies, hangs, huge, odd"),
        (failing("huge"), "the answer has more than 1048576 bytes (max_result_bytes)"),
        (failing("odd"), "returned object, which is neither a string nor JSON"),
        (failing("dies", {"now": True}), "the arguments do not fit the function: got an unexpected keyword"),
        (failing("raises", {"x": "y" * 70_000}), "the arguments have 70008 bytes; at most 65536 (max_argument_bytes)"),
        (failing("raises", {"x": object()}), "the arguments are not JSON"),
        (failing("hangs", timeout=1e9), "timeout is 1000000000.0; must be more than 0 and at most 600 seconds"),
    ],
    ids=["raises", "dies", "hangs", "absent", "100 MB", "odd", "unfit", "long", "no JSON", "too patient"],
)
def test_what_can_go_wrong_is_told_in_words(running: Make, controller: Asks, why: str) -> None:
    functions = {"raises": raises, "dies": dies, "hangs": hangs, "huge": lambda: "x" * (100 << 20), "odd": object}
    got = running(functions).run(controller, max_tokens=4)
    assert why in got.outputs[0].logs
    assert got.outputs[0].reason is FinishReason.CONTROLLER


def test_an_answer_that_is_needed_and_missing_ends_the_output(running: Make) -> None:
    got = running({"raises": raises}).run(Asks("raises"), max_tokens=4)
    assert got.outputs[0].finished is not None
    assert isinstance(got.outputs[0].finished.error, ToolFailed)
    assert "tool 'raises': raised ValueError('no such city')" in str(got.outputs[0].finished.error)


def test_broken_json_is_told_when_it_is_read() -> None:
    call = Call("broken")
    with pytest.raises(ToolFailed, match="has not answered yet"):
        _ = call.text
    call.end('{"a": ')
    assert call.text == '{"a": '
    with pytest.raises(ToolFailed, match="the answer is not JSON"):
        _ = call.value
    deep = Call("deep")
    deep.end("[" * 200_000)
    with pytest.raises(ToolFailed, match="the answer is not JSON"):
        _ = deep.value


def test_an_answer_after_the_limit_of_time_is_dropped(running: Make) -> None:
    gate, returned = threading.Event(), threading.Event()

    def late() -> str:
        gate.wait(PATIENCE)
        returned.set()
        return "too late"

    lab = running({"late": late}, max_threads=1)
    got = lab.run(failing("late", timeout=0.01), max_tokens=4)
    assert "did not answer within 0.01 seconds" in got.outputs[0].logs
    full = lab.run(failing("late", timeout=0.01), max_tokens=4)  # the thread of the first is still there
    assert "1 tool functions are running; at most 1 may run (max_threads)" in full.outputs[0].logs
    gate.set()
    assert returned.wait(PATIENCE)
    until(lambda: "did not answer" not in lab.run(failing("late"), max_tokens=4).outputs[0].logs)


def test_a_client_that_leaves_cancels_its_calls(running: Make) -> None:
    ended: list[str] = []

    async def endless() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return ""

    lab = running({"endless": endless})
    stream = lab.submit(Asks("endless"), max_tokens=4)
    until(lambda: lab.desk.counts()["endless"].num_running)
    stream.cancel()
    assert read(stream).outputs[0].reason is FinishReason.CANCELLED
    until(lambda: ended == ["cancelled"])


def test_a_shared_call_ends_with_the_last_output_that_wants_it() -> None:
    from bridle.controller_tools.session import adopt, leave

    call = Call("shared")
    assert adopt([call]) == [call]
    leave([call])
    assert not call.is_done
    leave([call])
    assert call.error == "was cancelled"
    assert adopt([call]) == []


def test_a_request_has_so_many_calls_and_no_more(running: Make) -> None:
    class Greedy(Controller):
        def next(self, view: SequenceView) -> Decision:
            for call in [view.tool("hangs") for _ in range(3)]:
                view.log(str(call.error))
                call.cancel()
            for _ in range(3):
                call = view.tool("hangs")
                view.log(str(call.error))
                call.cancel()
            return Decision.stop()

    logs = running({"hangs": hangs}, max_pending=2, max_calls=4).run(Greedy(), max_tokens=4).outputs[0].logs
    assert logs.splitlines() == [
        "None",
        "None",
        "2 calls of this request are under way; at most 2 (max_pending)",
        "None",
        "None",
        "this request has made 4 calls; at most 4 (max_calls)",
    ]


def test_all_requests_together_have_so_many_calls_under_way() -> None:
    limits = ToolLimits(max_running=1)
    desk = ToolExecutor(function_tools({"hangs": hangs}, limits), limits)
    first, second = desk.begin("hangs"), desk.begin("hangs")
    assert second.error == "1 tool calls are running; at most 1 may run (max_running)"
    desk.close()
    assert first.error == "tools were shut down"
    assert desk.begin("hangs").error == "tools are shut down"


def test_a_request_may_use_what_it_was_given(running: Make) -> None:
    lab = running({"a": lambda: "a", "b": lambda: "b"})
    assert "the request has no such tool; its tools are a" in lab.run(failing("b"), tools=("a",)).outputs[0].logs


def test_the_deadline_of_a_request_holds_while_it_waits(running: Make) -> None:
    lab = running({"hangs": hangs})
    got = lab.run(Asks("hangs"), max_tokens=4, deadline=lab.engine.clock() + 0.05)
    assert got.outputs[0].reason is FinishReason.DEADLINE
    until(lambda: not lab.desk.counts()["hangs"].num_running)


def test_an_engine_that_closes_cancels_what_it_waits_for(running: Make) -> None:
    lab = running({"hangs": hangs})
    stream = lab.submit(Asks("hangs"), max_tokens=4)
    until(lambda: lab.desk.counts()["hangs"].num_running)
    lab.client.close()
    until(lambda: not lab.desk.counts()["hangs"].num_running)
    stream.cancel()


def test_a_pure_controller_calls_no_tools(running: Make) -> None:
    class Pure(Controller):
        is_pure = True

        def next(self, view: SequenceView) -> Decision:
            view.tool("a")
            return Decision.stop()

    finished = running({"a": lambda: "a"}).run(Pure(), max_tokens=4).outputs[0].finished
    assert finished is not None
    assert isinstance(finished.error, ControllerError)
    assert "is_pure, so it may not call tools" in str(finished.error)


def test_nothing_is_left_of_a_desk() -> None:
    desk = ToolExecutor(function_tools({"say": lambda: "hi"}))
    call = desk.begin("say")
    until(lambda: call.is_done)
    desk.close()
    desk.close()
    assert call.text == "hi"
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "bridle-tools" and thread.is_alive()]
    assert Request("x", (1,)).tools is None
