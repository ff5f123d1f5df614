"""Tests of faults of controlled requests: late and waiting controllers, many forks, cancellations at any moment, and
runtimes that do not start or die while idle. No resource is leaked."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool, WasmController
from bridle.engine import Request
from bridle.errors import ControllerDeadlock, ControllerError
from bridle.outputs import FinishReason, Forked
from bridle.sampling import SamplingParams
from tests.aici.conftest import VOCAB_SIZE
from tests.aici.guests import END, LOOP, NOOP, by_branch, force, guest1, guest2, mask, result, sample, say, splice
from tests.aici.guests import store as set_variable
from tests.aici.steering import Steered
from tests.waiting import PATIENCE, until

ROOM = 6
FOREVER = guest2([sample([65], VOCAB_SIZE)])
SHORT = guest2([sample([65], VOCAB_SIZE), END])
FORKING = guest2(
    [
        sample([65], VOCAB_SIZE),
        [result({"branches": [splice([70]), splice([71])]})],
        [mask([66], VOCAB_SIZE), result({"branches": [{"sample_mask": "#", "splices": []}]})],
    ]
)


def make_pool(tokenizer: Path, store: Path, *args: str, **options: object) -> RuntimePool:
    extra = ("--store", str(store), "--wasm-max-step-time", "500", "--limit", f"max_instances={ROOM}", *args)
    return RuntimePool(RuntimeConfig(str(tokenizer), extra_args=extra, json_size=8, **options), VOCAB_SIZE)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool(tokenizer: Path, store: Path) -> Iterator[RuntimePool]:
    pool = make_pool(tokenizer, store)
    yield pool
    pool.shutdown()


def probe(steered: Steered) -> None:
    """Check that the maximum number of instances can be created, which fails if earlier tests leaked any."""
    settle(steered)
    names = [f"probe {number}" for number in range(ROOM)]
    module = steered.upload(SHORT)
    for name in names:
        steered.add_module(name, module)
    steered.run()
    assert [steered.tokens(name) for name in names] == [[65]] * ROOM, [steered.end(name).error for name in names]


def settle(steered: Steered) -> None:
    """Wait until starting controllers have started, and unused instances are freed."""
    pool = steered.pool
    for done in [pool.instances.openers.submit(lambda: None) for _ in range(4)]:
        done.result(PATIENCE)
    until(lambda: not pool.instances.pending)
    deadline = time.monotonic() + PATIENCE
    for number in count():  # a step, with which the runtime drops what was discarded; it needs room itself
        steered.add(f"settled {number}", SHORT)
        steered.run()
        if steered.tokens(f"settled {number}"):
            return
        assert time.monotonic() < deadline, f"no room after {number} attempts"


@pytest.fixture
def steered(pool: RuntimePool) -> Iterator[Steered]:
    steered = Steered(pool)
    yield steered
    probe(steered)


# -- late, waiting, forking ------------------------------------------------------------------------------------


def test_a_late_controller_costs_nobody_else_a_step(tokenizer: Path, store: Path) -> None:
    """The step limit is long, but other sequences do not wait for it: they answer, sample and end meanwhile."""
    pool = make_pool(tokenizer, store, "--wasm-max-step-time", "60000")
    try:
        steered = Steered(pool, step_timeout=0.025)
        six = guest2([*[sample([token], VOCAB_SIZE) for token in range(65, 71)], END])
        steered.add("late", guest2([sample([65], VOCAB_SIZE), [say("now\n"), LOOP]]))
        steered.run(until=lambda: bool(steered.tokens("late")))
        for name in ("a", "b"):
            steered.add(name, six)
        steered.add("plain", None)
        steered.run(until=lambda: all(map(steered.is_over, ("a", "b", "plain"))))
        assert steered.tokens("a") == steered.tokens("b") == list(range(65, 71))
        assert not steered.is_over("late")
        steered.engine.cancel("late")
        steered.run()
        probe(steered)
    finally:
        pool.shutdown()


def test_a_controller_that_is_late_too_often_ends(tokenizer: Path, store: Path) -> None:
    pool = make_pool(tokenizer, store, "--wasm-max-step-time", "10", "--wasm-max-timeout-steps", "3")
    try:
        steered = Steered(pool)
        steered.add("late", guest2([[say("now\n"), LOOP]]))
        steered.run()
        end = steered.end("late")
        assert end.reason is FinishReason.ERROR and "3 steps in a row" in str(end.error)
        assert steered.logs("late").startswith("now\n") and "late:" not in steered.logs("late")
        probe(steered)
    finally:
        pool.shutdown()


def wait_for(variable: str, newer_than: int = 0) -> list[str]:
    return [result({"branches": [], "wait": {"variable": variable, "newer_than": newer_than}})]


TWO = result({"branches": [splice([70]), splice([71])]})


@pytest.mark.few(1)
@pytest.mark.parametrize("way", [(), ("--fork-by", "process")], ids=["copied", "forked"])
def test_a_deadlock_ends_at_once_and_names_the_variables(tokenizer: Path, store: Path, way: tuple[str, ...]) -> None:
    pool = make_pool(tokenizer, store, *way)
    try:
        steered = Steered(pool)
        each = by_branch(wait_for("left"), [set_variable("left", "61"), *wait_for("right")])
        steered.add("a", guest2([sample([65], VOCAB_SIZE), [TWO], [each], wait_for("never")]))
        steered.add("alone", guest2([sample([65], VOCAB_SIZE), wait_for("x"), END]))
        steered.add("plain", None, max_tokens=40)
        steered.run()
        for index, name in enumerate(("never", "right")):
            error = steered.end("a", index).error
            assert isinstance(error, ControllerDeadlock) and f"output {index} waits for variable {name!r}" in str(error)
        assert "output 0 waits for variable 'x'" in str(steered.end("alone").error)
        assert steered.end("plain").reason is FinishReason.LENGTH
        probe(steered)
    finally:
        pool.shutdown()


def test_waiting_for_a_variable_that_comes_late_is_no_deadlock(pool: RuntimePool) -> None:
    """One output samples for a long time while another waits for a variable, and a third waits with a time limit."""
    steered = Steered(pool)
    first, *others = [sample([token], VOCAB_SIZE) for token in range(80, 86)]
    steps = [[TWO], [by_branch(wait_for("x"), first)], *others, [set_variable("x", "61"), *END]]
    steered.add("a", guest2(steps), max_tokens=20)
    timed = [result({"branches": [], "wait": {"variable": "x", "ms": 60}})]
    steered.add("timed", guest2([timed, sample([66], VOCAB_SIZE), END]))
    steered.run()
    assert steered.tokens("a", 0) == [70, *range(81, 86)] and steered.tokens("a", 1) == [71, *range(80, 86)]
    assert steered.tokens("timed") == [66]
    probe(steered)


def test_suspending_together_is_a_deadlock_too(pool: RuntimePool) -> None:
    """D1 guests do not report what they wait for, and may count calls, so the deadlock is detected later."""
    steered = Steered(pool, max_noops=50)
    suspend = [result({"suspend": True})]
    steered.add("a", guest1([suspend], [[result({"SampleWithBias": {}})]], [[result({"stop": False})]]))
    steered.run()
    assert isinstance(steered.end("a").error, ControllerDeadlock)
    assert "waited for 51 turns in a row; at most 50" in str(steered.end("a").error)


def test_outputs_that_all_wait_for_ever_end(pool: RuntimePool) -> None:
    steered = Steered(pool, max_idle_steps=200, max_noops=10_000)
    branches = result({"branches": [splice([70]), splice([71])]})
    steered.add("a", guest2([sample([65], VOCAB_SIZE), [branches], NOOP]))
    steered.add("plain", None)
    steered.run()
    for index in (0, 1):
        end = steered.end("a", index)
        assert end.reason is FinishReason.ERROR and "waited for 201 steps in a row; at most 200" in str(end.error)
    assert steered.engine.statistics().num_computed_tokens < 40
    assert steered.end("plain").reason is FinishReason.LENGTH
    probe(steered)


def test_a_fork_storm_ends_with_the_limit(tokenizer: Path, store: Path) -> None:
    pool = make_pool(tokenizer, store, "--limit", "max_instances=100")
    try:
        steered = Steered(pool)
        steered.add("storm", guest2([[result({"branches": [splice([70]), splice([71]), splice([72])]})]]))
        steered.add("good", SHORT)
        steered.run()
        forks = [event for event in steered.events["storm"] if isinstance(event, Forked)]
        assert 2 <= len(forks) < 64
        errors = {str(steered.end("storm", index).error) for index in range(len(forks) + 1)}
        assert any("limit of 16 forks" in error for error in errors), errors
        assert steered.tokens("good") == [65]
    finally:
        pool.shutdown()


# -- going away ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(9))
def test_cancelled_after_any_number_of_steps(steered: Steered, num_steps: int) -> None:
    steered.add("a", FORKING)
    steered.add("b", FORKING)
    for _ in range(num_steps):
        steered.step()
    steered.engine.cancel("a")
    steered.run()
    assert steered.end("a").reason is FinishReason.CANCELLED
    assert steered.tokens("b")[:2] == [65, 70] and steered.tokens("b", 1)[:2] == [65, 71]


def test_cancelled_while_it_opens(steered: Steered) -> None:
    """Ten times the possible number of requests start and are cancelled at once."""
    module = steered.upload(FOREVER)
    for number in range(10 * ROOM):
        steered.add_module(f"r{number}", module)
        if number % 3:
            steered.step()
        steered.engine.cancel(f"r{number}")
    steered.run()
    assert {steered.end(f"r{number}").reason for number in range(10 * ROOM)} <= {
        FinishReason.CANCELLED,
        FinishReason.ERROR,  # more than fit were there for a moment
    }


def test_a_prompt_too_long_for_the_model(steered: Steered) -> None:
    steered.add("a", guest2([sample([65], VOCAB_SIZE)], prompt=[7] * 5_000))
    steered.run()
    assert "5000" in str(steered.end("a").error)


def test_many_tokens_at_once_end_by_length(steered: Steered) -> None:
    steered.add("a", guest2([force([70] * 50)]))
    steered.run()
    assert steered.end("a").reason is FinishReason.LENGTH and steered.tokens("a") == [70] * 12


# -- starting and dying ----------------------------------------------------------------------------------------

CRASHES: dict[str, tuple[tuple[str, ...], str]] = {
    "no such command": (("/nonexistent/aicirt",), "'/nonexistent/aicirt' cannot be started"),
    "ends at once": ((sys.executable, "-c", "raise SystemExit(3)"), "exit status 3"),
    "knows no option": ((sys.executable, "-m", "bridle.aici.runtime", "--no-such-option"), "exit status 2"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CRASHES)
def test_a_runtime_that_does_not_start(tokenizer: Path, case: str) -> None:
    command, words = CRASHES[case]
    with pytest.raises(ControllerError, match="control runtime") as caught:
        RuntimePool(RuntimeConfig(str(tokenizer), command=command, json_size=8), VOCAB_SIZE)
    assert words in str(caught.value)
    assert not leftovers()


def test_a_runtime_that_says_nothing(tokenizer: Path) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    with pytest.raises(ControllerError, match=r"did not answer within 0\.2 s"):
        RuntimePool(RuntimeConfig(str(tokenizer), command=command, json_size=8, start_timeout=0.2), VOCAB_SIZE)
    assert not leftovers()


def leftovers() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f"bridle-{os.getpid()}-" in name]


def kill_runtime(pool: RuntimePool, number: int = signal.SIGKILL) -> None:
    assert pool.runtime_pid is not None
    os.killpg(pool.runtime_pid, number)


def replace_runtime(pool: RuntimePool) -> None:
    """Kill the runtime, and wait until a new one has started."""
    lost = pool.runtime_pid
    kill_runtime(pool)
    with pool.keeper.changed:
        assert pool.keeper.changed.wait_for(lambda: pool.runtime_pid not in (None, lost), PATIENCE)


def test_a_runtime_that_dies_while_nothing_runs_is_back_for_the_next_request(tokenizer: Path, store: Path) -> None:
    pool = make_pool(tokenizer, store)
    try:
        steered = Steered(pool)
        module = steered.upload(SHORT)
        replace_runtime(pool)  # no engine looks: the pool sees it by itself
        steered.add_module("a", module)
        steered.run()
        assert steered.tokens("a") == [65] and pool.num_restarts == 1
        assert not leftovers()
    finally:
        pool.shutdown()


def test_runtimes_that_end_while_nothing_runs_leave_neither_memory_nor_threads(tokenizer: Path, store: Path) -> None:
    links, threads = mapped_links(), num_listening()
    pool = make_pool(tokenizer, store)
    woken = threading.Event()
    pool.wake = woken.set
    try:
        steered = Steered(pool)
        steered.add("a", SHORT)
        steered.run()
        for _ in range(3):
            replace_runtime(pool)
        assert woken.wait(PATIENCE)
        steered.run()  # an engine that was woken takes a step, though it has no request
        until(lambda: len(mapped_links() - links) == 1, "that lost runtimes are closed")
        until(lambda: num_listening() == threads + 1)
    finally:
        pool.shutdown()
    assert mapped_links() <= links


def mapped_links() -> set[str]:
    """Return the links to runtimes that this process has mapped, by their prefixes."""
    return set(re.findall(rf"/bridle-{os.getpid()}-\w+-", Path("/proc/self/maps").read_text()))


def num_listening() -> int:
    return sum(thread.name == "bridle-aici-listen" for thread in threading.enumerate())


def test_opened_before_and_asked_after_a_loss(tokenizer: Path, store: Path) -> None:
    """An instance that died before its first call is not used in the next runtime."""
    pool = make_pool(tokenizer, store)
    try:
        steered = Steered(pool)
        module = steered.upload(FOREVER)
        request = Request("a", (1,), SamplingParams(), controller=WasmController(module))
        assert pool.open(request).result(PATIENCE) == (1,)
        replace_runtime(pool)
        from bridle.engine.interfaces import Ask

        pool.ask([Ask(1, request=request)])
        assert "ended a moment ago" in str(pool.collect([1], None)[1].error)
        probe(steered)
    finally:
        pool.shutdown()


@pytest.mark.few(1)
@pytest.mark.parametrize("moment", ["opening", "running", "waiting for its start"])
def test_shutting_down_at_any_moment(tokenizer: Path, store: Path, moment: str) -> None:
    pool = make_pool(tokenizer, store)
    actions: dict[str, Callable[[], object]] = {
        "opening": lambda: None,
        "running": steered_steps(Steered(pool)),
        "waiting for its start": lambda: kill_runtime(pool),
    }
    actions[moment]()
    pid = pool.runtime_pid
    future = pool.open(Request("last", (1,), SamplingParams(), controller=WasmController("f" * 64)))
    pool.shutdown()
    pool.shutdown()
    assert future.cancelled() or future.exception(10) is not None
    assert not leftovers()
    if pid is not None:
        until(lambda: not members(pid))


def members(group: int) -> list[int]:
    """Return the running processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, leader = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
                if int(leader) == group and state != "Z":
                    found.append(int(entry.name))
    return found


