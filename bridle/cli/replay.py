"""`bridle replay`: runs a recorded trace again. A request's trace runs on a model, a control runtime's trace on a new
runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bridle.cli.control_options import ControlOptions
from bridle.cli.options import ModelOptions
from bridle.cli.preflight import check_models
from bridle.cli.programs import check_program, controller_in
from bridle.cli.runtime import replay_exchanges
from bridle.cli.steering_options import SteeringOptions
from bridle.cli.terminal import harmless
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.serving.models.loading import LoadedModel
    from bridle.traces import Trace
    from bridle.traces.compare import Comparison


def replay(
    trace: Annotated[Path, Parameter(name="TRACE")],
    name: Annotated[str, Parameter(name="MODEL")] = "demo",
    /,
    *,
    controller: Path | None = None,
    adapter: str | None = None,
    save: Annotated[Path | None, Parameter(name="--save")] = None,
    model: ModelOptions = ModelOptions(),
    steering: SteeringOptions = SteeringOptions(),
    control: ControlOptions = ControlOptions(),
) -> int:
    """Run a trace again and compare every token.

    The trace of an output (`--trace`, `LLM.generate(trace=FILE)`) runs on the model with its prompt, parameters,
    seed and controller. Tokens, masks, logs and variables are compared, and the first difference is shown. With
    another controller or constraint (`--controller`, `--regex` and so on) both outputs are shown side by side. The
    trace of a control runtime (`bridle serve --aici-trace FILE`) runs against a new runtime, and each reply is
    compared. The exit code is 1 if anything differs.

    Parameters
    ----------
    trace
        Trace file.
    name
        Model to run, or the model whose vocabulary the control runtime used: folder, hub id or `demo`.
    controller
        Script (.js, .py, .json) or module (.wasm) that replaces the recorded controller. A module gets the recorded
        argument.
    adapter
        LoRA adapter of the request: folder, GGUF file or hub id.
    save
        File to write the traces of the new runs to.
    """
    from bridle.traces import header_of

    if not trace.is_file():
        raise InvalidRequest(f"there is no trace file {trace}", "TRACE")
    check_models(name, model.draft_model, model.tokenizer, revision=model.revision)
    header = header_of(trace)
    if header is not None and header.runtime is not None:
        return replay_exchanges(trace, name, model.revision, control)
    if controller is not None:
        check_program(controller)
    return _replay_texts(trace, name, steering, controller, adapter, save, model)


def _replay_texts(
    path: Path,
    name: str,
    steering: SteeringOptions,
    program: Path | None,
    adapter: str | None,
    save: Path | None,
    model: ModelOptions,
) -> int:
    from rich.console import Console

    from bridle.serving.tracing.replay import moved_names
    from bridle.serving.tracing.replay import replay as run_again
    from bridle.traces import read, write
    from bridle.traces.compare import compare

    traces, made, num_other = list(read(path)), [], 0
    is_changed = bool(program or steering.ctrl or steering.named())
    console = Console(highlight=False)
    with _model_for(traces, name, steering, program, adapter, model) as (loaded, adapter_name):
        steers = _steering_for(loaded, steering, program)
        for number, old in enumerate(traces, 1):
            with _progress(old, number, len(traces)) as on_token:
                new = run_again(loaded, old, controller=steers(old), adapter=adapter_name, on_token=on_token)
            made.append(new)
            found = compare(old, new)
            num_other += not found.is_same
            _show(console, old, new, found, is_changed=is_changed)
            if not is_changed:
                _say(console, moved_names(loaded, old))
    if save is not None:
        write(made, save)
    print(f"requests: {len(traces)}; not the same: {num_other}")
    return 1 if num_other else 0


@contextmanager
def _progress(old: Trace, number: int, count: int) -> Iterator[Callable[[], None]]:
    """Show the number of recomputed tokens of a recorded request. Yields the function to call for each token."""
    from bridle.load_progress import shown
    from bridle.traces import TokenRecord

    total, done = sum(isinstance(record, TokenRecord) for record in old.records), 0

    def note() -> None:
        nonlocal done
        done += 1
        progress(f"{done} of {total} tokens", min(done / max(total, 1), 1.0))  # another controller may write more

    with shown(f"Replaying request {number} of {count}", prints=True) as progress:
        progress(f"0 of {total} tokens", 0.0)
        yield note


@contextmanager
def _model_for(
    traces: list[Trace],
    name: str,
    steering: SteeringOptions,
    program: Path | None,
    adapter: str | None,
    model: ModelOptions,
) -> Iterator[tuple[LoadedModel, str | None]]:
    """Yield the loaded model, with the control runtime and the adapter that the traces need, and the adapter's name."""
    from bridle.cli.loading import adapter_specs, loaded_model
    from bridle.serving.controller_runtime import as_control

    forms = [each.header.controller or {} for each in traces]
    needs_runtime = program is not None or any(
        "wasm" in part for form in forms for part in form.get("composed", [form])
    )
    control = steering.control() or (as_control(True) if needs_runtime else None)
    specs = adapter_specs((adapter,) if adapter is not None else ())
    with loaded_model(model.to_config(name, warm_up=False), adapters=specs, control=control) as loaded:
        yield loaded, specs[0].name if specs else None


def _steering_for(
    loaded: LoadedModel, steering: SteeringOptions, program: Path | None
) -> Callable[[Trace], object | None]:
    """Return a function that gives the new controllers for a trace, or None for the recorded controllers. The program
    replaces the recorded controller. Recorded constraints and other controllers stay."""
    from bridle.controllers.composition import compose
    from bridle.serving.requests.steering import PLAIN
    from bridle.serving.tracing.trace_header import ran_form
    from bridle.serving.tracing.trace_regression import changed_form

    if program is not None:
        named = controller_in(program, loaded)
        return lambda trace: changed_form(ran_form(trace), *named)
    steered = steering.steering(loaded) if steering.ctrl or steering.named() else PLAIN
    given = compose(steered.controller, steered.constraint)
    return lambda trace: given


def _show(console: Console, old: Trace, new: Trace, found: Comparison, *, is_changed: bool) -> None:
    console.print(
        harmless(f"{old.header.request_id} on {old.header.model}, {old.header.made}"), style="bold", markup=False
    )
    if is_changed:
        show_beside(console, old, new)
    for each in found.differences:
        for number, move in enumerate(each.before, each.number - len(each.before)):
            console.print(harmless(f"  {number}: {move}", on_one_line=True), markup=False, soft_wrap=True)
    _say(console, found.sentences)


def _say(console: Console, sentences: Sequence[str]) -> None:
    for sentence in sentences:
        console.print(harmless(sentence, on_one_line=True), markup=False, soft_wrap=True)


def show_beside(console: Console, old: Trace, new: Trace) -> None:
    from rich.table import Table
    from rich.text import Text

    from bridle.cli.token_colours import colour_text
    from bridle.traces.compare import said_in, wrote_in
    from bridle.traces.replay_text import rebuild

    table = Table("output", "recorded", "now")
    for index in sorted({each.index for trace in (old, new) for each in rebuild(trace)}):
        table.add_row(str(index), colour_text(old, index, prompt=False), colour_text(new, index, prompt=False))
        for what, said in (("logs", said_in), ("variables", wrote_in)):
            before, now = said(old.records, index), said(new.records, index)
            if before != now:
                table.add_row(f"{index}: {what}", Text(harmless(before)), Text(harmless(now)))
    console.print(table)
