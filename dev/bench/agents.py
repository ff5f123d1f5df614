"""Benchmark of agents that call tools repeatedly: `bridle bench agents`.

Several agents run at the same time. Each agent has a long context, writes a call, waits for its result, and continues.
In three cases each agent is a loop in the client: with retained KV, with the prefix cache, and without a cache. In the
fourth case the agents run inside the engine, as a controller that waits and writes the result itself. The cache is
either large, or so small that the requests of other users evict the agents' KV during each call. The model has random
weights, because neither speeds nor counts depend on the text.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.bench.checkpoints import make_checkpoint, planned_checkpoint
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.config import EngineConfig, ModelConfig
from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.distribution import install_hint
from bridle.engine import AsyncEngine, Decision, Engine, Request
from bridle.engine.statistics import EngineStatistics
from bridle.outputs import Event, Finished, TokenEvent
from bridle.sampling import SamplingParams
from dev.bench import agents_peer
from dev.bench.agents_work import AgentWork, tokens_of

if TYPE_CHECKING:
    from rich.console import Console

_BLOCK = 16
#: Settings of the engine for each variant of a client's loop.
_LOOPS: dict[str, dict[str, Any]] = {
    "client, parked KV": {},
    "client, prefix cache": {"park_memory": 0},
    "client, no cache": {"park_memory": 0, "enable_prefix_caching": False},
}
_INSIDE = "inside the engine"
_CACHES = ("large", "scarce")
_MODEL = "20m"
THREADS = 1


@dataclass(slots=True)
class AgentTally:
    """Counts and times of one run. `firsts` are the seconds from each tool result to the next sampled token. `steps`
    are the engine's steps in that time, for all agents and other users together."""

    firsts: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    paid: int = 0
    others: int = 0


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Return all figures, for a large KV cache and for one that is too small for all agents."""
    work = _chosen(settings)
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as name:
        checkpoint = make_checkpoint(_MODEL, Path(name))
        for cache, way in product(_CACHES, _ways()):
            with phases.part(f"{cache}, {way}"):
                is_scarce = cache == "scarce"
                found = (
                    agents_peer.run(checkpoint, Path(name), work, is_scarce, settings.threads or THREADS)
                    if way == agents_peer.NAME
                    else _run(checkpoint.path, work, way, is_scarce)
                )
                figures.append({"cache": cache, "way": way} | found)
    _show(console, work, figures)
    return {"agents": work.agents, "calls": work.calls, "context_tokens": work.context, "figures": figures}


def _chosen(settings: BenchSettings) -> AgentWork:
    return AgentWork(3, 2, 96, 8, 8, 128) if settings.quick else AgentWork(8, 10, 2_000)


def _ways() -> list[str]:
    return [*_LOOPS, *((agents_peer.NAME,) if agents_peer.is_there() else ()), _INSIDE]


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each case, with a large KV cache and with one that is too small."""
    work, checkpoint = _chosen(settings), planned_checkpoint(_MODEL)
    size = work.answer + work.result
    once = work.agents * work.total
    again = work.agents * sum(work.context + call * size for call in range(work.calls + 1))
    num_steps = (work.calls + 1) * (work.answer + 1)
    found = {}
    for cache in _CACHES:
        others = work.agents * work.calls * work.other if cache == "scarce" else 0
        for way in _ways():
            is_again = way == "client, no cache" or (way == "client, prefix cache" and cache == "scarce")
            found[f"{cache}, {way}"] = limits.seconds(checkpoint, (again if is_again else once) + others, num_steps)
    return found


