"""Benchmark of constraints: `bridle bench constraints`.

The benchmark measures the constraint pool's answers (commit, forced tokens, mask, and a thread switch and back), and
llguidance's mask alone. The generated texts satisfy the constraints. There is one case for each kind of constraint and
each vocabulary; the vocabularies have 32k and 128k generated tokens. Then it compares steps of many sequences with and
without constraints, on a fake device that takes 20 ms a step. Last, it compares requests under a JSON schema with
unconstrained requests, end to end on a model.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.bench.control import print_table
from bridle.bench.control_device import InstantExecutor
from bridle.bench.load_report import quantile
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.engine.control.decision import mask_allows
from bridle.engine.interfaces import Ask
from bridle.engine.request import Request
from bridle.engine.scheduling.step_plan import SampleBatch, StepPlan, StepResult
from bridle.sampling import SamplingParams
from bridle.structured_output import (
    Choice,
    Constraint,
    ConstraintPool,
    GrammarVocabulary,
    JsonSchema,
    Lark,
    Regex,
    Substring,
)
from dev.bench.constraints_model import beside_free, guess_beside_free

if TYPE_CHECKING:
    from rich.console import Console

_VOCAB_SIZES = (32_000, 128_000)
_BATCH = 64
_DEVICE_SECONDS = 0.020
_NUM_ENDLESS = 4  # kinds of steps: unconstrained ones, and constraints that do not end
_REQUESTS = "requests under a JSON schema"
#: Rough seconds for `MachineLimits.python`: a token of a vocabulary, one pass through a text, one answer in a step.
_TOKEN_SECONDS, _CASE_SECONDS, _ANSWER_SECONDS = 12e-6, 0.05, 60e-6
_SYLLABLES = re.findall("..", "abbacodaenerfigaheinkalomanoonorparesastthtiunvewa")

_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "pattern": "^[a-z]+@[a-z]+[.](com|org)$"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}},
    },
    "required": ["name", "email", "age", "tags"],
    "additionalProperties": False,
}
_C_LIKE = r"""
start: item+
item: "int" NAME "(" args? ")" block | "int" NAME "=" sum ";"
args: "int" NAME ("," "int" NAME)*
block: "{" statement* "}"
statement: "return" sum ";" | "if" "(" sum ")" block | NAME "=" sum ";" | sum ";" | block
sum: product (("+" | "-") product)*
product: value (("*" | "/") value)*
value: NAME | NUMBER | NAME "(" (sum ("," sum)*)? ")" | "(" sum ")"
NAME: /[a-z_][a-z_0-9]*/
NUMBER: /[0-9]+/
%ignore /[ \n]+/
"""


@dataclass(frozen=True, slots=True)
class ConstraintCase:
    """A constraint and a text that satisfies it."""

    constraint: Constraint
    text: str


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Measure masks for each vocabulary and kind of constraint, then steps, then requests."""
    answers, steps = [], []
    for size in _VOCAB_SIZES:
        with phases.part(f"masks, {size} tokens"):
            vocabulary = made_up_vocabulary(size)
            for kind, case in cases().items():
                answers.append({"vocabulary": size, "kind": kind, **_answers(vocabulary, case, _rounds(settings))})
        batch = _batch(settings)
        with phases.part(f"steps, {size} tokens"):
            steps.append({"vocabulary": size, "batch": batch, **_steps(vocabulary, batch, *_num_steps(settings))})
    with phases.part(_REQUESTS), tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        requests = beside_free(Path(folder), settings, made_up_vocabulary)
    _print_tables(console, answers, steps)
    print_table(console, f"{_REQUESTS}, as shares of free ones' tokens a second", requests)
    return {"answers": answers, "steps": steps, "requests": requests}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Estimate the seconds of each part. Each vocabulary is read once, and the texts are processed in several rounds. A
    step waits for its device and for an answer for each sequence."""
    found = {}
    for size in _VOCAB_SIZES:
        once = size * _TOKEN_SECONDS + len(cases()) * _CASE_SECONDS * _rounds(settings)
        num_steps, rounds = _num_steps(settings)
        step = _DEVICE_SECONDS + limits.python(_batch(settings) * _ANSWER_SECONDS)
        found[f"masks, {size} tokens"] = limits.python(once)
        found[f"steps, {size} tokens"] = _NUM_ENDLESS * rounds * (num_steps + 5) * step
    return found | {_REQUESTS: guess_beside_free(settings, limits)}


def _batch(settings: BenchSettings) -> int:
    return settings.batches[0] if settings.batches else _BATCH


def _rounds(settings: BenchSettings) -> int:
    return 1 if settings.quick else 5


def _num_steps(settings: BenchSettings) -> tuple[int, int]:
    """Return the numbers of measured steps and of rounds."""
    return (15, 1) if settings.quick else (40, 3)


def cases() -> dict[str, ConstraintCase]:
    """Return the measured constraints by kind, each with a text."""
    rng = random.Random(0)
    words = " ".join("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(600))[:4096]
    record = {"name": words[:60], "email": "hello@there.org", "age": 42, "tags": ["alpha", "gamma"]}
    program = "int main(int a, int b) {\n  if (a + 12 * b) { x = start(a, 3); }\n  return (x - 1) / 2;\n}\n"
    return {
        "regex": ConstraintCase(Regex(r"([a-z]+ ?)*[0-9]{3}-[0-9]{4}"), f"{words[:200]} 555-1234"),
        "JSON schema": ConstraintCase(JsonSchema({"type": "array", "items": _RECORD}), json.dumps([record, record])),
        "Lark, C-like": ConstraintCase(Lark(_C_LIKE), program * 3),
        "substring of 4 kB": ConstraintCase(Substring(words.rsplit(" ", 1)[0]), words[: words.index(" ", 300)]),
        "choice of 100": ConstraintCase(
            Choice([f"{words[i : i + 20].strip()} {i}" for i in range(100)]), words[:20].strip() + " 0"
        ),
    }


def made_up_vocabulary(size: int) -> GrammarVocabulary:
    """Return a vocabulary of bytes, numbers, punctuation and generated words, half of them with a leading space; the
    last token ends an output."""
    rng = random.Random(size)
    tokens = {bytes([byte]): None for byte in range(256)}
    tokens |= dict.fromkeys(str(number).encode() for number in range(10, 1000))
    tokens |= dict.fromkeys(b" " * count for count in range(2, 17))
    tokens |= dict.fromkeys((b'{"', b'":', b'": ', b'": "', b'", "', b'"}', b"},", b" {", b"();", b", "))
    while len(tokens) < size - 1:
        word = "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 5)))
        tokens[rng.choice((word, " " + word, word.capitalize())).encode()] = None
    return GrammarVocabulary([*tokens, b"<end>"], (size - 1,), (size - 1,), _no_tokenizer, size)


def _no_tokenizer(text: str) -> list[int]:
    raise ValueError("made-up tokens: the longest that fits")


# -- answers ---------------------------------------------------------------------------------------------------


def _answers(vocabulary: GrammarVocabulary, case: ConstraintCase, num_rounds: int) -> dict[str, Any]:
    """Return microseconds of masks and answers at positions where several tokens are allowed, and the share of forced
    tokens."""
    from bridle.structured_output.grammar import grammar_of
    from bridle.structured_output.matcher import Matcher

    tokens = vocabulary.encode(case.text.encode())
    pool = ConstraintPool(lambda: vocabulary)
    try:
        begin = time.perf_counter()
        pool.open(Request("compile", (1,), controller=case.constraint)).result()
        compiled = time.perf_counter() - begin
        bare: list[float] = []
        ours: list[float] = []
        forced = 0
        for number in range(num_rounds):
            start = Matcher(vocabulary, grammar_of(case.constraint))
            bare += _bare_masks(start, tokens)
            seconds, forced = _pool_answers(pool, case.constraint, tokens, number)
            ours += seconds
    finally:
        pool.shutdown()
    return {
        "tokens": len(tokens),
        "forced_share": forced / len(tokens),
        "compile_milliseconds": 1e3 * compiled,
        "llguidance_microseconds": _p50_p99(bare),
        "answer_microseconds": _p50_p99(ours),
    }


def _bare_masks(start: Any, tokens: Sequence[int]) -> list[float]:
    """Return the seconds of llguidance's own mask before each token that was not forced."""
    backend, seconds = start.copy().backend, []
    for token in tokens:
        if not backend.compute_ff_tokens():
            begin = time.perf_counter()
            backend.compute_bitmask()
            seconds.append(time.perf_counter() - begin)
        if not backend.consume_token(token):
            raise RuntimeError(backend.get_error())
    return seconds


