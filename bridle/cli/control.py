"""`bridle run`, `infer`, `upload`, `tag`, `tags`: run and manage controllers on a running server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import sleep
from typing import Annotated, Any

from cyclopts import Parameter

from bridle.cli.api import Api, ApiError, Server
from bridle.cli.options import Drafts
from bridle.cli.programs import further_controllers, program_to_run, read_messages, read_wasm
from bridle.cli.run_report import RunReport
from bridle.cli.steering_options import ConstraintOptions, Ctrl
from bridle.cli.token_colours import show_traces
from bridle.cli.trace_options import TraceOptions
from bridle.cli.watch import watch as watch_files
from bridle.errors import InvalidRequest
from bridle.traces import parse

_FAILED = 1
PATIENCE = 120.0  # seconds for which a refused request is repeated
#: `--log-level` is a number in these commands, as in AICI's client. The variable BRIDLE_LOG_LEVEL, made for `serve`,
#: may be a word.
_LEVELS = {"debug": 5, "info": 3, "warning": 1, "error": 1}

MaxTokens = Annotated[int | None, Parameter(name=["--max-tokens", "-t"])]
Tags = Annotated[tuple[str, ...], Parameter(name=["--tag", "-T"], negative="")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingFlagGroup:
    """Flags for sampling parameters. Sampling parameters apply to tokens that the controller does not choose."""

    max_tokens: MaxTokens = None
    "Maximum number of tokens of each output. Default: as many as fit into the context."
    temperature: float | None = None
    "Sampling temperature; 0 always takes the most likely token. Default: 0."
    adapter: str | None = None
    "Name of a LoRA adapter of the model."
    speculate: Drafts = None
    "Draft tokens per step: a number, `auto` or `off`. The output is unchanged. Default: the server's setting."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Flags for the output of a run: log level, printed lines and saved files."""

    save: Annotated[Path | None, Parameter(name="--save")] = None
    "File to write the JSON of `--json` to."
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
    "Print request, answer, texts, logs, variables, counts and times as JSON, instead of the text."
    log_level: Annotated[str, Parameter(name=["--log-level", "-l"])] = "1"
    "Amount of output: 1 prints the text, 3 adds logs, counts and times, 5 adds each message of the server."

    @property
    def level(self) -> int:
        """Return the log level as a number. Raises `InvalidRequest`."""
        level = _LEVELS.get(self.log_level)
        if level is None and not self.log_level.isdecimal():
            raise InvalidRequest(f"--log-level is {self.log_level!r}; must be a number from 0 to 5", "log_level")
        return 0 if self.as_json else int(self.log_level) if level is None else level


def run(
    file: Annotated[str | None, Parameter(name="FILE", allow_leading_hyphen=True)] = None,
    /,
    *,
    ctrl: Ctrl = (),
    upload: Annotated[Path | None, Parameter(name=["--upload", "-u"])] = None,
    prompt: Annotated[str | None, Parameter(name=["--prompt", "-p"])] = None,
    messages: Path | None = None,
    drawing: SamplingFlagGroup = SamplingFlagGroup(),
    watch: Annotated[bool, Parameter(negative="")] = False,
    output: ReportOptions = ReportOptions(),
    server: Server = Server(),
    tracing: TraceOptions = TraceOptions(),
) -> int:
    """Run a controller on a server and print its text.

    `bridle run script.js` runs a script with the controller for its language. `bridle run guest.wasm` uploads a
    controller and runs it. `echo text | bridle run - -c mine` passes standard input to the controller `mine`. The exit
    code is 1 if the controller failed.

    Parameters
    ----------
    file
        File with the controller's argument, such as a script; `-` is standard input.
    ctrl
        Controller to run: standard name, module id, tag, `gh:` name or `none`. Repeatable: further controllers also
        steer, without an argument. Default: by the file name extension of FILE.
    upload
        Wasm file to upload and run, with FILE as its argument.
    prompt
        Text to start from.
    messages
        JSON file with the messages to start from: a list, or an object with `messages` and optionally `tools`. The
        model's chat template renders the messages.
    watch
        Run again whenever the files are saved, until Ctrl-C.
    """
    program = program_to_run(file, ctrl, upload)
    tracing.check()
    said = {} if messages is None else read_messages(messages)
    api = server.api()

    def once(is_stale: Callable[[], bool] = lambda: False) -> int:
        body = program.body(api) | said | _given(prompt=prompt, **asdict(drawing))
        return _run(api, body, output, tracing, is_stale)

    if not watch:
        return once()
    if not program.files:
        raise InvalidRequest("--watch needs a FILE or an --upload to watch", "watch")
    watch_files(program.files, once)
    return 0


