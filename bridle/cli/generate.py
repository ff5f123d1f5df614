"""`bridle generate`: one prompt in, its continuation on stdout as it comes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bridle.cli.options import ModelOptions, SamplingOptions
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from bridle.engine.request import Request
    from bridle.outputs import RequestOutput
    from bridle.service.loading import LoadedModel

_MODEL = ModelOptions()
_SAMPLING = SamplingOptions()


def generate(
    words: Annotated[tuple[str, ...], Parameter(name="PROMPT", negative="", allow_leading_hyphen=True)] = (),
    /,
    *,
    chat: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    stats: bool = True,
    adapter: str | None = None,
    model: ModelOptions = _MODEL,
    sampling: SamplingOptions = _SAMPLING,
) -> int:
    """Continue a text.

    `bridle generate "Once upon a time"` lets the demo model do it,
    `bridle generate Qwen/Qwen3-0.6B "The capital of France is" --max-tokens 8 --temperature 0` that one.

    Parameters
    ----------
    words
        The text to continue, after the MODEL that shall do it (left out: the demo model). `-` reads standard
        input.
    chat
        Put the prompt into the model's chat template, as a user's message.
    as_json
        Print one JSON object with text, tokens and counts, when all is done.
    adapter
        A LoRA adapter to apply: a folder, a GGUF file, or a hub id, with `@REVISION` if need be.
    stats
        Say on stderr how many tokens there were and how fast they came.
    """
    from bridle.cli.loading import adapter_specs, loaded_model

    name, prompt = _model_and_prompt(words)
    params = sampling.to_params()
    specs = adapter_specs((adapter,) if adapter is not None else ())
    chosen = specs[0].name if specs else None
    with loaded_model(model.to_config(name, warm_up=False), adapters=specs) as loaded:
        from bridle.service.requests import build_request

        if chat:
            tokens = loaded.tokenizer.encode_chat([{"role": "user", "content": prompt}])
            request = build_request(loaded, tokens, params, adapter=chosen, add_special_tokens=False)
        else:
            request = build_request(loaded, prompt, params, adapter=chosen)
        if as_json:
            _print_json(loaded, request, prompt)
        else:
            _print_stream(loaded, request, show_stats=stats)
    return 0


def _model_and_prompt(words: tuple[str, ...]) -> tuple[str, str]:
    if len(words) not in (1, 2):
        raise InvalidRequest(
            f"generate takes [MODEL] PROMPT, but got {len(words)} words; put the prompt in quotes", "PROMPT"
        )
    name, prompt = words if len(words) == 2 else ("demo", words[0])
    if len(words) == 1 and (prompt == "demo" or Path(prompt, "config.json").is_file()):
        raise InvalidRequest(f"generate takes [MODEL] PROMPT, but got the model {prompt!r} alone; add a text", "PROMPT")
    return name, sys.stdin.read() if prompt == "-" else prompt


def _print_stream(loaded: LoadedModel, request: Request, *, show_stats: bool) -> None:
    from bridle.cli.output import TextStream

    stream = TextStream(loaded, request)
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    if show_stats:
        print(stream.summary, file=sys.stderr)


def _print_json(loaded: LoadedModel, request: Request, prompt: str) -> None:
    from bridle.service.collect import OutputCollector

    collector = OutputCollector(request, prompt)
    with loaded.client.submit(request) as stream:
        for events in stream:
            collector.add(events)
    print(json.dumps(_as_json(loaded.name, collector.output), ensure_ascii=False))


def _as_json(name: str, output: RequestOutput) -> dict[str, Any]:
    first = output.outputs[0]
    if first.error is not None:
        raise first.error
    usage = first.usage
    return {
        "model": name,
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason.value if first.finish_reason else None,
        "stop_reason": first.stop_reason,
        "usage": {name: getattr(usage, name) for name in usage.__slots__},
    }
