"""`bridle generate`: prints the continuation of one prompt as it is generated."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bridle.cli.control_options import ToolOptions
from bridle.cli.options import Files, ModelOptions, SamplingOptions
from bridle.cli.policy_options import PolicyOptions
from bridle.cli.preflight import check_models
from bridle.cli.steering_options import SteeringOptions
from bridle.cli.trace_options import TraceOptions
from bridle.demo import DEMO_MODELS
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.engine.request import Request
    from bridle.outputs import RequestOutput
    from bridle.sampling import SamplingParams
    from bridle.serving.models.loading import LoadedModel


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """Flags for additions to the prompt, and for the display of the answer."""

    chat: Annotated[bool, Parameter(negative="")] = False
    "Send the prompt as a user message, in the model's chat template."
    image: Files = ()
    """Image for the prompt. With --chat it comes before the text; otherwise the prompt must contain the model's image
    placeholder. Repeatable."""
    audio: Files = ()
    "Sound file for the prompt, placed like an image. Repeatable."
    video: Files = ()
    "Video file for the prompt, placed like an image. Repeatable."
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
    "Print one JSON object with text, tokens and counts at the end."
    stats: bool = True
    "Print token counts and speed to standard error."
    adapter: str | None = None
    "LoRA adapter to apply: folder, GGUF file or hub id, optionally with @REVISION."

    @property
    def files(self) -> list[tuple[str, Path]]:
        """Return the media files of the prompt, with their modalities."""
        given = {"image": self.image, "audio": self.audio, "video": self.video}
        return [(modality, path) for modality, paths in given.items() for path in paths]


def generate(
    words: Annotated[tuple[str, ...], Parameter(name="PROMPT", negative="", allow_leading_hyphen=True)] = (),
    /,
    *,
    ask: AskOptions = AskOptions(),
    model: ModelOptions = ModelOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    steering: SteeringOptions = SteeringOptions(),
    tracing: TraceOptions = TraceOptions(),
    policies: PolicyOptions = PolicyOptions(),
    tools: ToolOptions = ToolOptions(),
) -> int:
    """Continue a text.

    `bridle generate "Once upon a time"` uses the demo model,
    `bridle generate Qwen/Qwen3-0.6B "The capital of France is" --max-tokens 8 --temperature 0` another model.

    Parameters
    ----------
    words
        Text to continue, optionally after a MODEL. `-` reads standard input. Default of MODEL: demo.
    """
    from bridle.cli.loading import adapter_specs, loaded_model

    name, prompt = _model_and_prompt(words)
    model.check_backend(name)
    check_models(name, model.draft_model, model.tokenizer, revision=model.revision)
    sampling.to_params()  # invalid values are reported before the model is loaded
    steering.named()
    tracing.check()
    specs = adapter_specs((ask.adapter,) if ask.adapter is not None else ())
    chosen = specs[0].name if specs else None
    config, demands, control = model.to_config(name, warm_up=False), policies.demands(), steering.control()
    with loaded_model(config, adapters=specs, control=control, tools=tools.desk()) as loaded:
        loaded.policies = demands
        params = sampling.to_params(loaded, steering.by_name())
        request = build_request(loaded, prompt, params, chosen, steering, ask, tracing.is_wanted)
        if ask.as_json:
            _print_json(loaded, request, prompt, tracing)
        else:
            _print_stream(loaded, request, tracing, show_stats=ask.stats)
    return 0


def build_request(
    loaded: LoadedModel,
    prompt: str,
    params: SamplingParams,
    adapter: str | None,
    options: SteeringOptions,
    ask: AskOptions,
    trace: bool,
) -> Request:
    """Return the validated request with the constraint and controllers of the options."""
    from bridle.chat.conversation import Conversation, make_prompt
    from bridle.engine.multimodal.multimodal_inputs import NO_SIGHTS
    from bridle.multimodal import Source
    from bridle.serving.lifecycle.in_process import InProcessServing

    given: str | tuple[int, ...] = prompt
    sources, sights = [Source(path, path.name, modality=modality) for modality, path in ask.files], NO_SIGHTS
    if ask.chat:
        shown: list[dict[str, Any]] = [{"type": modality, modality: path} for modality, path in ask.files]
        content = [*shown, {"type": "text", "text": prompt}] if shown else prompt
        made = make_prompt(loaded, Conversation([{"role": "user", "content": content}]))
        given, sources, sights = made.tokens, [], made.sights
    return InProcessServing(loaded).request(
        given,
        params,
        options.steering(loaded),
        adapter=adapter,
        add_special_tokens=not ask.chat,
        pictures=sources,
        sights=sights,
        trace=trace,
    )


def _model_and_prompt(words: tuple[str, ...]) -> tuple[str, str]:
    if len(words) not in (1, 2):
        raise InvalidRequest(_misuse(words), "PROMPT")
    name, prompt = words if len(words) == 2 else ("demo", words[0])
    if len(words) == 1 and (prompt in DEMO_MODELS or Path(prompt, "config.json").is_file()):
        raise InvalidRequest(f"generate takes [MODEL] PROMPT, but got the model {prompt!r} alone; add a text", "PROMPT")
    return name, sys.stdin.read() if prompt == "-" else prompt


def _misuse(words: tuple[str, ...]) -> str:
    """Return an error message with the usage of the command. The message names an unknown flag in `words`."""
    flag = next((word for word in words if word.startswith("--") and len(word) > 2), None)
    if flag is not None:
        from bridle.cli.typo_suggestions import unknown_flag

        return unknown_flag(flag, "generate")
    if not words:
        return 'generate takes [MODEL] PROMPT, but got 0 words, as in: bridle generate "Once upon a time"'
    shown = " ".join(words)[:60]
    return f'generate takes [MODEL] PROMPT, but got {len(words)} words; put the prompt in quotes, as in "{shown}"'


def _print_stream(loaded: LoadedModel, request: Request, tracing: TraceOptions, *, show_stats: bool) -> None:
    """Print the text as it is generated. A terminal shows text at once, even if the text may be rolled back. A file
    gets only final text."""
    from rich.console import Console

    from bridle.cli.output import TerminalTextStream
    from bridle.serving.tracing.trace_header import traces_of

    printer = tracing.printer(Console(highlight=False))
    stream = TerminalTextStream(loaded, request, marks=sys.stdout.isatty(), on_record=printer)
    for piece in stream:
        if printer is None:
            print(piece, end="", flush=True)
    print()
    tracing.keep(traces_of(loaded, [stream.output]))
    if show_stats:
        print(stream.summary, file=sys.stderr)


def _print_json(loaded: LoadedModel, request: Request, prompt: str, tracing: TraceOptions) -> None:
    from bridle.serving.lifecycle.request_handle import run
    from bridle.serving.outputs.output_collector import raise_first_error
    from bridle.serving.tracing.trace_header import traces_of

    with run(loaded.client, request, prompt) as running:
        output = running.read()
    tracing.keep(traces_of(loaded, [output]))
    raise_first_error(output)
    print(json.dumps(_as_json(loaded.name, output), ensure_ascii=False))


def _as_json(name: str, output: RequestOutput) -> dict[str, Any]:
    first, usage = output.outputs[0], output.usage
    return {
        "model": name,
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason.value if first.finish_reason else None,
        "stop_reason": first.stop_reason,
        "usage": {name: getattr(usage, name) for name in usage.__slots__},
    }
