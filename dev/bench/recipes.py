"""Measures the gain in correct answers from the recipes, which are controllers. Each case is answered in four ways: by
the model alone, with a grammar in one request, by the recipe, and by llama-server with that grammar.

Cases are generated from a seed that was not used to develop the recipe, or read from packages in FOLDER/packages.
Results are stored in FOLDER/recipes.jsonl; existing results are not computed again.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle import LLM
from bridle.bench.load import models, num_bytes, started_server
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.serving import ControlSettings
from dev.recipes import columns, data
from dev.recipes.recipe import Answer, Case, Recipe, Tool
from dev.recipes.report import Record, Records, row_of, show

if TYPE_CHECKING:
    from rich.console import Console

#: Names of the recipes, in the order of the page. Each is a module of `dev.recipes` with a `RECIPE`.
RECIPES = ("calculator", "classify", "sql", "quote", "extract", "call", "vote", "thinking", "style", "code")
#: The seed of the reported cases.
SEED = 2026
_CASES, _QUICK_CASES, _CHUNK, _CONTEXT = 100, 4, 100, 2048
_LIMITS = ("--wasm-max-step-time=4000", "--limit", "max_prepare_wait=600000", "--limit", "max_init_time=20000")


def guesses(settings: BenchSettings, limits: MachineLimits) -> Mapping[str, float]:
    """Return the estimated seconds of each part; a part is a model and a way to answer."""
    num_cases = _num_cases(settings) * len(_chosen(settings))
    return {
        _title(model, column): limits.python(10.0 + 0.1 * num_cases)
        + num_cases * 2 * num_bytes(model) / limits.bandwidth
        for model in _models(settings)
        for column in _columns(settings)
    }


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Run the missing cases, and print the table."""
    data.use(settings.folder)
    records = Records(None if settings.folder is None else settings.folder / "recipes.jsonl")
    asked, skipped = _cases(settings)
    for model in _models(settings):
        if _is_missing(model, columns.COLUMNS[:3], asked, records):
            _in_process(model, asked, records, phases)
        if settings.llama_server is not None and _is_missing(model, columns.COLUMNS[3:], asked, records):
            with phases.part(_title(model, "llama-server")), _llama_server(model, settings) as url:
                for name, cases in asked.items():
                    _answer(model, name, "llama-server", cases, records, partial(columns.over_http, url))
    cells = [
        (Path(model).stem, name, each) for model in _models(settings) for name in asked for each in _columns(settings)
    ]
    found = [[each for each in records.of(*cell) if each.case in _ids(asked[cell[1]])] for cell in cells]
    rows = [row_of(some) for some in found if some]
    show(rows, skipped, console)
    return {"rows": [asdict(row) for row in rows], "skipped": skipped}


def recipe(name: str) -> Recipe:
    """Return the recipe of that name."""
    found: Recipe = import_module(f"dev.recipes.{name}").RECIPE
    return found


def _in_process(model: str, asked: Mapping[str, list[Case]], records: Records, phases: Phases) -> None:
    control = ControlSettings("on", args=_LIMITS)
    tools: dict[str, Tool] = {name: tool for each in asked for name, tool in recipe(each).tools.items()}
    with LLM(model, control=control, tools=tools, max_model_len=_CONTEXT) as llm:
        for column in columns.COLUMNS[:3]:
            with phases.part(_title(model, column)):
                for name, cases in asked.items():
                    _answer(model, name, column, cases, records, partial(_ask, column, llm))


def _ask(column: str, llm: LLM, asked: Recipe, cases: Sequence[Case]) -> list[Answer]:
    return columns.in_process(column, asked, llm, cases)


def _answer(model: str, name: str, column: str, cases: list[Case], records: Records, ask: Any) -> None:
    """Answer the cases that have no record yet, several at once."""
    done, own = {each.case for each in records.of(Path(model).stem, name, column)}, recipe(name)
    missing = [case for case in cases if case.id not in done]
    for begin in range(0, len(missing), _CHUNK):
        some = missing[begin : begin + _CHUNK]
        made = zip(some, ask(own, some), strict=True)
        judged = [(case, answer, own.is_right(case, answer.text)) for case, answer in made]
        records.add(
            [Record(Path(model).stem, name, column, c.id, a.text, ok, a.tokens, a.seconds) for c, a, ok in judged]
        )


def _is_missing(model: str, some: Sequence[str], asked: Mapping[str, list[Case]], records: Records) -> bool:
    """Return whether a case has no record for one of these columns, so that the model must be loaded."""
    done = {(name, each): {r.case for r in records.of(Path(model).stem, name, each)} for name in asked for each in some}
    return any(_ids(asked[name]) - cases for (name, _), cases in done.items())


def _ids(cases: Sequence[Case]) -> set[str]:
    return {case.id for case in cases}


def _cases(settings: BenchSettings) -> tuple[dict[str, list[Case]], dict[str, str]]:
    """Return the cases of each recipe, and the recipes whose data is missing, with instructions to get the data."""
    found, skipped = dict[str, list[Case]](), dict[str, str]()
    for name in _chosen(settings):
        try:
            found[name] = recipe(name).cases(_num_cases(settings), SEED)
        except UnsupportedFeature as error:
            skipped[name] = str(error)
    return found, skipped


@contextlib.contextmanager
def _llama_server(model: str, settings: BenchSettings) -> Iterator[str]:
    context = ("--jinja", "-c", str(columns.SLOTS * _CONTEXT), "-np", str(columns.SLOTS), "--no-webui")
    with (
        tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder,
        started_server(model, "llama-server", Path(folder), settings, *context) as server,
    ):
        yield f"http://127.0.0.1:{server.port}"


def _models(settings: BenchSettings) -> Sequence[str]:
    return models(settings) if settings.models else ["demo"]


def _columns(settings: BenchSettings) -> Sequence[str]:
    return columns.COLUMNS if settings.llama_server is not None else columns.COLUMNS[:3]


def _num_cases(settings: BenchSettings) -> int:
    wanted = settings.num_cases
    if wanted is not None and wanted < 1:
        raise InvalidRequest(f"cases: got {wanted}; must be at least 1", "cases")
    return wanted or (_QUICK_CASES if settings.quick else _CASES)


def _chosen(settings: BenchSettings) -> list[str]:
    chosen = [name for name in RECIPES if not settings.parts or any(part in name for part in settings.parts)]
    if not chosen:
        raise InvalidRequest(f"parts: got {settings.parts}; the recipes are {', '.join(RECIPES)}", "parts")
    return chosen


def _title(model: str, column: str) -> str:
    return f"{Path(model).name}, {column}"