def steered_steps(steered: Steered) -> Callable[[], object]:
    def run() -> None:
        steered.add("a", FORKING)
        steered.run(until=lambda: bool(steered.tokens("a")))

    return run


def test_by_branch_guests_know_their_place(steered: Steered) -> None:
    wasm = guest2(
        [[result({"branches": [splice([70]), splice([71])]})], [by_branch(sample([80], 260), sample([81], 260))], END]
    )
    steered.add("a", wasm)
    steered.run()
    assert (steered.tokens("a", 0), steered.tokens("a", 1)) == ([70, 80], [71, 81])


def test_a_fork_into_twenty_leaves_sixteen(pool: RuntimePool) -> None:
    steered = Steered(pool)
    twenty = result({"branches": [splice([70 + number]) for number in range(20)]})
    steered.add("a", guest2([sample([65], VOCAB_SIZE), [twenty], sample([66], VOCAB_SIZE), END]), max_tokens=20)
    steered.run()
    ends = [steered.end("a", index) for index in range(20)]
    assert [end.reason for end in ends[:16]] == [FinishReason.CONTROLLER] * 16
    assert [end.reason for end in ends[16:]] == [FinishReason.ERROR] * 4
    assert all("limit of 16 forks" in str(end.error) for end in ends[16:])
    assert [steered.tokens("a", index)[-1] for index in range(16)] == [66] * 16
