"""`bridle test`: tests controllers by running recorded traces again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bridle.cli.control_options import ControlOptions
from bridle.cli.options import ModelOptions, TraceModelOptions
from bridle.cli.preflight import check_models
from bridle.cli.programs import ENDINGS, check_program, controller_in
from bridle.cli.runtime import lines_of, played_exchanges
from bridle.cli.terminal import harmless
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.serving.models.loading import LoadedModel
    from bridle.serving.tracing.trace_regression import Player, TraceCase, TraceTestResult

_MAX_FILES = 10_000


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """Options for the model that runs the traces, and for the format of the results."""

    controller: Path | None = None
    """Controller for all traces: a script (.js, .py, .json) or a module (.wasm). Default: the file with the trace's
    name, in its folder or the folder above."""
    model: Annotated[str | None, Parameter(name="--model")] = None
    "Model to run the traces on. Default: no model; the samples recorded in the traces are used."
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False
    "Print the results as JSON."
    junit: Path | None = None
    "File to write the results to as JUnit XML."


_STYLES = {"same": "green", "different": "red", "undecided": "yellow"}


def check_traces(
    folder: Annotated[Path, Parameter(name="FOLDER")] = Path(),
    /,
    *,
    test: TestOptions = TestOptions(),
    options: TraceModelOptions = TraceModelOptions(),
) -> int:
    """Test controllers against recorded traces.

    Every trace of an output in the folder (`*.jsonl`, as `--trace` writes them) runs again. `hello.jsonl` and
    `hello.2.jsonl` are steered by `hello.js`, `.py`, `.json` or `.wasm`, in the same folder or its parent, else by the
    recorded controller. No model is needed: recorded samples are used again, and forced tokens, masks, forks, rewinds,
    logs and variables are compared. A trace fails as undecided if it needs a sample that was not recorded. Traces of a
    control runtime run against a new one. The exit code is 0 if nothing differs, else 1.

    Parameters
    ----------
    folder
        Folder to search, with its subfolders, or a file.
    """
    from rich.console import Console

    check_models(test.model, options.tokenizer, options.draft_model, revision=options.revision)
    cases = _cases(folder, test.controller)
    console = Console(highlight=False)
    found: list[tuple[TraceCase, TraceTestResult]] = []
    for case, verdict in _verdicts(cases, options.tokenizer or "demo", test.model, options):
        found.append((case, verdict))
        if not test.json_output:
            _show(console, case, verdict)
    if test.junit is not None:
        test.junit.write_bytes(_junit(found))
    counts = {outcome: sum(verdict.outcome == outcome for _, verdict in found) for outcome in _STYLES}
    if test.json_output:
        print(json.dumps({"traces": [_plain(*each) for each in found], **counts}, indent=1))
    else:
        print("; ".join([f"traces: {len(found)}", *(f"{outcome}: {count}" for outcome, count in counts.items())]))
    return 0 if counts["same"] == len(found) else 1


# -- test cases ----------------------------------------------------------------------------------------------


def _cases(folder: Path, controller: Path | None) -> list[TraceCase]:
    from bridle.serving.tracing.trace_regression import TraceCase, program_of
    from bridle.traces import Trace, header_of, read

    if controller is not None:
        check_program(controller)
    files = [folder] if folder.is_file() else sorted(folder.rglob("*.jsonl"))
    if len(files) > _MAX_FILES:
        raise InvalidRequest(f"{folder} has {len(files)} trace files; at most {_MAX_FILES}", "FOLDER")
    cases = []
    for path in files:
        header = header_of(path)
        if header is None:
            continue
        name = path.name if path == folder else path.relative_to(folder).as_posix()
        if header.runtime is not None:
            cases.append(TraceCase(name, Trace(header), None, path))
            continue
        program = controller or program_of(path, ENDINGS)
        for number, trace in enumerate(read(path)):
            cases.append(TraceCase(f"{name}#{number + 1}" if number else name, trace, program))
    if not cases:
        raise InvalidRequest(
            f"there is no trace of an output in {folder}; `bridle generate --trace FILE` writes one", "FOLDER"
        )
    return cases


def _verdicts(
    cases: list[TraceCase], tokenizer: str, model: str | None, options: ModelOptions
) -> Iterator[tuple[TraceCase, TraceTestResult]]:
    """Run all cases and yield each with its result: first traces of outputs, then traces of control runtimes."""
    texts = [case for case in cases if case.exchanges is None]
    if texts:
        with _player(texts, tokenizer, model, options) as (loaded, play):
            made: dict[Path, tuple[str, str | None]] = {}
            for case in texts:
                yield case, _test(loaded, play, case, made)
    for case in cases:
        if case.exchanges is not None:
            yield case, _test_exchanges(case.exchanges, model or tokenizer)


def _test_exchanges(path: Path, name: str) -> TraceTestResult:
    """Replay the trace of a control runtime on a new runtime."""
    from bridle.serving.tracing.trace_regression import TraceTestResult
    from bridle.traces.compare import Comparison

    found, other = Comparison(), list[str]()
    for difference in played_exchanges(path, name, None, ControlOptions()):
        found.num_moves += 1
        if difference is not None and not other:
            other = lines_of(difference, path.name)
    return TraceTestResult("different" if other else "same", found, other)


@contextmanager
def _player(
    cases: list[TraceCase], tokenizer: str, model: str | None, options: ModelOptions
) -> Iterator[tuple[LoadedModel, Player]]:
    from bridle.cli.loading import loaded_model
    from bridle.serving.controller_runtime import as_control
    from bridle.serving.tracing.trace_regression import with_model, without_model

    forms = [case.trace.header.controller or {} for case in cases]
    needs_runtime = any(case.program for case in cases) or any(
        "wasm" in part for form in forms for part in form.get("composed", [form])
    )
    control = as_control(True) if needs_runtime else None
    if model is None:
        with without_model([case.trace for case in cases], tokenizer, control) as made:
            yield made
    else:
        with loaded_model(options.to_config(model, warm_up=False), control=control) as loaded:
            yield loaded, with_model(loaded)


def _test(
    loaded: LoadedModel, play: Player, case: TraceCase, made: dict[Path, tuple[str, str | None]]
) -> TraceTestResult:
    from bridle.serving.tracing.replay import moved_names
    from bridle.serving.tracing.trace_header import ran_form
    from bridle.serving.tracing.trace_regression import changed_form, judge

    if case.program is None:
        verdict = judge(case.trace, play(case.trace, None))
        verdict.sentences.extend(moved_names(loaded, case.trace))
        return verdict
    if case.program not in made:
        made[case.program] = controller_in(case.program, loaded)
    return judge(case.trace, play(case.trace, changed_form(ran_form(case.trace), *made[case.program])))


# -- results -------------------------------------------------------------------------------------------------


def _show(console: Console, case: TraceCase, verdict: TraceTestResult) -> None:
    program = "" if case.program is None else f" with {case.program.name}"
    num = f"{verdict.found.num_tokens} tokens" if case.exchanges is None else f"{verdict.found.num_moves} exchanges"
    what = f"{verdict.outcome:<9}  {case.name}{program}: {num}"
    console.print(harmless(what, on_one_line=True), style=_STYLES[verdict.outcome], markup=False, soft_wrap=True)
    if verdict.outcome != "same":
        for line in (*verdict.around, *verdict.sentences):
            console.print(f"    {harmless(line, on_one_line=True)}", markup=False, soft_wrap=True)


def _plain(case: TraceCase, verdict: TraceTestResult) -> dict[str, Any]:
    return {
        "trace": case.name,
        "controller": None if case.program is None else str(case.program),
        "outcome": verdict.outcome,
        "tokens": verdict.found.num_tokens,
        "before": verdict.around,
        "sentences": verdict.sentences,
    }


def _junit(found: list[tuple[TraceCase, TraceTestResult]]) -> bytes:
    from xml.etree import ElementTree

    failed = sum(verdict.outcome != "same" for _, verdict in found)
    suite = ElementTree.Element("testsuite", name="bridle test", tests=str(len(found)), failures=str(failed))
    for case, verdict in found:
        item = ElementTree.SubElement(suite, "testcase", classname="traces", name=case.name)
        if verdict.outcome != "same":
            failure = ElementTree.SubElement(item, "failure", type=verdict.outcome, message=verdict.outcome)
            failure.text = harmless("\n".join((*verdict.around, *verdict.sentences)))
    made: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return made
