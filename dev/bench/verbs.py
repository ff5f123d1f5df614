"""Benchmark of the operations that controllers request, such as forced tokens and forks.

The benchmark measures how a sequence that forces tokens affects other sequences, and what controllers cost apart from
steps. It also compares a program that uses these operations with the same program as requests over the prefix cache.
Figures are medians of runs that take turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.aici.client import RuntimePool, WasmController
from bridle.bench.checkpoints import make_checkpoint, planned_checkpoint
from bridle.bench.control import print_table
from bridle.bench.control_device import Borrowed, drain, runtime_pool, upload
from bridle.bench.control_guests import write_tokenizer
from bridle.bench.control_programs import GREEDY, KeptExecutor, load, prompt_of, steps_with
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.config import EngineConfig
from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.engine import Branch, Decision, Engine, Request, Splice
from bridle.engine.interfaces import Executor
from bridle.outputs import TokenEvent
from dev.bench import control_costs as costs
from dev.bench import control_guests as guests

if TYPE_CHECKING:
    from rich.console import Console

_VOCAB_SIZE = 32_000
_MODEL = "20m"
THREADS = 1
_NEIGHBOURS, _VERBS, _EACH_TOKEN = "19 neighbours of one", "one program, three ways", "a mask for every token, two ways"
_STARTUP, _LONG_FORK = "uploads and instances", "fork of a long sequence"
#: Rough seconds for `MachineLimits.python`: a control runtime's start, uploads, a fork, and a request.
_POOL_SECONDS, _UPLOAD_SECONDS, _FORK_SECONDS, _REQUEST_SECONDS = 5.0, 2.5, 0.1, 5e-3


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Return all figures, in milliseconds unless a name says otherwise."""
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as name:
        folder = Path(name)
        figures = _on_a_model(folder, settings, phases)
        with phases.part(_STARTUP):
            tokenizer = write_tokenizer(folder / "tokenizer", _VOCAB_SIZE)
            figures["startup"] = costs.startup(tokenizer, folder, _VOCAB_SIZE, quick=settings.quick)
    with phases.part(_LONG_FORK):
        figures["long_fork"] = costs.long_fork(quick=settings.quick)
    _print_tables(console, figures)
    return figures


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Estimate the seconds of each part: steps of 20 sequences, programs in rounds, and parts without a model, whose
    times are known."""
    checkpoint, is_quick = planned_checkpoint(_MODEL), settings.quick
    steps = 4 * (20 if is_quick else 3 * 60)
    program = _BRANCHES * (_JUDGE + _THINK + _FINAL + _ANSWER)
    cached = limits.seconds(checkpoint, _PROMPT + program, _DRAFT + _THINK + _ANSWER)
    anew = limits.seconds(checkpoint, 3 * _BRANCHES * _PROMPT, _DRAFT + _THINK + _ANSWER)
    num_tokens, rounds = (16, 1) if is_quick else (48, 5)
    masked = limits.seconds(checkpoint, 2 * _PROMPT, 2 * num_tokens) + limits.python(num_tokens * _REQUEST_SECONDS)
    return {
        _NEIGHBOURS: limits.python(_POOL_SECONDS) + limits.seconds(checkpoint, 20 * steps, steps),
        _VERBS: (1 if is_quick else 5) * (2 * cached + anew),
        _EACH_TOKEN: rounds * masked,
        _STARTUP: limits.python(_UPLOAD_SECONDS * (1 if is_quick else 6)),
        _LONG_FORK: limits.python(_FORK_SECONDS * 2 * (3 if is_quick else 9)),
    }


def _on_a_model(folder: Path, settings: BenchSettings, phases: Phases) -> dict[str, Any]:
    checkpoint = make_checkpoint(_MODEL, folder)
    tokenizer = write_tokenizer(checkpoint.path, checkpoint.vocab_size) / "tokenizer.json"
    executor = load(checkpoint.path, settings.threads or THREADS)
    limit = ("--wasm-max-step-time", "500")
    try:
        with (
            phases.part(_NEIGHBOURS),
            runtime_pool(tokenizer, folder / "store", checkpoint.vocab_size, *limit) as pool,
        ):
            figures: dict[str, Any] = {"neighbours": neighbours(executor, pool, quick=settings.quick)}
        with phases.part(_VERBS):
            figures["verbs"] = verbs(executor, quick=settings.quick)
        with phases.part(_EACH_TOKEN):
            figures["each_token"] = steering_each_token(executor, quick=settings.quick)
        return figures
    finally:
        executor.close()


def _print_tables(console: Console, figures: dict[str, Any]) -> None:
    print_table(console, f"latency between tokens of {_NEIGHBOURS}", figures["neighbours"])
    print_table(console, _VERBS, figures["verbs"])
    print_table(console, _EACH_TOKEN, figures["each_token"])
    startup = dict(figures["startup"])
    print_table(console, "uploads", [{"module": name, **values} for name, values in startup.pop("uploads").items()])
    print_table(console, "instances", [startup])
    print_table(console, f"{_LONG_FORK}; ms per fork", figures["long_fork"])


# -- neighbours --------------------------------------------------------------------------------------------


def neighbours(executor: Executor, pool: RuntimePool, *, quick: bool) -> list[dict[str, Any]]:
    """Return the inter-token latency of 19 sequences beside a 20th sequence. It only samples, forces 5 tokens in each
    step, or forces 3,000 tokens at once. The last case is also measured with a budget of 64 tokens per step."""
    five, many = guests.splice([400, 401, 402, 403, 404]), guests.splice(prompt_of(99, 3_000))
    num_steps = 20 if quick else 60
    at_once = [*[guests.SAMPLE] * 4, many, guests.SAMPLE]
    answers: dict[str, tuple[list[str], int | None]] = {
        "draws": ([guests.SAMPLE], None),
        "forces 5 in each step": ([guests.SAMPLE, guests.SAMPLE, five], None),
        "forces 3,000 at once": (at_once, None),
        "the same, 64 tokens a step": (at_once, 64),
    }
    figures: list[dict[str, Any]] = []
    for kind, (program, budget) in answers.items():
        module = upload(pool, guests.script(program))
        gaps: list[float] = []
        missed = 0
        for _ in range(1 if quick else 3):
            more, less = _gaps(executor, pool, module, num_steps, budget)
            gaps, missed = gaps + more, missed + less
        gaps.sort()
        figures.append(
            {
                "one": kind,
                "p50_milliseconds": 1e3 * median(gaps),
                "p99_milliseconds": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
                "max_milliseconds": 1e3 * gaps[-1],
                "steps_without_a_token": missed,
            }
        )
    return figures


def _gaps(
    executor: Executor, pool: RuntimePool, module: str, num_steps: int, budget: int | None
) -> tuple[list[float], int]:
    """Return the seconds between the tokens of the other sequences, and how often a step gave such a sequence
    no token."""
    config = EngineConfig(step_timeout=0.5, max_num_batched_tokens=budget)
    engine = Engine(KeptExecutor(executor), config, pools=[Borrowed(pool)])
    names = {f"n{number}" for number in range(19)}
    for number, name in enumerate(sorted(names)):
        engine.add(Request(name, prompt_of(number, 32), GREEDY, detokenize=False))
    steps_with(engine, 19, 2)
    forcing = WasmController(module)
    engine.add(Request("one", prompt_of(50, 32), GREEDY, controller=forcing, detokenize=False))
    last: dict[str, float] = {}
    gaps: list[float] = []
    missed = 0
    for _ in range(num_steps):
        events = engine.step()
        now = time.perf_counter()
        got = {event.request_id for event in events if isinstance(event, TokenEvent)} & names
        missed += len(names - got)
        gaps += [now - last[name] for name in got if name in last]
        last.update(dict.fromkeys(got, now))
    drain(engine, pool)
    return gaps, missed


# -- verbs against requests --------------------------------------------------------------------------------

_PROMPT, _DRAFT, _JUDGE, _THINK, _FINAL, _ANSWER, _BRANCHES = 600, 16, 20, 24, 8, 8, 4


class Tree(Controller):
    """Writes a draft and then forks. Each branch gets an instruction, some thinking that is rolled back, a last
    instruction, and an answer."""

    max_rewind = _THINK

    def __init__(self) -> None:
        self.phase = 0

    def next(self, view: SequenceView) -> Decision:
        length = len(view.tokens) - view.num_prompt
        if self.phase == 0 and length == _DRAFT:
            self.phase = 1
            return Decision.fork(Branch(sample=False, splices=(Splice(0, _judge(i)),)) for i in range(_BRANCHES))
        if self.phase == 1 and length == _DRAFT + _JUDGE + _THINK:
            self.phase = 2
            return Decision.splice(_THINK, _final())
        if self.phase == 2 and length == _DRAFT + _JUDGE + _FINAL + _ANSWER:
            return Decision.stop()
        return Decision.sample()


def _judge(branch: int) -> tuple[int, ...]:
    return prompt_of(200 + branch, _JUDGE)


def _final() -> tuple[int, ...]:
    return prompt_of(300, _FINAL)


def verbs(executor: Executor, *, quick: bool) -> list[dict[str, Any]]:
    """Run the program `Tree` as one controlled request, and as requests that each repeat the text so far, with and
    without the prefix cache. Runs take turns, and figures are medians."""
    ways: dict[str, tuple[Callable[[Engine], list[list[int]]], bool]] = {
        "engine verbs": (_by_verbs, True),
        "requests, prefix cache": (_by_requests, True),
        "requests, no cache": (_by_requests, False),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    answers: dict[str, list[list[int]]] = {}
    for _ in range(1 if quick else 5):
        for name, (run, caching) in ways.items():
            pools = [PythonControllerPool(executor.info.vocab_size)]
            engine = Engine(KeptExecutor(executor), EngineConfig(enable_prefix_caching=caching), pools=pools)
            begin = time.perf_counter()
            answers[name] = run(engine)
            seconds = time.perf_counter() - begin
            statistics = engine.statistics()
            runs[name].append(
                {
                    "milliseconds": 1e3 * seconds,
                    "computed_tokens": statistics.num_computed_tokens,
                    "billed_prompt_tokens": statistics.num_prompt_tokens,
                    "steps": statistics.num_steps,
                    "requests": statistics.num_requests,
                }
            )
    same = answers["engine verbs"]
    return [
        {"way": name, "same_answers": answers[name] == same}
        | {field: median(run[field] for run in values) for field in values[0]}
        for name, values in runs.items()
    ]


def steering_each_token(executor: Executor, *, quick: bool) -> list[dict[str, Any]]:
    """Mask every token by one controlled request, and by one request per token over the prefix cache, with the mask as
    a bias. Runs take turns, and figures are medians."""
    num_tokens, rounds = (16, 1) if quick else (48, 5)
    runs: dict[str, list[dict[str, Any]]] = {"engine verbs": [], "a request for each token": []}
    for _ in range(rounds):
        for way, values in runs.items():
            pools = [PythonControllerPool(executor.info.vocab_size)]
            engine = Engine(KeptExecutor(executor), pools=pools)
            begin = time.perf_counter()
            if way == "engine verbs":
                controller = Masking(num_tokens)
                _run(engine, [Request("one", prompt_of(1, _PROMPT), GREEDY, controller=controller, detokenize=False)])
            else:
                _token_by_token(engine, num_tokens)
            statistics = engine.statistics()
            values.append(
                {
                    "milliseconds_per_token": 1e3 * (time.perf_counter() - begin) / num_tokens,
                    "computed_tokens": statistics.num_computed_tokens,
                    "billed_prompt_tokens": statistics.num_prompt_tokens,
                    "requests": statistics.num_requests,
                }
            )
    return [
        {"way": way, "tokens": num_tokens} | {field: median(run[field] for run in values) for field in values[0]}
        for way, values in runs.items()
    ]


def _allowed(step: int) -> list[int]:
    return list(range(400 + step, 460 + step))


class Masking(Controller):
    """Applies a different mask to each token."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def next(self, view: SequenceView) -> Decision:
        step = len(view.tokens) - view.num_prompt
        return Decision.stop() if step == self.num_tokens else Decision.sample(view.mask_of(_allowed(step)))


