"""Common parts of the engine's tests: making requests, running an engine with checks, and rebuilding outputs from
events."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from hypothesis import settings

from bridle.config import EngineConfig
from bridle.controllers.composite_pool import with_composed
from bridle.engine.engine import Engine
from bridle.engine.interfaces import ControllerPool, Executor, TextDecoder
from bridle.engine.request import Request
from bridle.engine.scheduling.scheduler import Scheduler
from bridle.engine.sequence import Sequence, root_key
from bridle.engine.sequence_state import QueueState
from bridle.outputs import (
    TOKEN_KINDS,
    Embedded,
    Event,
    Finished,
    FinishReason,
    Forked,
    Log,
    Logprob,
    PromptEvent,
    PromptProgress,
    Rewind,
    Stored,
    TokenEvent,
    Traced,
    Usage,
)
from bridle.sampling import SamplingParams
from bridle.testing.clock import FakeClock
from bridle.testing.scripted import ScriptedExecutor
from bridle.traces import EndRecord, Record
from bridle.traces.replay_text import rebuild_records
from tests.conftest import IS_FULL
from tests.fakes.controller_runtime import FakeController, FakeControllerPool, Program
from tests.fakes.reference_engine import Path, ReferenceOutput, run_reference
from tests.waiting import until

_ids = count()
_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)
_CONFIG = frozenset(EngineConfig.__dataclass_fields__)


def scheduler_of(engine: Engine) -> Scheduler:
    """Return the scheduler of an engine, whose state tests inspect."""
    return engine._scheduler


def make_request(prompt: Seq[int] = (1, 2, 3), **fields: object) -> Request:
    """Return a request with a new id. Sampling parameters may be given by name."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in _SAMPLING}
    if sampling:
        fields["sampling"] = SamplingParams(**sampling)  # type: ignore[arg-type]
    fields.setdefault("id", f"request-{next(_ids)}")
    return Request(prompt=tuple(prompt), **fields)  # type: ignore[arg-type]


def make_sequence(seq_id: int, tokens: Seq[int], *, max_len: int = 64, **fields: object) -> Sequence:
    """Return a sequence like the engine's for a new request."""
    request = make_request(tokens, **fields)
    return Sequence(
        id=seq_id,
        request=request,
        index=0,
        tokens=list(tokens),
        num_prompt=len(tokens),
        sampling=request.sampling,
        max_len=max_len,
        key=root_key(seq_id),
        queue=QueueState(request.priority),
    )


# -- reading events --------------------------------------------------------------------------------------------


@dataclass
class Output:
    """An output as a client has it after all events."""

    path: Path
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob | None] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    text: str = ""
    logs: str = ""
    said: list[tuple[int, str]] = field(default_factory=list)  # each log, after so many tokens
    stored: list[tuple[str, bytes]] = field(default_factory=list)
    vector: array[float] | None = None
    finished: Finished | None = None
    num_children: int = 0

    @property
    def reason(self) -> FinishReason:
        assert self.finished is not None
        return self.finished.reason

    @property
    def usage(self) -> Usage:
        assert self.finished is not None
        return self.finished.usage