def _pool_answers(
    pool: ConstraintPool, constraint: Constraint, tokens: Sequence[int], number: int
) -> tuple[list[float], int]:
    """Return the seconds from each token to the pool's next mask, and the number of forced tokens."""
    request = Request(str(number), (1,), controller=constraint)
    pool.open(request).result()
    asks = [Ask(0, request=request), *(Ask(0, tokens=(token,)) for token in tokens[:-1])]
    seconds, forced = [], 0
    for ask in asks:
        begin = time.perf_counter()
        pool.ask([ask])
        answer = pool.collect([0], time.monotonic() + 10)[0]
        taken = time.perf_counter() - begin
        if answer.decision is None:
            raise RuntimeError(str(answer.error))
        forced += answer.decision.is_forced
        if not answer.decision.is_forced:
            seconds.append(taken)
    pool.close([0])
    return seconds, forced


def _p50_p99(seconds: Sequence[float]) -> tuple[float, float]:
    return 1e6 * quantile(seconds, 50), 1e6 * quantile(seconds, 99)


# -- steps -----------------------------------------------------------------------------------------------------


class MaskedExecutor(InstantExecutor):
    """An executor that takes `_DEVICE_SECONDS` per step without computing, then samples a token that the mask allows.
    `drawing` is the time of sampling, which is excluded from the measurement."""

    def __init__(self, num_seqs: int, vocab_size: int) -> None:
        super().__init__(num_seqs, 4096, vocab_size=vocab_size)
        self._rng = random.Random(0)
        self._done = 0.0
        self.drawing = 0.0

    def forward(self, plan: StepPlan) -> None:
        self._done = time.perf_counter() + _DEVICE_SECONDS

    def sample(self, batch: SampleBatch) -> StepResult:
        time.sleep(max(0.0, self._done - time.perf_counter()))
        begin = time.perf_counter()
        tokens = [self._draw(row.mask) for row in batch.rows]
        self.drawing += time.perf_counter() - begin
        return StepResult(batch.step, tokens, [None] * len(tokens))

    def _draw(self, mask: bytes | None) -> int:
        size = self.info.vocab_size - 1  # the last token ends an output
        for _ in range(64):
            token = self._rng.randrange(size)
            if mask is None or mask_allows(mask, token):
                return token
        row = int.from_bytes(mask or b"", "little")
        return (row & -row).bit_length() - 1


