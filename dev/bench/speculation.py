"""Measures the gain from draft tokens: the same requests without draft tokens, with a fixed number, and with `auto`.

The benchmark has three parts. The first part uses real text on the demo model: editing and copying (alone and under a
Wasm controller), JSON, and free text. The second part uses a model of real size, with texts that do not repeat
themselves. This model gets predictions of which a chosen share of tokens is right, from all to none. The model also
gets two draft models: one that is always right, and one that is never right. The third part compares the gains with
those of transformers and llama.cpp, on the same weights and the same task. Every run with draft tokens must give the
same tokens as the plain run. Ratios of processor time are reported as well, because they are reliable on busy machines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bridle.aici.client import WasmController
from bridle.bench.checkpoints import make_checkpoint, planned_checkpoint
from bridle.bench.control_guests import trivial
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.errors import InternalError
from bridle.sampling import AUTO_DRAFTS, SamplingParams
from dev.bench.speculation_peers import assisted, gain, prompt_lookup

if TYPE_CHECKING:
    from rich.console import Console

    from bridle import LLM

_NOTE = "The keeper of the garden waters the roses in the morning and closes the gate in the evening. "
_SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": ["yes", "no"]} for name in ("first", "second", "third", "fourth")},
    "required": ["first", "second", "third", "fourth"],
    "additionalProperties": False,
}
_LIST = {"type": "array", "items": _SCHEMA, "minItems": 8, "maxItems": 8}
#: Draft tokens per step; `auto` chooses the number. The difference between `none` and `none again` is the noise of all
#: ratios.
_WAYS = {"none": 0, "none again": 0, "4": 4, "8": 8, "auto": AUTO_DRAFTS}
#: Tasks whose rounds are shorter than this have up to `_MORE` times as many rounds.
_ROUND_SECONDS, _MORE = 3.0, 4
_SHARES = (1.0, 0.8, 0.5, 0.0)
_REAL_TEXT, _COPYING = "real text, demo", "copying, demo"
#: Rough seconds for `MachineLimits.python`: a step of the demo model, and the loading of this model and its peers.
_DEMO_SECONDS, _LOAD_SECONDS = 3e-3, 8.0


@dataclass(frozen=True, slots=True)
class DraftTask:
    """A task: requests that each sample `num_tokens` tokens after the prompt."""

    name: str
    prompt: str | tuple[int, ...]
    num_tokens: int
    temperature: float = 0.0
    constraint: dict[str, Any] | None = None
    predictions: tuple[tuple[int, ...], ...] = ()  # one for each seed
    module: str | None = None  # a Wasm controller that steers them

    def sampling(self, speculate: int, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.num_tokens,
            temperature=self.temperature,
            seed=seed,
            ignore_eos=self.constraint is None,
            speculate=speculate,
            prediction_ids=self.predictions[seed] if speculate and self.predictions else (),
        )


@dataclass(frozen=True, slots=True)
class SpeculationRun:
    """Times of one run of a task in seconds, and its outputs."""

    seconds: float
    processor: float
    outputs: list[list[int]]
    accepted: float  # share of accepted draft tokens


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Return the seconds of each task by the number of draft tokens, and the speedup compared to no draft tokens."""
    batches, num_rounds = _batches(settings), _num_rounds(settings)
    with phases.part(_REAL_TEXT):
        figures = _real_text(batches, num_rounds, settings.quick)
    draft_models: dict[str, dict[str, float]] = {}
    for size in _sizes(settings):
        rounds = _num_rounds(settings, size)
        with phases.part(f"{size}: shares of drafts that are right"):
            figures += _chosen_shares(size, batches, rounds, settings.quick)
        with phases.part(f"{size}: draft models"):
            found, draft_models[size] = _draft_models(size, batches, rounds, settings.quick)
            figures += found
    with phases.part(_COPYING):
        copied = _copying(num_rounds)
    _print_table(
        console, figures, {"copying, demo": copied} | {f"draft model, {k}": v for k, v in draft_models.items()}
    )
    return {"num_rounds": num_rounds, "figures": figures, "prompt_lookup": copied, "draft_model": draft_models}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each part. They assume a step for each token that is sampled without draft
    tokens. A step of the demo model spends its time mostly in Python, not in reading memory."""
    batches = _batches(settings)
    length = 48 if settings.quick else 128
    lengths = (length, length, 64, 400, length, length)  # of all tasks over real text
    steps = [limits.python(_DEMO_SECONDS) * (1 + batch / 8) for batch in batches]
    cells = [_cell(tokens * step, _num_rounds(settings)) for tokens in lengths for step in steps]
    found = {_REAL_TEXT: limits.python(_LOAD_SECONDS) + sum(cells)}
    for size in _sizes(settings):
        checkpoint, length = planned_checkpoint(size), 24 if settings.quick else 48
        rounds = _num_rounds(settings, size)
        runs = [limits.seconds(checkpoint, batch * (64 + length), length) for batch in batches]
        cells = [_cell(run, rounds) for run in runs]
        found[f"{size}: shares of drafts that are right"] = len(_SHARES) * sum(cells)
        found[f"{size}: draft models"] = 1.5 * (2 * sum(cells) + 4 * rounds * sum(runs))
    return found | {_COPYING: limits.python(_LOAD_SECONDS + 6 * _num_rounds(settings) * 96 * _DEMO_SECONDS)}


def _cell(run: float, num_rounds: int) -> float:
    """Return the estimated seconds of one row of the table, whose runs take `run` seconds each."""
    a_round = len(_WAYS) * run
    return a_round + max(num_rounds * a_round, min(_MORE * a_round, _ROUND_SECONDS) * num_rounds)


def _batches(settings: BenchSettings) -> tuple[int, ...]:
    return settings.batches or ((1,) if settings.quick else (1, 16))


def _sizes(settings: BenchSettings) -> tuple[str, ...]:
    return settings.model_sizes or (("20m",) if settings.quick else ("20m", "0.5b"))


def _num_rounds(settings: BenchSettings, size: str = "20m") -> int:
    rounds = 2 if settings.quick else 7
    return rounds if size == "20m" else min(rounds, 3)


def _real_text(batches: Sequence[int], num_rounds: int, quick: bool) -> list[dict[str, Any]]:
    from bridle import LLM

    length = 48 if quick else 128
    tasks = [
        DraftTask("copying", _NOTE * 4, length),
        DraftTask("JSON under a schema", "Answer: ", 64, 0.8, {"json_schema": _SCHEMA}),
        DraftTask("a list of these", "Answer: ", 400, 0.8, {"json_schema": _LIST}),
        DraftTask("free text", "The first thing one notices is ", length, 0.8),
    ]
    with LLM("demo", control=True) as llm:
        edited = replace(tasks[-1], name="editing: one token in ten is changed", temperature=0.8)
        tasks.insert(0, _predicted(llm, edited, 0.9, max(batches)))
        tasks.append(replace(tasks[1], name="copying, steered by Wasm", module=llm.upload(trivial())))
        return [each for task in tasks for batch in batches for each in _compare(llm, "demo", task, batch, num_rounds)]


def _predicted(llm: LLM, task: DraftTask, share: float, batch: int) -> DraftTask:
    """Return the task with predictions of which the given share of tokens is right, at random positions, as from a good
    or a bad drafter."""
    random, size = Random(7), llm.tokenizer.vocab_size
    told = [
        tuple(token if random.random() < share else random.randrange(3, size) for token in truth)
        for truth in _run(llm, task, batch, 0)[1]
    ]
    return replace(task, predictions=tuple(told))


def _chosen_shares(size: str, batches: Sequence[int], num_rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Measure predictions of texts without repetitions. The texts are sampled, rather than the most probable ones, from
    a model with random weights."""
    from bridle import LLM

    length = 24 if quick else 48
    random, found = Random(7), []
    prompt = tuple(random.randrange(3, 8_000) for _ in range(64))
    with TemporaryDirectory() as folder, LLM(str(make_checkpoint(size, Path(folder)).path), tokenizer="demo") as llm:
        for share in _SHARES:
            task = _predicted(
                llm, DraftTask(f"{share:.0%} right", prompt, length, temperature=1.0), share, max(batches)
            )
            for batch in batches:
                found += _compare(llm, size, task, batch, num_rounds)
    return found