def _run(folder: Path, work: AgentWork, way: str, is_scarce: bool) -> dict[str, Any]:
    from bridle.backends import load_executor

    # Scarce: the cache holds only what runs at one time. Large: the cache holds all conversations.
    per_agent, per_other = -(-work.total // _BLOCK) + 1, -(-work.other // _BLOCK) + 1
    num_blocks = work.agents * (per_agent + per_other) * (1 if is_scarce else work.calls + 1)
    executor = load_executor(ModelConfig(str(folder), num_blocks=num_blocks, block_size=_BLOCK, warm_up=False))
    config = EngineConfig(**{"park_memory": 1 << 40} | _LOOPS.get(way, {}))
    engine = Engine(executor, config, pools=[PythonControllerPool(executor.info.vocab_size)])
    with AsyncEngine(engine) as client:
        tally = asyncio.run(_agents(client, work, way, is_scarce))
        statistics = client.statistics()
    return _figures(work, tally, statistics)


def _figures(work: AgentWork, tally: AgentTally, statistics: EngineStatistics) -> dict[str, Any]:
    computed = statistics.num_computed_tokens - tally.others
    return {
        "first_token_seconds": median(tally.firsts),
        "first_token_steps": median(tally.steps),
        "computed_tokens": computed,
        "computed_twice": computed - work.agents * (work.total - 1),
        "paid_tokens": tally.paid,
        "park_hits": statistics.num_park_hits,
        "preemptions": statistics.num_preemptions,
    }


async def _agents(client: AsyncEngine, work: AgentWork, way: str, is_scarce: bool) -> AgentTally:
    tally = AgentTally()
    agent = _inside if way == _INSIDE else _outside
    async with asyncio.TaskGroup() as group:
        for number in range(work.agents):
            group.create_task(agent(client, work, number, is_scarce, tally))
    return tally


async def _tool(
    client: AsyncEngine, work: AgentWork, number: int, call: int, is_scarce: bool, tally: AgentTally
) -> None:
    """Simulate a tool call of an agent: if the KV cache is scarce, another user sends a request meanwhile."""
    if not is_scarce:
        await asyncio.sleep(0)
        return
    prompt = tokens_of(1_000_000 + number * 1_000 + call, work.other)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    async for _ in client.submit(
        Request(f"other-{number}-{call}", prompt, sampling, tenant="others", detokenize=False)
    ):
        pass
    tally.others += work.other


@dataclass(frozen=True, slots=True)
class _Enough:
    """A stopping criterion that ends an output after `count` tokens, like the end of a call."""

    count: int

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> str | None:
        return "call" if len(tokens) - num_prompt >= self.count else None


async def _outside(client: AsyncEngine, work: AgentWork, number: int, is_scarce: bool, tally: AgentTally) -> None:
    """Run one agent as a loop in the client, in which each call is a request with the whole conversation."""
    said = list(tokens_of(number, work.context))
    sampling = SamplingParams(max_tokens=work.answer + 1, temperature=0.0, ignore_eos=True)
    for call in range(work.calls + 1):
        request = Request(
            f"agent-{number}-{call}",
            tuple(said),
            sampling,
            stopping=(_Enough(work.answer),),
            tenant="agents",
            detokenize=False,
            parks=call < work.calls,
            continues=f"agent-{number}-{call - 1}",
        )
        began, is_first, steps = time.perf_counter(), True, _steps(client)
        async for events in client.submit(request):
            for event in _good(events):
                if isinstance(event, TokenEvent):
                    if is_first and call:
                        tally.firsts.append(time.perf_counter() - began)
                        tally.steps.append(_steps(client) - steps)
                    is_first = False
                    said.append(event.token)
        tally.paid += len(request.prompt) + work.answer
        if call < work.calls:
            await _tool(client, work, number, call, is_scarce, tally)
            said += tokens_of(500_000 + number * 1_000 + call, work.result)


class _Agent(Controller):
    """The agent's loop inside the engine: it waits for each result, and writes the result itself."""

    def __init__(
        self, work: AgentWork, number: int, wants: Callable[[], object], num_results: Callable[[], int]
    ) -> None:
        self.work, self.number, self.wants, self.num_results = work, number, wants, num_results
        self.num_written, self.num_asked = 0, 0

    def next(self, view: SequenceView) -> Decision:
        size = self.work.answer + self.work.result
        is_at_call = len(view.tokens) - view.num_prompt == self.num_written * size + self.work.answer
        if not is_at_call or self.num_written == self.work.calls:
            return Decision.sample()
        if self.num_asked == self.num_written:
            self.num_asked += 1
            self.wants()
        if self.num_results() == self.num_written:
            return Decision.wait()
        self.num_written += 1
        return Decision.splice(0, tokens_of(500_000 + self.number * 1_000 + self.num_written - 1, self.work.result))


async def _inside(client: AsyncEngine, work: AgentWork, number: int, is_scarce: bool, tally: AgentTally) -> None:
    loop, wanted = asyncio.get_running_loop(), asyncio.Event()
    given, steps, results, was_forced = [0.0], [0], [0], False
    agent = _Agent(work, number, lambda: loop.call_soon_threadsafe(wanted.set), lambda: results[0])

    async def tools() -> None:
        for call in range(work.calls):
            await wanted.wait()
            wanted.clear()
            await _tool(client, work, number, call, is_scarce, tally)
            given[0], steps[0] = time.perf_counter(), _steps(client)
            results[0] += 1

    prompt = tokens_of(number, work.context)
    sampling = SamplingParams(max_tokens=work.total - work.context, temperature=0.0, ignore_eos=True)
    request = Request(f"agent-{number}", prompt, sampling, agent, tenant="agents", detokenize=False)
    serving = asyncio.create_task(tools())
    async for events in client.submit(request):
        for event in _good(events):
            if not isinstance(event, TokenEvent):
                continue
            if was_forced and not event.forced:
                tally.firsts.append(time.perf_counter() - given[0])
                tally.steps.append(_steps(client) - steps[0])
            was_forced = event.forced
    await serving
    tally.paid += work.total


def _steps(client: AsyncEngine) -> int:
    return client.statistics().num_steps


def _good(events: list[Event]) -> list[Event]:
    """Return the events; raise the error that one of them reports."""
    for event in events:
        if isinstance(event, Finished) and event.error is not None:
            raise event.error
    return events


def _show(console: Console, work: AgentWork, figures: list[dict[str, Any]]) -> None:
    from rich.table import Table

    title = f"{work.agents} agents of {work.calls} calls over {work.context} tokens"
    table = Table(title=title, title_justify="left")
    for name in ("cache", "run as", "first token, ms", "steps", "computed", "of them twice", "paid for", "preempted"):
        table.add_column(name, justify="left" if name in ("cache", "run as") else "right")
    for each in figures:
        counts = (each[name] for name in ("computed_tokens", "computed_twice", "paid_tokens", "preemptions"))
        first = f"{1e3 * each['first_token_seconds']:.1f}"
        steps = "-" if each["first_token_steps"] is None else f"{each['first_token_steps']:g}"
        table.add_row(each["cache"], each["way"], first, steps, *(f"{count:,}" for count in counts))
    console.print(table)
    if agents_peer.is_there():
        console.print("llama.cpp runs through its Python objects as its server uses them: one request at a time.")
    else:
        console.print(f"llama.cpp stands beside these where it is there: {install_hint('llamacpp')} gguf")