def _steps(vocabulary: GrammarVocabulary, batch: int, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of a step of `batch` sequences with and without constraints, measured in turns."""
    endless: dict[str, Constraint | None] = {
        "free": None,
        "regex": Regex(r"([a-z]+ ?)+[0-9]{900}"),
        "JSON schema": JsonSchema({"type": "array", "items": _RECORD, "minItems": 500}),
        "Lark, C-like": Lark(_C_LIKE.replace("start: item+", "start: item{500}")),
    }
    times: dict[str, list[float]] = {kind: [] for kind in endless}
    for _ in range(num_rounds):
        for kind, constraint in endless.items():
            times[kind] += _step_seconds(vocabulary, batch, constraint, num_steps)
    assert len(times) == _NUM_ENDLESS
    free = median(times["free"])
    return {
        kind: {"milliseconds": 1e3 * median(seconds), "added_share": median(seconds) / free - 1}
        for kind, seconds in times.items()
    }


def _step_seconds(
    vocabulary: GrammarVocabulary, batch: int, constraint: Constraint | None, num_steps: int
) -> list[float]:
    from bridle.engine import Engine

    executor = MaskedExecutor(batch, vocabulary.size)
    engine = Engine(executor, pools=[ConstraintPool(lambda: vocabulary)])
    sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
    for number in range(batch):
        engine.add(Request(str(number), (1, 2, 3), sampling, controller=constraint, detokenize=False))
    seconds: list[float] = []
    try:
        while len(seconds) < num_steps + 5:
            drawn, begin = executor.drawing, time.perf_counter()
            engine.step()
            if executor.drawing > drawn:
                seconds.append(time.perf_counter() - begin - (executor.drawing - drawn))
    finally:
        engine.close()
    return seconds[5:]


# -- showing ---------------------------------------------------------------------------------------------------


def _print_tables(console: Console, answers: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="microseconds, median [99 %]")
    for heading in ("vocabulary", "constraint", "llguidance's mask", "bridle's answer", "forced tokens", "compile, ms"):
        table.add_column(heading, justify="left" if heading == "constraint" else "right")
    for figure in answers:
        table.add_row(
            str(figure["vocabulary"]),
            figure["kind"],
            "{:.0f} [{:.0f}]".format(*figure["llguidance_microseconds"]),
            "{:.0f} [{:.0f}]".format(*figure["answer_microseconds"]),
            f"{figure['forced_share']:.0%}",
            f"{figure['compile_milliseconds']:.0f}",
        )
    console.print(table)
    for figure in steps:
        console.print(f"a step of {figure['batch']} sequences, vocabulary of {figure['vocabulary']}:")
        for kind, value in figure.items():
            if isinstance(value, dict):
                console.print(f"  {kind}: {value['milliseconds']:.2f} ms ({value['added_share']:+.1%})")