def _compare(llm: LLM, model: str, task: DraftTask, batch: int, num_rounds: int) -> list[dict[str, Any]]:
    """and a warm-up"""
    expected, *_ = [_timed(llm, task, batch, number).outputs for number in _WAYS.values()]  # and each way is warm
    runs: dict[str, list[SpeculationRun]] = {way: [] for way in _WAYS}
    ways, order, began = list(_WAYS), Random(7), time.perf_counter()
    while _is_short(len(runs["none"]), time.perf_counter() - began, num_rounds):
        order.shuffle(ways)
        for way in ways:
            runs[way].append(run := _timed(llm, task, batch, _WAYS[way]))
            if batch == 1 and run.outputs != expected:
                raise InternalError(f"{task.name}: with {way} drafts the output is another one")
    return [_figure(model, task, batch, way, runs["none"], runs[way]) for way in _WAYS]


def _is_short(done: int, seconds: float, num_rounds: int) -> bool:
    """Return whether another round is needed; short rounds are repeated more often, because they vary more and cost
    less."""
    return done < num_rounds or (done < _MORE * num_rounds and seconds < _ROUND_SECONDS * num_rounds)


def _figure(
    model: str, task: DraftTask, batch: int, way: str, plain: Sequence[SpeculationRun], runs: Sequence[SpeculationRun]
) -> dict[str, Any]:
    return {
        "model": model,
        "task": task.name,
        "sequences": batch,
        "drafts": way,
        "seconds": median(run.seconds for run in runs),
        "over_none": _ratio([run.seconds for run in plain], [run.seconds for run in runs]),
        "processor_over_none": _ratio([run.processor for run in plain], [run.processor for run in runs]),
        "accepted": runs[-1].accepted,
    }


