"""`bridle chat`: a streamed conversation in the terminal. The speed is printed below each reply."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bridle.cli.control_options import ToolOptions
from bridle.cli.model_files import default_model
from bridle.cli.options import Files, ModelOptions, SamplingOptions
from bridle.cli.policy_options import PolicyOptions
from bridle.cli.preflight import check_models
from bridle.cli.steering_options import SteeringOptions
from bridle.cli.terminal import harmless
from bridle.cli.trace_options import TraceOptions
from bridle.errors import ContextOverflow, InvalidRequest, UnknownAdapter, UnsupportedFeature

if TYPE_CHECKING:
    from rich.console import Console

    from bridle.chat.chat_request import ChatRequest
    from bridle.cli.output import TerminalTextStream
    from bridle.sampling import SamplingParams
    from bridle.serving.lifecycle.in_process import InProcessServing
    from bridle.serving.models.loading import LoadedModel
    from bridle.serving.requests.request_builder import EventOptions
    from bridle.traces import Trace

_HELP = (
    "/reset forgets the conversation, /system TEXT sets the system prompt, /adapter NAME chooses an adapter, "
    "/image FILE sends an image with the next turn, /audio FILE sends a sound file, "
    "/video FILE sends a video, /undo removes the last turn, /quit ends."
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TalkOptions:
    """Options for the beginning and the display of a conversation."""

    system: str | None = None
    "System prompt for the model."
    stats: bool = True
    "Show token counts and speed after each reply."
    adapter: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    "LoRA adapter from a folder or the hub: [NAME=]SOURCE. The first one is used at the start. Repeatable."
    image: Files = ()
    "Image for the first turn. `/image FILE` adds one to a later turn. Repeatable."
    audio: Files = ()
    "Sound file for the first turn. `/audio FILE` adds one to a later turn. Repeatable."
    video: Files = ()
    "Video file for the first turn. `/video FILE` adds one to a later turn. Repeatable."


def chat(
    name: Annotated[str | None, Parameter(name="MODEL")] = None,
    /,
    *,
    talk: TalkOptions = TalkOptions(),
    model: ModelOptions = ModelOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    steering: SteeringOptions = SteeringOptions(),
    tracing: TraceOptions = TraceOptions(),
    policies: PolicyOptions = PolicyOptions(),
    tools: ToolOptions = ToolOptions(),
) -> int:
    """Talk to a model in the terminal.

    `bridle chat` uses SmolLM2-135M-Instruct, downloaded once; `bridle chat Qwen/Qwen3-0.6B` uses another model. `/help`
    lists the commands of a conversation. Ctrl-C stops a reply, Ctrl-D ends the conversation.

    Parameters
    ----------
    name
        Model to load: folder, hub id, a name that `bridle pull` lists, `demo` or `demo-sees`.
    """
    from bridle.cli.loading import adapter_specs, loaded_model

    name = name or default_model()
    model.check_backend(name)
    check_models(name, model.draft_model, model.tokenizer, revision=model.revision)
    sampling.to_params()  # invalid values are reported before the model is loaded
    steering.named()
    specs = adapter_specs(talk.adapter)
    tracing.check()
    config, demands = model.to_config(name, warm_up=False), policies.demands()
    with loaded_model(config, adapters=specs, control=steering.control(), tools=tools.desk()) as loaded:
        loaded.policies = demands
        if not loaded.tokenizer.chat_template.is_present:
            raise InvalidRequest(f"{loaded.name} has no chat template; use `bridle generate`", "MODEL")
        conversation = TerminalChat(
            loaded,
            sampling.to_params(loaded, steering.by_name()),
            talk.system,
            specs[0].name if specs else None,
            show_stats=talk.stats,
            steering=steering,
            tracing=tracing,
        )
        conversation.show("image", *talk.image)
        conversation.show("audio", *talk.audio)
        conversation.show("video", *talk.video)
        conversation.run()
    return 0


@dataclass(slots=True)
class TerminalChat:
    """The turns of the conversation, and the loop that reads the user's lines. A reply that fails leaves the
    conversation unchanged."""

    loaded: LoadedModel
    params: SamplingParams
    system: str | None = None
    adapter: str | None = None
    show_stats: bool = True
    steering: SteeringOptions = field(default_factory=SteeringOptions)
    tracing: TraceOptions = field(default_factory=TraceOptions)
    traces: list[Trace] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)  # media for the next turn
    console: Console = field(init=False)

    def __post_init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False)

    def run(self) -> None:
        """Read lines until /quit or the end of input."""
        self.console.print(f"[dim]{self.loaded.name}: {_HELP}[/dim]", soft_wrap=True)
        while True:
            try:
                line = self.console.input("[bold cyan]> [/bold cyan]").strip()
            except EOFError:
                self.console.print()
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.say(line)

    def command(self, line: str) -> None:
        """Execute a line that begins with a slash."""
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self.turns.clear()
        elif word == "/undo":
            del self.turns[-2:]
        elif word == "/system":
            self.system = rest.strip() or None
        elif word == "/adapter":
            self.choose(rest.strip())
            return
        elif word in ("/image", "/audio", "/video"):
            self._try_to_show(word[1:], Path(rest.strip()).expanduser())
            return
        else:
            self._note(_HELP)
            return
        num_turns = len(self.turns) // 2
        self._note(f"{num_turns} turn{'s' * (num_turns != 1)}, system prompt: {self.system or 'none'}")

    def show(self, modality: str, *paths: Path) -> None:
        """Add images, sounds or videos to the next turn. Raises the error of an invalid file."""
        from bridle.multimodal import Source, reads

        if not paths:
            return
        pictures = self.loaded.pictures
        if pictures is None or modality not in pictures.senses:
            raise UnsupportedFeature(reads(self.loaded.name, self.loaded.modalities), modality)
        pictures.read_all([Source(path, path.name, modality=modality) for path in paths])
        self.shown += [{"type": modality, modality: path} for path in paths]

    def _try_to_show(self, modality: str, path: Path) -> None:
        from bridle.multimodal.modalities import WORDS

        try:
            self.show(modality, path)
        except InvalidRequest as error:
            self._note(str(error))
        else:
            number = sum(part["type"] == modality for part in self.shown)
            self._note(f"{number} {WORDS[modality][number != 1]} for the next turn")

    def _content(self, text: str) -> str | list[dict[str, Any]]:
        """Return the content of a user's turn: its media, then its text."""
        return [*self.shown, {"type": "text", "text": text}] if self.shown else text

    def choose(self, name: str) -> None:
        """Use an adapter for the next turns; none if `name` is empty."""
        try:
            self.loaded.adapters.resolve(name)
        except UnknownAdapter as error:
            self._note(str(error))
            return
        self.adapter = name or None
        self._note(f"adapter: {self.adapter or 'none'}")

    def say(self, text: str) -> None:
        """Run one turn: send the user's text, and print the reply as it is generated."""
        turns = [*self.turns, {"role": "user", "content": self._content(text)}]
        try:
            stream = self._stream(turns)
            reply = self._print(stream)
            self.keep_stream(stream)
        except ContextOverflow as error:
            self._note(f"{error}. /reset or /undo makes room.")
            return
        self.turns, self.shown = [*turns, {"role": "assistant", "content": reply}], []
        if self.show_stats:
            self._note(stream.summary)

    def _stream(self, turns: list[dict[str, Any]]) -> TerminalTextStream:
        from bridle.cli.output import TerminalTextStream
        from bridle.serving.lifecycle.in_process import InProcessServing

        serving = InProcessServing(self.loaded)
        chat = asyncio.run(self._prepare(serving, turns))
        events: EventOptions = {**chat.events, "trace": self.tracing.is_wanted}
        request = serving.request(chat.prompt, chat.sampling, chat.steering, adapter=self.adapter, **events)
        return TerminalTextStream(self.loaded, request, marks=True, on_record=self.tracing.printer(self.console))

    def keep_stream(self, stream: TerminalTextStream) -> None:
        """Add the trace of `stream`, and write the traces of all replies so far to the trace file."""
        from bridle.serving.tracing.trace_header import traces_of

        self.traces += traces_of(self.loaded, [stream.output])
        self.tracing.keep(self.traces)

    async def _prepare(self, serving: InProcessServing, turns: list[dict[str, Any]]) -> ChatRequest:
        """Prepare the request for the next turn, with the constraint and controllers from the flags. The model may
        reason before the answer."""
        from bridle.chat.chat_request import prepare_chat
        from bridle.chat.conversation import Conversation as Said

        system = [{"role": "system", "content": self.system}] if self.system else []
        steering = self.steering.steering(self.loaded)
        return await prepare_chat(serving, Said([*system, *turns]), self.params, steering)

    def _print(self, stream: TerminalTextStream) -> str:
        """Print the reply as it is generated, and return it. Ctrl-C cancels the reply and keeps the text so far."""
        try:
            self._show(stream)
        except KeyboardInterrupt:
            self._show(stream.stop())
            self.console.print("[dim] (stopped)[/dim]", end="")
        self.console.print()
        return stream.output.text

    def _show(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            if self.tracing.show != "tokens":
                self.console.print(harmless(piece), end="", markup=False, soft_wrap=True)

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, soft_wrap=True)