def _token_by_token(engine: Engine, num_tokens: int) -> None:
    tokens = prompt_of(1, _PROMPT)
    vocab_size = engine.info.vocab_size
    for step in range(num_tokens):
        allowed = set(_allowed(step))
        bias = {token: -100.0 for token in range(vocab_size) if token not in allowed}
        sampling = GREEDY.with_(max_tokens=1, logit_bias=bias)
        tokens += tuple(_run(engine, [Request(f"t{step}", tokens, sampling, detokenize=False)])[0])


def _by_verbs(engine: Engine) -> list[list[int]]:
    request = Request("tree", prompt_of(1, _PROMPT), GREEDY, controller=Tree(), detokenize=False)
    return _run(engine, [request])


def _by_requests(engine: Engine) -> list[list[int]]:
    """Return the texts of a client without controllers, which waits for each part and then sends the whole text
    so far."""
    prompt = prompt_of(1, _PROMPT)
    (draft,) = _run(engine, [_plain("draft", prompt, _DRAFT)])
    starts = [(*prompt, *draft, *_judge(branch)) for branch in range(_BRANCHES)]
    _run(engine, [_plain(f"think {i}", start, _THINK) for i, start in enumerate(starts)])
    return _run(engine, [_plain(f"answer {i}", (*start, *_final()), _ANSWER) for i, start in enumerate(starts)])


def _plain(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(name, prompt, GREEDY.with_(max_tokens=max_tokens), detokenize=False)


def _run(engine: Engine, requests: Iterable[Request]) -> list[list[int]]:
    """Return the last `_ANSWER` tokens of each output, in order; all tokens of an output that has fewer."""
    drawn: dict[tuple[str, int], list[int]] = {}
    names = []
    for request in requests:
        names.append(request.id)
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent) and not event.forced:
                drawn.setdefault((event.request_id, event.index), []).append(event.token)
    keys = sorted(drawn, key=lambda key: (names.index(key[0]), key[1]))
    return [drawn[key] if len(names) == 1 and names[0] == "draft" else drawn[key][-_ANSWER:] for key in keys]