def _ratio(plain: Sequence[float], drafted: Sequence[float]) -> float:
    """Return the median over rounds of each round's ratio, so that disturbances of both runs in a round cancel out."""
    return median(one / other for one, other in zip(plain, drafted, strict=True))


def _timed(llm: LLM, task: DraftTask, batch: int, speculate: int) -> SpeculationRun:
    began, processor = time.perf_counter(), time.process_time()
    usages, outputs = _run(llm, task, batch, speculate)
    spent, processor = time.perf_counter() - began, time.process_time() - processor
    drafted = sum(usage.drafted_tokens for usage in usages)
    accepted = sum(usage.accepted_tokens for usage in usages) / drafted if drafted else 0.0
    return SpeculationRun(spent, processor, outputs, accepted)


def _run(llm: LLM, task: DraftTask, batch: int, speculate: int) -> tuple[list[Any], list[list[int]]]:
    results = llm.generate(
        [task.prompt] * batch,
        [task.sampling(speculate, seed) for seed in range(batch)],
        constraint=task.constraint,
        controller=None if task.module is None else WasmController(task.module),
        use_tqdm=False,
    )
    outputs = [result.outputs[0] for result in results]
    return [output.usage for output in outputs], [output.token_ids for output in outputs]


def _draft_models(
    size: str, batches: Sequence[int], num_rounds: int, quick: bool
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure two draft models: one that is always right, and one that is never right. Also returns the speedup by the
    first one, in bridle and in transformers."""
    from bridle import LLM
    from dev.bench.draft_pairs import make_pair

    length, random, found = 24 if quick else 48, Random(7), []
    ids = [random.randrange(3, 8_000) for _ in range(64)]
    task = DraftTask("", tuple(ids), length)
    with TemporaryDirectory() as folder:
        target, right, wrong = make_pair(size, Path(folder))
        for name, draft in (("right", right), ("wrong", wrong)):
            with LLM(str(target), draft_model=str(draft)) as llm:
                for batch in batches:
                    found += _compare(llm, size, replace(task, name=f"draft model, {name}"), batch, num_rounds)
                if draft is right:
                    ours = gain(lambda: _run(llm, task, 1, 0), lambda: _run(llm, task, 1, 8), num_rounds)
        theirs = assisted(target, right, ids, length, num_rounds)
    return found, {"bridle": ours, "transformers": theirs}


def _copying(num_rounds: int) -> dict[str, float]:
    """Return the speedup by prompt lookup on a copying task, in bridle and in other programs, each relative to itself
    without draft tokens."""
    from bridle import LLM

    task = DraftTask("copying", _NOTE * 4, 96)
    with LLM("demo") as llm:
        ids = llm.tokenizer.encode(str(task.prompt))
        ours = gain(lambda: _run(llm, task, 1, 0), lambda: _run(llm, task, 1, AUTO_DRAFTS), num_rounds)
    return {"bridle": ours} | prompt_lookup(ids, task.num_tokens, num_rounds)


def _print_table(console: Console, figures: list[dict[str, Any]], peers: dict[str, dict[str, float]]) -> None:
    from rich.table import Table

    table = Table(title="speed with drafted tokens, over that without (by processor time)")
    for heading in ("model", "task", "sequences", *list(_WAYS)[1:], "accepted by auto"):
        table.add_column(heading, justify="left" if heading in ("model", "task") else "right")
    size = len(_WAYS)
    for start in range(0, len(figures), size):
        _, *drafted = figures[start : start + size]
        first = drafted[0]
        ratios = [f"{each['over_none']:.2f} ({each['processor_over_none']:.2f})" for each in drafted]
        table.add_row(first["model"], first["task"], str(first["sequences"]), *ratios, f"{drafted[-1]['accepted']:.0%}")
    console.print(table)
    for what, gains in peers.items():
        console.print(
            f"{what}, over itself without: " + ", ".join(f"{name} {value:.2f}" for name, value in gains.items())
        )