def infer(
    words: Annotated[tuple[str, ...], Parameter(name="PROMPT", negative="")] = (),
    /,
    *,
    ctrl: Ctrl = (),
    max_tokens: MaxTokens = 100,
    temperature: float | None = None,
    adapter: str | None = None,
    speculate: Drafts = None,
    output: ReportOptions = ReportOptions(),
    server: Server = Server(),
    form: ConstraintOptions = ConstraintOptions(),
    tracing: TraceOptions = TraceOptions(),
) -> int:
    """Continue a text on a server.

    Parameters
    ----------
    words
        Text to continue; `-` is standard input.
    ctrl
        Controller that steers, without an argument (`bridle run` passes one). Repeatable.
    max_tokens
        Maximum number of output tokens.
    temperature
        Sampling temperature; 0 always takes the most likely token. Default: 0.
    adapter
        Name of a LoRA adapter of the model.
    speculate
        Draft tokens per step: a number, `auto` or `off`. The output is unchanged. Default: the server's setting.
    """
    if len(words) != 1:
        said = " ".join(words)[:60] or "Once upon a time"
        raise InvalidRequest(
            f'infer takes one PROMPT, but got {len(words)} words; put it in quotes: "{said}"', "PROMPT"
        )
    prompt = sys.stdin.read() if words[0] == "-" else words[0]
    body: dict[str, Any] = {"controller": "none", "controller_arg": prompt}
    if ctrl:
        body = {"controller": ctrl[0], "controller_arg": "", "prompt": prompt} | further_controllers(ctrl)
    body |= _given(constraint=form.plain())
    body |= _given(max_tokens=max_tokens, temperature=temperature, adapter=adapter, speculate=speculate)
    tracing.check()
    return _run(server.api(), body, output, tracing)


def upload(wasm: Annotated[Path, Parameter(name="WASM")], /, *, tag: Tags = (), server: Server = Server()) -> int:
    """Upload a controller and print its module id.

    Parameters
    ----------
    wasm
        Wasm file to upload.
    tag
        Name for the controller. Repeatable.
    """
    api = server.api()
    data = api.upload(read_wasm(wasm))
    sizes = f"{_mib(data['wasm_size'])} MiB, compiled to {_mib(data['compiled_size'])} MiB in {data['time']} ms"
    print(f"{wasm}: {sizes}", file=sys.stderr)
    if tag:
        _print_tags(api.tag(data["module_id"], tag), sys.stderr)
    print(data["module_id"])
    return 0


def tag(
    module: Annotated[str, Parameter(name="MODULE")],
    tags: Annotated[tuple[str, ...], Parameter(name="TAG", negative="")],
    /,
    *,
    server: Server = Server(),
) -> int:
    """Give names to a controller.

    Parameters
    ----------
    module
        Module id, as `bridle upload` prints it.
    tags
        Names for the controller. Users who are not admins may only use names that begin with their own name and a dot.
    """
    if not tags:
        raise InvalidRequest("the command tag needs a MODULE and at least one TAG", "TAG")
    _print_tags(server.api().tag(module, tags))
    return 0


def tags(*, server: Server = Server()) -> int:
    """List the names of controllers, newest first.

    The columns are name, module id, sizes, time and user.
    """
    found = server.api().tags()
    _print_tags(found)
    if not found:
        print("no tags yet: `bridle upload FILE --tag NAME` makes one", file=sys.stderr)
    return 0


def _run(
    api: Api,
    body: dict[str, Any],
    output: ReportOptions,
    tracing: TraceOptions,
    is_stale: Callable[[], bool] = lambda: False,
) -> int:
    """Print a run while it continues. A run that ends early is saved as far as it came; an outdated run is not saved.
    If the server refuses the request with a time to retry, it is sent again, because the server may still be compiling
    an interpreter."""
    report = RunReport(body | ({"trace": True} if tracing.is_wanted else {}), output.level)
    patience = PATIENCE
    while True:
        try:
            code = _run_once(api, report, output, is_stale)
        except ApiError as error:
            if error.retry_after is None or report.response or patience < error.retry_after or is_stale():
                raise
            print(f"bridle: {error}; waiting", file=sys.stderr, flush=True)
            patience -= error.retry_after
            sleep(error.retry_after)
        else:
            if tracing.is_wanted and not is_stale():
                _keep_trace(api, tracing)
            return code


def _keep_trace(api: Api, tracing: TraceOptions) -> None:
    """Fetch the trace of the ended run, and show or save it as the flags request."""
    text = api.trace(api.request_id)
    if tracing.show == "tokens":
        show_traces(parse(text))
    if tracing.trace is not None:
        tracing.trace.write_bytes(text)


def _run_once(api: Api, report: RunReport, output: ReportOptions, is_stale: Callable[[], bool]) -> int:
    try:
        with api.run(report.request) as items:
            report.note("http_response")
            for item in items:
                report.add(item)
                if is_stale():
                    return 0
        report.print_json() if output.as_json else report.print_end()
    finally:
        if output.save is not None:
            report.save(output.save)
    if report.error:
        print(f"bridle: the controller failed: {report.error}", file=sys.stderr)
        return _FAILED
    return 0


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _print_tags(found: list[dict[str, Any]], file: Any = None) -> None:
    for info in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info["updated_at"]))
        sizes = f"{_mib(info['wasm_size']):>7} MiB {_mib(info['compiled_size']):>7} MiB"
        print(
            f"{info['tag']:<30} {info['module_id'][:8]} {sizes}  {when}  {info['updated_by']}", file=file or sys.stdout
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.2f}"
