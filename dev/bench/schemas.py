"""Benchmark of public JSON schemas: the share that bridle supports, and the cost of their masks. Run it with `bridle
bench schemas --folder FOLDER`.

The folder contains files in MaskBench's format: a `schema`, and `tests` whose `data` is `valid` or not. MaskBench's
11,306 files are in the folder `maskbench/data` of guidance-ai/jsonschemabench (JSONSchemaBench, arXiv 2501.10868). A
file's name begins with the name of its collection, which ends before three hyphens or before a number.

Each schema is compiled as on a server, with the same limits, but without the limits that bridle adds to schemas that
have none (`x-limits`). Then a mask is computed before each token of every valid text, and each mask must allow the next
token. For each invalid text, some mask must refuse the next token.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.bench.control import print_table
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.engine.control.decision import mask_allows
from bridle.errors import BridleError, InvalidRequest
from bridle.structured_output import ConstraintLimits, GrammarVocabulary, JsonSchema
from bridle.structured_output.compile_sandbox import CompileSandbox, GrammarRefused
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.matcher import Matcher
from dev.bench.constraints import made_up_vocabulary

if TYPE_CHECKING:
    from rich.console import Console

_VOCAB_SIZE = 128_000
_FILE_SECONDS = 0.04  # of one schema and its texts, for `MachineLimits.python`
_QUICK_SHARE = 20  # with --quick one of this many files, selected with a seed
_NAME = re.compile(r"(.+?)(?:---.*|_[a-z_]*\d+\.json)")
_KEYS = re.compile(r"Unimplemented keys: (\[.*?\])")
#: Causes of refusals by the first words of their messages; other messages are grouped by their words without names.
_REASONS = (
    ("oneOf constraints", "`oneOf` whose branches overlap"),
    ("Unknown format", "`format`"),
    ("look-around", "looking around in a `pattern`"),
    ("lookarounds", "looking around in a `pattern`"),
    ("backreferences", "references back in a `pattern`"),
    ("circular references", "a cycle of `$ref` with keywords beside it"),
    ("min/maxProperties", "`minProperties`, `maxProperties` beside properties that may be left out"),
    ("are not disjoint", "`patternProperties` that overlap"),
    ("Unsatisfiable", "what nothing fits"),
    ("retrieving it failed", "a `$ref` elsewhere, which is not fetched"),
    ("bytes; at most", "more than 512 KiB"),
    ("too large", "sizes"),
    ("cannot be compiled", "sizes"),
    ("intersection stack", "sizes"),
)


@dataclass(slots=True)
class SchemaVerdict:
    """The result of one schema and its texts."""

    collection: str
    outcome: str = "as it is"  # or: in other words (rewritten), refused
    reason: str = ""  # why the unchanged schema was refused
    seconds: float = 0.0  # seconds to compile
    masks: list[float] = field(default_factory=list)  # seconds of each mask
    wrong: list[str] = field(default_factory=list)  # the texts with a wrong verdict
    counts: Counter[str] = field(default_factory=Counter)


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Print three tables: by collection, by reason of refusal, and of times."""
    parts, verdicts = _parts(settings), []
    judge = Judge(made_up_vocabulary(_VOCAB_SIZE))
    try:
        for name, files in parts.items():
            with phases.part(name):
                verdicts += [judge.look_at(path) for path in files]
    finally:
        judge.close()
    figures = {"collections": collections(verdicts), "reasons": reasons(verdicts), "times": times(verdicts)}
    for title, rows in figures.items():
        print_table(console, title, rows)
    wrong = [text for verdict in verdicts for text in verdict.wrong]
    for text in wrong[:20]:
        console.print(f"taken for what it is not: {text}")
    return {**figures, "wrong": len(wrong)}


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each hundred files."""
    return {name: limits.python(len(files) * _FILE_SECONDS) for name, files in _parts(settings).items()}


def _parts(settings: BenchSettings) -> dict[str, list[Path]]:
    """Return the files in groups of a hundred."""
    files = files_in(settings.folder, quick=settings.quick)
    return {f"schemas from {at + 1} of {len(files)}": files[at : at + 100] for at in range(0, len(files), 100)}


def files_in(folder: Path | None, *, quick: bool) -> list[Path]:
    """Return the files of a folder; with `quick` always the same selection. Raises `InvalidRequest` if the folder has
    no such files."""
    files = sorted(folder.glob("*.json")) if folder is not None else []
    if not files:
        message = f"--folder is {folder}; it must hold files of MaskBench's form, see dev/bench/schemas.py"
        raise InvalidRequest(message, "folder")
    return random.Random(0).sample(files, -(-len(files) // _QUICK_SHARE)) if quick else files


class Judge:
    """Compiles schemas for a vocabulary and checks texts against them."""

    def __init__(self, vocabulary: GrammarVocabulary, limits: ConstraintLimits | None = None) -> None:
        self._vocabulary = vocabulary
        self._trials = CompileSandbox(limits or ConstraintLimits())

    def look_at(self, path: Path) -> SchemaVerdict:
        """Return the verdict on the schema and the texts of one file."""
        found = _NAME.fullmatch(path.name)
        verdict = SchemaVerdict(found[1] if found else path.stem)
        content = json.loads(path.read_text(encoding="utf-8"))
        began = time.perf_counter()
        matcher = self._compiled(content["schema"], verdict)
        verdict.seconds = time.perf_counter() - began
        if matcher is not None:
            for number, test in enumerate(content.get("tests", ())):
                self._try(matcher.copy(), test, verdict, f"{path.name} {number}")
        return verdict

    def _compiled(self, schema: Any, verdict: SchemaVerdict) -> Matcher | None:
        try:
            constraint = JsonSchema({**schema, "x-limits": False} if isinstance(schema, dict) else schema)
            grammar = grammar_of(constraint)
            try:
                self._trials.try_grammar(grammar)
            except GrammarRefused as refusal:
                verdict.reason, verdict.outcome = reason_of(str(refusal)), "in other words"
                other = grammar_of(constraint, in_other_words=True)
                if other == grammar:
                    raise
                self._trials.try_grammar(grammar := other)
        except BridleError as error:
            verdict.reason = verdict.reason or reason_of(str(error))
            verdict.outcome = "refused"
            return None
        return Matcher(self._vocabulary, grammar)

    def _try(self, matcher: Matcher, test: Mapping[str, Any], verdict: SchemaVerdict, name: str) -> None:
        text = json.dumps(test["data"], ensure_ascii=False).encode("utf-8", "surrogatepass")
        tokens = self._vocabulary.encode(text)
        is_valid = bool(test["valid"])
        taken = self._takes(matcher, tokens, verdict.masks if is_valid else None)
        kind = "valid" if is_valid else "not valid"
        verdict.counts[kind] += 1
        verdict.counts[f"{kind}, right"] += taken is is_valid
        if taken and not is_valid:
            verdict.wrong.append(name)

    def _takes(self, matcher: Matcher, tokens: Sequence[int], masks: list[float] | None) -> bool:
        try:
            for token in tokens if masks is not None else ():
                began = time.perf_counter()
                mask = matcher.mask()
                assert masks is not None
                masks.append(time.perf_counter() - began)
                if not mask_allows(mask, token):
                    return False
                matcher.commit([token])
            if masks is None:
                matcher.commit(tokens)
            return matcher.is_accepting
        except BridleError:
            return False

    def close(self) -> None:
        """End the child processes that compile schemas."""
        self._trials.close()


def reason_of(message: str) -> str:
    """Return the reason of a refused schema in a few words."""
    keys = _KEYS.search(message)
    if keys is not None:
        names = [name for name in json.loads(keys[1]) if name not in ("then", "else")]
        return f"`{min(names) if names else 'if'}`"
    return next((words for part, words in _REASONS if part in message), "other forms")


def collections(verdicts: Iterable[SchemaVerdict]) -> list[dict[str, Any]]:
    """Return a row for each collection, and one for all collections: schemas by outcome, and texts by correct
    verdicts."""
    rows: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        for name in (verdict.collection, "all"):
            counts = rows.setdefault(name, Counter())
            counts.update({"schemas": 1, verdict.outcome: 1})
            counts.update(verdict.counts)
    return [_row(name, rows[name]) for name in sorted(rows, key=lambda name: (name == "all", name))]


def _row(name: str, counts: Counter[str]) -> dict[str, Any]:
    outcomes = ("schemas", "as it is", "in other words", "refused")
    told = (*outcomes, "valid", "valid, right", "not valid", "not valid, right")
    served = 1 - counts["refused"] / counts["schemas"]
    return {"collection": name, **{each: counts[each] for each in told}, "served": f"{served:.1%}"}


def reasons(verdicts: Iterable[SchemaVerdict]) -> list[dict[str, Any]]:
    """Return a row for each reason to refuse an unchanged schema: the number of refused schemas, and how many of them
    are served after rewriting."""
    refused, served = Counter[str](), Counter[str]()
    for verdict in verdicts:
        if verdict.reason:
            refused[verdict.reason] += 1
            served[verdict.reason] += verdict.outcome != "refused"
    return [{"reason": name, "refused": n, "served in other words": served[name]} for name, n in refused.most_common()]


def times(verdicts: Sequence[SchemaVerdict]) -> list[dict[str, Any]]:
    """Return the milliseconds of compiling a schema and of computing a mask."""
    compiled = [verdict.seconds for verdict in verdicts if verdict.outcome != "refused"]
    masks = [each for verdict in verdicts for each in verdict.masks]
    return [_quantiles("compiling", compiled), _quantiles("a mask", masks)]


def _quantiles(what: str, seconds: Sequence[float]) -> dict[str, Any]:
    marks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    ordered = sorted(seconds) or [0.0]
    told = {name: 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in marks.items()}
    return {"what": what, "times": len(seconds), **{f"{name} ms": value for name, value in told.items()}}
