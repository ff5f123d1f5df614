"""`bridle replay`: what was recorded, run again. Traces of texts go to a model, those of AICI messages to a runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bridle.cli.control import STANDARD
from bridle.cli.options import ModelOptions
from bridle.cli.runtime import play_messages
from bridle.cli.serve import ControlOptions
from bridle.cli.steering_options import SteeringOptions
from bridle.cli.terminal import harmless
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.service.loading import LoadedModel
    from bridle.traced import Trace
    from bridle.traces.compare import Comparison

_HEAD_BYTES = 32
_CONTROL = ControlOptions()
_MODEL = ModelOptions()
_STEERING = SteeringOptions()


def replay(
    trace: Annotated[Path, Parameter(name="TRACE")],
    name: Annotated[str, Parameter(name="MODEL")] = "demo",
    /,
    *,
    controller: Path | None = None,
    adapter: str | None = None,
    save: Annotated[Path | None, Parameter(name="--save")] = None,
    model: ModelOptions = _MODEL,
    steering: SteeringOptions = _STEERING,
    control: ControlOptions = _CONTROL,
) -> int:
    """Run a trace again, and say whether everything is the same.

    The trace of a text (`--trace`, `LLM.generate(trace=FILE)`) runs on the model with its prompt, parameters, seed and
    controller: every token, mask, log and variable is compared, and the first difference is shown with what came before
    it. With another controller or constraint (`--controller`, `--regex` and so on) both texts are shown side by side.
    What `bridle serve --aici-trace FILE` wrote is played against a fresh runtime. The exit code is 1 if anything
    differs.

    Parameters
    ----------
    trace
        The file.
    name
        The model, or the one whose vocabulary a runtime used: folder, hub id or `demo`.
    controller
        A script (.js, .py, .json) that steers in place of the recorded controller.
    adapter
        The LoRA adapter that the request used: a folder, a GGUF file or a hub id.
    save
        Write the traces of the new runs to this file.
    """
    if not trace.is_file():
        raise InvalidRequest(f"there is no trace {trace}", "TRACE")
    if not _is_of_text(trace):
        return play_messages(trace, name, model.revision, control)
    return _replay_texts(trace, name, _with_script(steering, controller), adapter, save, model)


def _is_of_text(path: Path) -> bool:
    """Whether a file has traces of texts, which begin with a header."""
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES).startswith(b'{"type":"header"')


def _with_script(steering: SteeringOptions, script: Path | None) -> SteeringOptions:
    """The options with the standard controller for a script."""
    if script is None:
        return steering
    name = STANDARD.get(script.suffix)
    if name is None:
        raise InvalidRequest(
            f"no standard controller runs {str(script)!r}; it ends in {', '.join(STANDARD)}", "controller"
        )
    return replace(steering, ctrl=(name,), ctrl_arg=(f"@{script}",))


def _replay_texts(
    path: Path, name: str, steering: SteeringOptions, adapter: str | None, save: Path | None, model: ModelOptions
) -> int:
    from rich.console import Console

    from bridle.traces import read, write
    from bridle.traces.compare import compare

    traces, made, num_other = list(read(path)), [], 0
    is_changed = bool(steering.ctrl or steering.named())
    console = Console(highlight=False)
    with _model_for(traces, name, steering, adapter, model) as (loaded, adapter_name):
        for old in traces:
            new = _run(loaded, old, steering, adapter_name, is_changed=is_changed)
            made.append(new)
            found = compare(old, new)
            num_other += not found.is_same
            _show(console, old, new, found, is_changed=is_changed)
    if save is not None:
        write(made, save)
    print(f"requests: {len(traces)}; not the same: {num_other}")
    return 1 if num_other else 0


@contextmanager
def _model_for(
    traces: list[Trace], name: str, steering: SteeringOptions, adapter: str | None, model: ModelOptions
) -> Iterator[tuple[LoadedModel, str | None]]:
    """The model, with what the traces need beside it, and the name of the adapter."""
    from bridle.cli.loading import adapter_specs, loaded_model
    from bridle.service.control import as_control

    forms = [each.header.controller or {} for each in traces]
    needs_runtime = any("wasm" in part for form in forms for part in form.get("composed", [form]))
    control = steering.control() or (as_control(True) if needs_runtime else None)
    specs = adapter_specs((adapter,) if adapter is not None else ())
    with loaded_model(model.to_config(name, warm_up=False), adapters=specs, control=control) as loaded:
        yield loaded, specs[0].name if specs else None


def _run(loaded: LoadedModel, old: Trace, steering: SteeringOptions, adapter: str | None, *, is_changed: bool) -> Trace:
    from bridle.service.replay import replay as run_again

    given = steering.steering(loaded) if is_changed else None
    steers = None if given is None else given.whole
    return run_again(loaded, old, controller=steers, adapter=adapter)


def _show(console: Console, old: Trace, new: Trace, found: Comparison, *, is_changed: bool) -> None:
    console.print(
        harmless(f"{old.header.request_id} on {old.header.model}, {old.header.made}"), style="bold", markup=False
    )
    if is_changed:
        _show_beside(console, old, new)
    for each in found.differences:
        for number, move in enumerate(each.before, each.number - len(each.before)):
            console.print(harmless(f"  {number}: {move}", on_one_line=True), markup=False, soft_wrap=True)
    for sentence in found.sentences:
        console.print(harmless(sentence, on_one_line=True), markup=False, soft_wrap=True)


def _show_beside(console: Console, old: Trace, new: Trace) -> None:
    from rich.table import Table

    from bridle.cli.token_colours import colour_text
    from bridle.traced.rebuild import rebuild

    table = Table("output", "recorded", "now")
    for index in sorted({each.index for trace in (old, new) for each in rebuild(trace)}):
        table.add_row(str(index), colour_text(old, index, prompt=False), colour_text(new, index, prompt=False))
    console.print(table)
