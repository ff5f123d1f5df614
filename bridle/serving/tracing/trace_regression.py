"""Traces as regression tests of controllers: a request must give the recorded result again.

With a model, the request runs again. Without a model, the recorded tokens are used in place of sampled ones
(`recorded`). The engine, the controllers and the constraints are real in both cases. The test compares what the
controllers do: forced tokens, masks, forks, rollbacks, logs and variables. If a trace does not determine the result,
the test neither succeeds nor fails, and reports that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bridle.config import EngineConfig, ModelConfig
from bridle.errors import InvalidRequest
from bridle.serving.controller_runtime import ControlSettings
from bridle.serving.models.loading import LoadedModel
from bridle.serving.tracing.replay import replay
from bridle.serving.tracing.replay_executor import RecordedExecutor, ReplayDivergence, info_of, prompt_length
from bridle.serving.tracing.trace_header import controller_of
from bridle.traces import EndRecord, Trace
from bridle.traces.compare import Comparison, TraceDifference, compare
from bridle.traces.replay_text import rebuild

Outcome = Literal["same", "different", "undecided"]
#: Runs one trace again. If a controller is given, it replaces the recorded one.
Player = Callable[[Trace, object | None], "Played"]
#: Sampling parameters whose results need a model.
_NEEDS_LOGITS = ("logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class Played:
    """A new run of a request, with its first differences from the trace."""

    trace: Trace
    notes: Sequence[ReplayDivergence] = ()


@dataclass(slots=True)
class TraceTestResult:
    """The result of testing one trace, as `sentences`. `around` is the text before the first difference."""

    outcome: Outcome
    found: Comparison
    sentences: list[str] = field(default_factory=list)

    @property
    def around(self) -> list[str]:
        """Return the moves of the outputs before the first difference, each with its number."""
        return [
            f"{number}: {move}"
            for each in self.found.differences[:1]
            for number, move in enumerate(each.before, each.number - len(each.before))
        ]


def judge(old: Trace, played: Played) -> TraceTestResult:
    """Compare a run with the recorded run. Everything that the trace contains is compared."""
    found = compare(old, played.trace)
    told = [f"At token {note.num_tokens} of the sequence: {note.text}." for note in played.notes]
    if old.num_cut:
        return TraceTestResult("undecided", found, [f"{old.num_cut} records of the trace are missing."])
    open_ends = {note.num_tokens for note in played.notes if note.kind == "unknown"}
    decided = [each for each in found.differences if not _is_open(each, played.trace, open_ends)]
    if decided or any(note.kind == "mask" for note in played.notes):
        return TraceTestResult("different", found, [*told, *found.sentences])
    if played.notes:
        return TraceTestResult("undecided", found, told)
    return TraceTestResult("same" if found.is_same else "different", found, found.sentences)


def _is_open(difference: TraceDifference, trace: Trace, open_ends: set[int]) -> bool:
    """Return whether an output differs only because the trace does not determine its next token."""
    end = None if difference.new is None else difference.new.record
    if not isinstance(end, EndRecord) or end.error is None:
        return False
    output = next(each for each in rebuild(trace) if each.index == difference.output)
    return prompt_length(trace) + len(output.records) in open_ends


# -- players -------------------------------------------------------------------------------------------------


def with_model(model: LoadedModel, adapter: str | None = None) -> Player:
    """Return a player that runs traces on a model."""
    return lambda trace, controller: Played(replay(model, trace, controller=controller, adapter=adapter))


@contextmanager
def without_model(
    traces: Sequence[Trace], source: str, control: ControlSettings | None = None
) -> Iterator[tuple[LoadedModel, Player]]:
    """Yield a player that replays the given traces from their records, without a model. `source` is the model whose
    tokenizer the traces need."""
    from bridle.model import resolve_model
    from bridle.serving.controller_runtime import guess_num_logits
    from bridle.serving.models.loading import load_model
    from bridle.tokenizer.tokenizer_files import end_tokens

    path = resolve_model(source, None)
    sizes = {trace.header.engine.get("vocab_size", guess_num_logits(path)) for trace in traces}
    size = sizes.pop()
    if sizes or not isinstance(size, int):
        said = ", ".join(sorted(map(str, [size, *sizes])))
        raise InvalidRequest(
            f"the traces are of models with different vocabulary sizes, {said}; test the traces of one model at a time",
            "FOLDER",
        )
    ends = traces[0].header.engine.get("eos_token_ids", end_tokens(path))
    executor = RecordedExecutor(info_of(traces, size, ends))
    config = ModelConfig(source)
    model = load_model(config, EngineConfig(speculate=0), executors=lambda *_: executor, control=control)
    try:
        yield model, lambda trace, controller: _play(model, executor, trace, controller)
    finally:
        model.close()


def _play(model: LoadedModel, executor: RecordedExecutor, trace: Trace, controller: object | None) -> Played:
    header = trace.header
    sampling = {name: value for name, value in header.sampling.items() if name not in _NEEDS_LOGITS}
    executor.play(trace)
    asked = Trace(replace(header, sampling=sampling, adapter=None, num_media=0), trace.records)
    made = replay(model, asked, controller=controller)
    return Played(made, list(executor.notes))


# -- folders -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceCase:
    """One trace in a folder, and the file of the controller that it tests, if there is one. For the trace of a control
    runtime, `trace` has only a header, and its `exchanges` stay in their file."""

    name: str
    trace: Trace
    program: Path | None
    exchanges: Path | None = None


def program_of(path: Path, endings: Sequence[str]) -> Path | None:
    """Return the controller file that a file of traces tests, or None. The controller file has the same name as the
    file of traces, up to the first dot. The controller file is in the same folder as the traces, or in the parent
    folder."""
    stem = path.name.partition(".")[0]
    places = [folder / f"{stem}{ending}" for folder in (path.parent, path.parent.parent) for ending in endings]
    return next((place for place in places if place.is_file()), None)


def changed_form(form: dict[str, Any] | None, module: str, argument: str | None) -> object | None:
    """Return the controller of a traced request, with another Wasm module in place of its first one. If `argument` is
    None, the recorded argument is kept."""
    parts = [] if form is None else form.get("composed", [form])
    place = next((number for number, part in enumerate(parts) if "wasm" in part), None)
    if form is None or place is None:
        return controller_of({"wasm": {"module": module, "argument": argument or ""}})
    old = parts[place]["wasm"]
    wasm = {**old, "module": module, "argument": old.get("argument", "") if argument is None else argument}
    if "composed" not in form:
        return controller_of({**form, "wasm": wasm})
    return controller_of({**form, "composed": [*parts[:place], {"wasm": wasm}, *parts[place + 1 :]]})