@dataclass
class Replay:
    """All outputs of one request by index, rebuilt from its events. The order of events is checked."""

    request_id: str
    outputs: dict[int, Output] = field(default_factory=lambda: {0: Output(())})
    prompt: PromptEvent | None = None
    is_over: bool = False
    records: list[Record] = field(default_factory=list)

    def add(self, event: Event) -> None:
        assert event.request_id == self.request_id
        assert not self.is_over, f"{event} after the last"
        if isinstance(event, Traced):
            assert event.record.output == event.index
            self.records.append(event.record)
            return
        if isinstance(event, Forked):
            self._fork(event)
            return
        output = self.outputs[event.index]  # a KeyError means: an event before its Forked
        assert output.finished is None, f"{event} after {output.finished}"
        if isinstance(event, PromptProgress):
            assert self.prompt is None
            assert event.num_computed + event.num_cached > 0
        elif isinstance(event, PromptEvent):
            assert self.prompt is None
            assert not output.tokens
            self.prompt = event
        elif isinstance(event, TokenEvent):
            assert self.prompt is not None or event.forced, "a token before the prompt"
            output.tokens.append(event.token)
            output.logprobs.append(event.logprob)
            output.forced.append(event.forced)
            output.text += event.text
        elif isinstance(event, Rewind):
            self._rewind(output, event)
        else:
            self._end(output, event)

    def _fork(self, event: Forked) -> None:
        parent = self.outputs[event.parent]
        assert event.index not in self.outputs
        child = Output((*parent.path, parent.num_children), parent.tokens[: event.num_tokens])
        parent.num_children += 1
        assert len(child.tokens) == event.num_tokens
        assert parent.text.startswith(event.text)
        child.logprobs = parent.logprobs[: event.num_tokens]
        child.forced = parent.forced[: event.num_tokens]
        child.text = event.text
        self.outputs[event.index] = child

    def _rewind(self, output: Output, event: Rewind) -> None:
        assert 0 <= event.num_tokens <= len(output.tokens)
        assert 0 <= event.num_chars <= len(output.text)
        assert event.num_tokens or event.num_chars
        keep = len(output.tokens) - event.num_tokens
        del output.tokens[keep:], output.logprobs[keep:], output.forced[keep:]
        output.text = output.text[: len(output.text) - event.num_chars]

    def _end(self, output: Output, event: Event) -> None:
        if isinstance(event, Log):
            output.said.append((len(output.tokens), event.text))
            output.logs += event.text
        elif isinstance(event, Stored):
            output.stored.append((event.name, event.value))
        elif isinstance(event, Embedded):
            output.vector = event.vector
        else:
            assert isinstance(event, Finished)
            output.finished = event
            output.text += event.text
            if self.records:
                self._check_trace(event.index, output)
            alive = [one for one in self.outputs.values() if one.finished is None]
            assert event.is_last == (not alive)
            self.is_over = event.is_last

    def _check_trace(self, index: int, output: Output) -> None:
        """Check that the trace of an ended output gives the output that its client has."""
        if any(isinstance(record, EndRecord) and record.num_cut for record in self.records):
            return
        rebuilt = rebuild_records(self.records)[index]
        assert (rebuilt.token_ids, rebuilt.text) == (output.tokens, output.text)
        assert [record.forced for record in rebuilt.records] == output.forced
        assert "".join(rebuilt.pieces) == output.text

    @property
    def by_path(self) -> dict[Path, Output]:
        return {output.path: output for output in self.outputs.values()}

    @property
    def first(self) -> Output:
        return self.outputs[0]


def replay(events: Iterable[Event]) -> dict[str, Replay]:
    """Return the replays of many requests, made from their mixed events, and checked."""
    replays: dict[str, Replay] = {}
    for event in events:
        replays.setdefault(event.request_id, Replay(event.request_id)).add(event)
    return replays


# -- running an engine -----------------------------------------------------------------------------------------


