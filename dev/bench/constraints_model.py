"""Compares constrained requests with unconstrained ones on a real forward pass, for `bridle bench constraints`.

A model with random weights writes texts under two JSON schemas. The first schema is one long text without forced
tokens, so the difference in speed is the cost of masks. The second schema has records, whose fields have random lengths
within their bounds. The speed is counted over steps in which all sequences decode, once for sampled tokens and once for
all tokens. With a share f of forced tokens, the speed of all tokens is at most 1 / (1 - f) times that of unconstrained
text. The speed is nearly the same if computing a token costs as much as sampling one, as on a busy CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.bench.control_programs import KeptExecutor, load, prompt_of
from bridle.engine import Engine, Request
from bridle.outputs import Finished, TokenEvent
from bridle.sampling import SamplingParams
from bridle.structured_output import Constraint, ConstraintPool, GrammarVocabulary, JsonSchema

if TYPE_CHECKING:
    from bridle.bench.phases import MachineLimits
    from bridle.bench.settings import BenchSettings
    from bridle.engine.interfaces import Executor

_BATCHES = (16, 64)
_PROMPT_TOKENS = 32
_WARM_UP = 4
_VOCABULARY_SECONDS = 12e-6  # a token of a generated vocabulary, for `MachineLimits.python`

TEXT = JsonSchema({"type": "string", "minLength": 5_000})
RECORDS = JsonSchema(
    {
        "type": "array",
        "minItems": 400,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 4, "maxLength": 24},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "colour": {"enum": ["red", "green", "blue"]},
                "scores": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
                "is_member": {"type": "boolean"},
            },
            "required": ["name", "age", "colour", "scores", "is_member"],
            "additionalProperties": False,
        },
    }
)


@dataclass(frozen=True, slots=True)
class StepsRun:
    """Counts of some steps: seconds, sampled tokens and forced tokens."""

    seconds: float
    sampled: int
    forced: int


def _sizes(settings: BenchSettings) -> tuple[str, ...]:
    return settings.model_sizes or (("20m",) if settings.quick else ("0.5b",))


def guess_beside_free(settings: BenchSettings, limits: MachineLimits) -> float:
    """Return the estimated seconds of `beside_free`: unconstrained text and two schemas, each with prompts and warm-up
    steps."""
    from bridle.bench.checkpoints import planned_checkpoint

    num_steps, rounds = _scale(settings)
    seconds = 0.0
    for checkpoint in map(planned_checkpoint, _sizes(settings)):
        for batch in settings.batches or _BATCHES:
            steps = _WARM_UP + num_steps
            seconds += 3 * rounds * limits.seconds(checkpoint, batch * (_PROMPT_TOKENS + steps), steps)
        seconds += limits.python(checkpoint.vocab_size * _VOCABULARY_SECONDS)
    return seconds


def beside_free(
    folder: Path, settings: BenchSettings, make_vocabulary: Callable[[int], GrammarVocabulary]
) -> list[dict[str, Any]]:
    """Return a row for each model, number of simultaneous requests and schema. The three kinds of runs alternate;
    figures are medians."""
    from bridle.bench.checkpoints import make_checkpoint

    rows = []
    for size in _sizes(settings):
        checkpoint = make_checkpoint(size, folder)
        vocabulary = make_vocabulary(checkpoint.vocab_size)
        executor = load(checkpoint.path, settings.threads)
        try:
            for batch in settings.batches or _BATCHES:
                rows += [{"model": size, **row} for row in _compared(executor, vocabulary, batch, *_scale(settings))]
        finally:
            executor.close()
    return rows


def _scale(settings: BenchSettings) -> tuple[int, int]:
    """Return the numbers of measured steps and of rounds."""
    return (12, 1) if settings.quick else (64, 3)


def _compared(
    executor: Executor, vocabulary: GrammarVocabulary, batch: int, num_steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Return the tokens per second of unconstrained text, and the relative speed under each schema."""
    kinds: dict[str, Constraint | None] = {"free": None, "a long text": TEXT, "records": RECORDS}
    runs: dict[str, list[StepsRun]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, constraint in kinds.items():
            runs[kind].append(decode(executor, vocabulary, batch, constraint, num_steps))
    free = [run.sampled / run.seconds for run in runs.pop("free")]
    return [
        {"requests": batch, "schema": kind, "free_tokens_per_second": median(free), **_shares(values, free)}
        for kind, values in runs.items()
    ]


def _shares(runs: list[StepsRun], free: list[float]) -> dict[str, float]:
    forced = sum(run.forced for run in runs) / sum(run.sampled + run.forced for run in runs)
    return {
        "sampled_share": median(run.sampled / run.seconds / speed for run, speed in zip(runs, free, strict=True)),
        "all_share": median(
            (run.sampled + run.forced) / run.seconds / speed for run, speed in zip(runs, free, strict=True)
        ),
        "forced_share": forced,
        "ceiling": 1 / (1 - forced),
    }


def decode(
    executor: Executor, vocabulary: GrammarVocabulary, batch: int, constraint: Constraint | None, num_steps: int
) -> StepsRun:
    """Run steps of `batch` requests after all of them have begun to decode, and return their counts."""
    engine = Engine(KeptExecutor(executor), pools=[ConstraintPool(lambda: vocabulary)])
    sampling = SamplingParams(max_tokens=2_000, temperature=0.8, ignore_eos=True)
    for number in range(batch):
        prompt = prompt_of(number, _PROMPT_TOKENS)
        params = sampling.with_(seed=number)
        engine.add(Request(str(number), prompt, params, controller=constraint, detokenize=False))
    started: set[str] = set()
    try:
        while len(started) < batch:
            started |= {event.request_id for event in engine.step() if isinstance(event, TokenEvent)}
        _count(engine, _WARM_UP)
        return _count(engine, num_steps)
    finally:
        engine.close()


def _count(engine: Engine, num_steps: int) -> StepsRun:
    sampled = forced = 0
    begin = time.perf_counter()
    for _ in range(num_steps):
        for event in engine.step():
            if isinstance(event, TokenEvent):
                forced += event.forced
                sampled += not event.forced
            elif isinstance(event, Finished):
                raise RuntimeError(f"an output ended: {event.reason} {event.error or ''}")
    return StepsRun(time.perf_counter() - begin, sampled, forced)
