"""`bridle run-batch`: answers a file of requests without a server, and writes a file of answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

from cyclopts import Parameter

from bridle.cli.adapter_options import AdapterOptions
from bridle.cli.control_options import ControlOptions, ToolOptions
from bridle.cli.options import Drafts, ModelOptions
from bridle.cli.preflight import check_models
from bridle.cli.steering_options import SteeringOptions
from bridle.config import EngineConfig
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from fastapi import FastAPI

    from bridle.config import ModelConfig
    from bridle.controller_tools import ToolExecutor
    from bridle.http.openai.batch import BatchRequest
    from bridle.http.settings import HttpSettings
    from bridle.serving.controller_runtime import ControlSettings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options for the destination of the answers, and for all requests."""

    output: Annotated[Path | None, Parameter(name=["--output", "--output-file", "-o"])] = None
    "File to write the answers to. Default: standard output."
    max_in_flight: int = 64
    "Maximum number of requests that run at once."
    strict_fields: Annotated[bool, Parameter(negative="")] = False
    "Reject requests with unknown fields, even harmless ones."
    policies: Path | None = None
    "TOML file of policies that every output must follow."
    trace: Path | None = None
    "Folder to write a trace of each request to, named after the `request_id` of its answer."
    tools: Path | None = None
    "TOML file of tools that controllers may call: Python functions, HTTP requests and MCP servers. See docs/tools.md."
    speculate: Drafts = None
    """Draft tokens per step: a number, `auto` or `off`. The output is unchanged. Requests may set their own. Default:
    `auto` with a draft model, else `off`."""

    def check(self) -> None:
        """Raise `InvalidRequest` for options that are invalid with any model."""
        if self.max_in_flight < 1:
            raise InvalidRequest(f"max_in_flight is {self.max_in_flight}; must be at least 1", "max_in_flight")

    def settings(self) -> HttpSettings:
        """Return the settings of the application that answers the requests."""
        from bridle.http.openai.batch import batch_settings
        from bridle.serving.policies import PolicyRegistry

        book = None if self.policies is None else PolicyRegistry(self.policies)
        made = replace(batch_settings(self.max_in_flight), strict_fields=self.strict_fields, policies=book)
        return made if self.trace is None else replace(made, trace_folder=self.trace, trace_share=1.0)


def run_batch(
    file: Annotated[Path, Parameter(name=["--input-file", "-i"])],
    *,
    model: Annotated[str, Parameter(name="--model")] = "demo",
    batch: BatchOptions = BatchOptions(),
    options: ModelOptions = ModelOptions(),
    adapters: AdapterOptions = AdapterOptions(),
    control: ControlOptions = ControlOptions(),
    steering: SteeringOptions = SteeringOptions(),
) -> int:
    """Answer a file of requests in OpenAI's batch format, without a server.

    `bridle run-batch requests.jsonl --model Qwen/Qwen3-0.6B -o answers.jsonl`

    A line is `{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. The whole file is
    checked before the model is loaded. Answers are written in the order in which they finish. The answer to a failed
    request has its error, and the exit code is then 1. A constraint or controller on the command line applies to
    requests that have neither.

    Parameters
    ----------
    file
        File of requests, one JSON object a line.
    model
        Model that answers. Requests may name this model, one of its adapters, or no model.
    """
    from bridle.logs import configure_logs

    batch.check()
    options.check_backend(model)
    check_models(model, options.draft_model, options.tokenizer, revision=options.revision)
    configure_logs("auto", "warning")
    with ExitStack() as stack:
        requests, target = _open(stack, file, batch.output)
        given = steering.fields()
        requests = [each.steered(given) for each in requests]
        runtime = control.to_settings() if any(request.has_controllers for request in requests) else None
        settings, desk = batch.settings(), ToolOptions(tools=batch.tools).desk()
        engine = EngineConfig(max_waiting=settings.max_requests, speculate=batch.speculate)
        app = stack.enter_context(_served(options.to_config(model), engine, adapters, runtime, settings, desk))
        num_failed = asyncio.run(_run(app, requests, target, batch.max_in_flight))
    print(f"{len(requests) - num_failed} answered, {num_failed} failed", file=sys.stderr)
    return 1 if num_failed else 0


def _open(stack: ExitStack, file: Path, output: Path | None) -> tuple[list[BatchRequest], BinaryIO]:
    """Return all requests in the file, and the open file for the answers; `stack` closes it."""
    from bridle.http.openai.batch import read_requests

    try:
        requests = list(read_requests(stack.enter_context(file.open("rb"))))
        target = sys.stdout.buffer if output is None else stack.enter_context(output.open("wb"))
    except OSError as error:
        raise InvalidRequest(f"{error.filename}: {error.strerror}", "FILE") from None
    return requests, target


@contextmanager
def _served(
    config: ModelConfig,
    engine: EngineConfig,
    adapters: AdapterOptions,
    control: ControlSettings | None,
    settings: HttpSettings,
    tools: ToolExecutor | None,
) -> Iterator[FastAPI]:
    """Yield the server's ASGI application with a loaded model. The application is called without a socket."""
    from bridle.cli.loading import loaded_model
    from bridle.http import create_app
    from bridle.serving import ModelRegistry
    from bridle.serving.lora.lora_config import AdapterCatalog

    known = adapters.to_set()
    with loaded_model(config, adapters.limit(engine), known.named, control, known.is_open, tools) as model:
        app = create_app(ModelRegistry([model], adapters=AdapterCatalog(known)), settings)
        try:
            yield app
        finally:
            app.state.http.traces.close()  # which writes unsaved traces


async def _run(app: FastAPI, requests: list[BatchRequest], target: BinaryIO, max_in_flight: int) -> int:
    """Answer all requests and write the answers. Returns the number of answers that are errors."""
    import msgspec

    from bridle.http.openai.batch import answer_batch
    from bridle.load_progress import shown

    num_failed = num_done = 0

    def note() -> None:
        nonlocal num_done
        num_done += 1
        progress(f"{num_done} of {len(requests)}", num_done / len(requests))

    with shown("Answering requests", prints=True) as progress:
        progress(f"0 of {len(requests)}", 0.0)
        async for answer in answer_batch(app, requests, max_in_flight, note):
            num_failed += answer["response"]["status_code"] >= 400
            target.write(msgspec.json.encode(answer) + b"\n")
            target.flush()
    return num_failed