class Lab:
    """An engine with a scripted executor and a fake clock. All checks run after every step."""

    #: How the engine reaches the executor: here in the same process.
    connect: ClassVar[Callable[[Executor], Executor]] = staticmethod(lambda executor: executor)
    #: What computes.
    Scripted: ClassVar[type[ScriptedExecutor]] = ScriptedExecutor
    #: Makes what is stepped, from the options of its executor: here one engine.
    make_engine: ClassVar[Callable[[Lab, EngineConfig, dict[str, Any]], Engine]] = staticmethod(
        lambda lab, config, options: lab.make_one(config)
    )

    def __init__(
        self,
        *,
        config: EngineConfig | None = None,
        pools: Seq[ControllerPool] | None = None,
        decoder: TextDecoder | None = None,
        composed: bool = False,
        **options: object,
    ) -> None:
        limits = {name: options.pop(name) for name in list(options) if name in _CONFIG}
        self.clock = FakeClock()
        self.executor = self.Scripted(clock=self.clock, **options)  # type: ignore[arg-type]
        self.pool = FakeControllerPool(self.clock)
        self.pools = [self.pool] if pools is None else pools
        if composed:
            self.pools = with_composed(self.pools, self.executor.info.vocab_size)
        self.decoder = decoder
        self.engine = self.make_engine(self, config or EngineConfig(**limits), options)  # type: ignore[arg-type]
        self.events: list[Event] = []
        self.num_steps = 0

    def make_one(self, config: EngineConfig) -> Engine:
        """Return an engine with this lab's executor."""
        executor = self.connect(self.executor)
        return Engine(executor, config, pools=self.pools, decoder=self.decoder, clock=self.clock)

    def step(self) -> list[Event]:
        """Run one step and all checks. The clock advances if nothing happens. An unreachable device is waited for."""
        self.pool.settle()
        until(lambda: getattr(self.engine, "is_up", True), "the device")  # a set of replicas has no device
        before = self.clock()
        events = self.engine.step()
        if not events and self.clock() == before:
            self.clock.advance(0.001)
        self.events += events
        self.num_steps += 1
        self.engine.check_integrity()
        assert not self.executor.violations, self.executor.violations[0]
        assert not self.pool.violations, self.pool.violations[0]
        return events

    def drain(self, max_steps: int = 3_000) -> dict[str, Replay]:
        """Run steps until all requests have ended, and check that no resource is leaked."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"not over after {max_steps} steps"
        self.check_empty()
        return replay(self.events)

    def check_empty(self) -> None:
        """Check that all blocks, controllers and sequences are freed."""
        statistics = self.engine.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks
        assert (statistics.num_running, statistics.num_waiting, statistics.num_suspended) == (0, 0, 0)
        assert not self.pool.live

    def run(self, *requests: Request) -> list[Replay]:
        """Add requests, run until they end, and return their replays in order."""
        for request in requests:
            self.engine.add(request)
        replays = self.drain()
        return [replays[request.id] for request in requests]

    def run_one(self, prompt: Seq[int] = (1, 2, 3), **fields: object) -> Replay:
        """Make a request, and run it alone."""
        return self.run(make_request(prompt, **fields))[0]

    def reference(self, request: Request) -> dict[Path, ReferenceOutput]:
        """Return the outputs of the naive reference for a request."""
        info = self.executor.info
        return run_reference(
            self.executor.model,
            request,
            program_of(request),
            max_model_len=min(info.max_model_len, info.num_blocks * info.block_size),
            eos_token_ids=info.eos_token_ids,
            decoder=self.decoder,
        )


def program_of(request: Request) -> Program | None:
    controller = request.controller
    if isinstance(controller, FakeController):
        return controller.program
    return controller if callable(controller) else None


def check_against_reference(lab: Lab, request: Request, got: Replay) -> None:
    """Check that every output of `got` has the tokens and counts of the reference."""
    expected = lab.reference(request)
    assert set(got.by_path) == set(expected)
    for path, output in got.by_path.items():
        check_output(output, expected[path], request)


def check_output(output: Output, expected: ReferenceOutput, request: Request) -> None:
    finished = output.finished
    assert finished is not None
    assert output.tokens == expected.tokens
    assert (finished.reason, finished.stop) == (expected.reason, expected.stop), finished.error
    assert (finished.error is None) == (expected.error is None), finished.error
    if expected.error is not None:
        assert expected.error in str(finished.error)
    elif request.sampling.logprobs is None:
        assert output.logprobs == [None] * len(output.tokens)
    else:
        assert output.logprobs == expected.logprobs
    assert output.text == expected.text
    assert output.logs == expected.logs
    check_usage(finished.usage, expected.usage)


def check_usage(usage: Usage, expected: Usage) -> None:
    """Check the usage. Cached and draft tokens depend on other requests; all other counts depend only on the
    request."""
    by_chance = {"cached_tokens", "drafted_tokens", "accepted_tokens"}
    counted = {name: getattr(usage, name) for name in TOKEN_KINDS.values() if name not in by_chance}
    assert 0 <= usage.accepted_tokens <= usage.drafted_tokens
    assert counted == {name: getattr(expected, name) for name in counted}
    assert usage.cached_tokens <= usage.prompt_tokens


def more(times: int) -> settings:
    """Return settings for `times` as many examples as in the profile, or half of that in the quick profile."""
    return settings(max_examples=settings().max_examples * times // (1 if IS_FULL else 2))


def alone(prompt: list[int]) -> array[float]:
    engine = Engine(ScriptedExecutor(8, 64, 4, embedding_size=5))
    engine.add(make_request(prompt, id="alone", max_tokens=1, embeds=True))
    (event,) = [event for event in run(engine) if isinstance(event, Embedded)]
    return event.vector


def run(engine: Engine, max_steps: int = 500) -> list[Event]:
    events: list[Event] = []
    for _ in range(max_steps):
        if not engine.has_work:
            engine.check_integrity()
            return events
        events += engine.step()
    raise AssertionError("it goes on")
