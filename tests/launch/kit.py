"""Helpers for tests that kill a shard while streams run and then check its state."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from bridle.distributed.link import Timings
from bridle.engine import AsyncEngine, Engine, EngineClient, EventStream, Request
from bridle.launch.launcher import LaunchedShard
from bridle.launch.supervised_process import SupervisedProcess
from bridle.outputs import Event, Finished, FinishReason, Resuming, TokenEvent
from bridle.sampling import SamplingParams
from tests.launch.scripted_shard import make_executor
from tests.waiting import PATIENCE

#: Hung shards are found quickly; a busy machine at worst restarts one too many.
QUICK = Timings(beat=0.05, patience=2.0, connect=PATIENCE)
ROOT = Path(__file__).resolve().parents[2]


def launch(*arguments: str, timings: Timings = QUICK, **options: bool) -> LaunchedShard:
    command = [sys.executable, "-m", "tests.launch.scripted_shard", *arguments]
    return LaunchedShard(command, name="scripted shard", timings=timings, start_timeout=PATIENCE, **options)


def requests(count: int, num_tokens: int, max_n: int = 2, **fields: object) -> list[Request]:
    """Return requests whose prompts begin alike; every second one samples, and every fifth has `max_n` outputs."""
    never = {31: float("-inf")}
    made = []
    for i in range(count):
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=i % 2, seed=i, n=1 if i % 5 else max_n, logit_bias=never, ignore_eos=True
        )
        prompt = (1, 2, 3, 4, 5, i % 30, i // 30)
        made.append(Request(f"r{i}", prompt, sampling, tell_resuming=i % 2 == 0, **fields))  # type: ignore[arg-type]
    return made


class Reader(threading.Thread):
    """Reads one stream to its end in a thread."""

    def __init__(self, stream: EventStream, on_token: Callable[[], None] = lambda: None) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self.events: list[Event] = []
        self.num_tokens = 0
        self._on_token = on_token
        self.start()

    def run(self) -> None:
        for events in self.stream:
            self.events += events
            self.num_tokens += sum(isinstance(event, TokenEvent) for event in events)
            self._on_token()

    @property
    def num_resuming(self) -> int:
        return sum(isinstance(event, Resuming) for event in self.events)

    @property
    def outputs(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for event in self.events:
            if isinstance(event, TokenEvent):
                found.setdefault(event.index, []).append(event.token)
        return found

    @property
    def reasons(self) -> set[FinishReason]:
        return {event.reason for event in self.events if isinstance(event, Finished)}


class Crowd:
    """Many readers of streams; `wait(n)` returns when they have read `n` more tokens in all, or all have ended."""

    def __init__(self, engine: EngineClient, made: list[Request]) -> None:
        self._more = threading.Condition()
        self.readers = [Reader(engine.submit(request), self._note) for request in made]

    def _note(self) -> None:
        with self._more:
            self._more.notify_all()

    @property
    def num_tokens(self) -> int:
        return sum(reader.num_tokens for reader in self.readers)

    def wait(self, num_tokens: int) -> bool:
        goal = self.num_tokens + num_tokens
        with self._more:
            return self._more.wait_for(lambda: self.num_tokens >= goal or self.is_over, PATIENCE)

    def wait_each(self) -> bool:
        """Wait until every unfinished stream has a new token; return False after the time limit."""
        before = [reader.num_tokens for reader in self.readers]

        def have_gone_on() -> bool:
            pairs = zip(self.readers, before, strict=True)
            return all(reader.num_tokens > count or reader.stream._complete for reader, count in pairs)

        with self._more:
            return self._more.wait_for(have_gone_on, PATIENCE)

    @property
    def is_over(self) -> bool:
        return all(reader.stream._complete for reader in self.readers)

    def join(self) -> None:
        for reader in self.readers:
            reader.join(PATIENCE)
            assert not reader.is_alive(), "a stream does not end"


def expected(made: list[Request]) -> list[dict[int, list[int]]]:
    """Return the outputs of the requests from an engine in this process."""
    with AsyncEngine(Engine(make_executor())) as engine:
        crowd = Crowd(engine, made)
        crowd.join()
        return [reader.outputs for reader in crowd.readers]


def num_descriptors() -> int:
    return psutil.Process().num_fds()


def await_spare(child: SupervisedProcess) -> int:
    """Wait for the standby process; return its process id."""
    spare = child.spare
    assert spare is not None
    with spare.changed:
        assert spare.changed.wait_for(lambda: spare.pid is not None, PATIENCE)
        assert spare.pid is not None
        return spare.pid


def children_of(module: str) -> list[int]:
    """Return the ids of this process's descendants that run the module."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                found.append(child.pid)
    return found
