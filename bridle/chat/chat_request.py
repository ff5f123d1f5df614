"""Prepares the engine request of a chat, and reads the text that it generates.

Every API with conversations calls `prepare_chat`: messages become a prompt, and tools and reasoning become a grammar of
the output (`output_grammar.py`). A reader then separates the reasoning, the calls and the answer in the output. This
module knows no wire format.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from bridle.chat import stream_deltas as deltas
from bridle.chat.cached_prompt import num_common
from bridle.chat.constraint_description import with_description
from bridle.chat.conversation import ChatPrompt, Conversation, make_prompt
from bridle.chat.exact_history import keep_answers, recalled
from bridle.chat.files import has_remote_file
from bridle.chat.output_grammar import OutputGrammar
from bridle.chat.output_marks import OutputMarks, known_marks, learn_marks, may_open
from bridle.chat.reasoning import ReasoningReader, ThinkTags
from bridle.chat.repeated_calls import marks_of, repeats_calls
from bridle.chat.tool_choice import ToolChoice
from bridle.chat.tool_parsers.formats import ToolFormat
from bridle.chat.tool_parsers.grammar import Function
from bridle.chat.tool_parsers.harmony import Harmony
from bridle.engine.request import Request, Retention
from bridle.errors import InvalidRequest
from bridle.multimodal import has_remote
from bridle.outputs import ChatMessage, CompletionOutput, FinishReason
from bridle.sampling import SamplingParams
from bridle.serving import LoadedModel, RewindPolicy
from bridle.serving.requests.request_builder import EventOptions
from bridle.serving.requests.steering import PLAIN, Named, Steering
from bridle.structured_output import Constraint


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated chat: the parts of its engine request, and the reader of its output. `is_thinking`: the prompt ends
    inside reasoning. `is_calling`: the prompt ends with the token that begins calls. `events` has the prompt's images
    and the retained KV from which it continues. `calls_once`: the client accepts only one call. `ends` are special
    tokens that may end an output and are visible as text. `functions` may be called. `is_vouched`: a grammar enforces
    the format of tool calls. `rendered` is the prompt's text from the template. `channels` is the format of a model
    that writes in channels."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    steering: Steering
    format: ToolFormat | None
    tags: ThinkTags | None
    is_thinking: bool
    is_calling: bool
    events: EventOptions
    calls_once: bool = False
    ends: tuple[str, ...] = ()
    functions: tuple[Function, ...] = ()
    is_vouched: bool = False
    rendered: str = ""
    channels: Harmony | None = None

    def reader(self, is_whole: bool = False, is_cut: bool = True) -> TurnReader:
        """Return a reader for one output. With `is_whole`, the reader can distinguish an incomplete call from a
        complete one. An incomplete call is content, unless the output `is_cut` at its token limit."""
        schemas = {function.name: function.parameters for function in self.functions}
        rules = deltas.CallRules(frozenset(schemas), is_whole or not self.is_vouched, schemas, is_cut)
        kind = self.format or self.channels
        tools = None if kind is None else kind.reader(self.is_calling, rules)
        thoughts = None if self.tags is None or self.is_calling else ReasoningReader(self.tags, self.is_thinking)
        return TurnReader(thoughts, tools, self.calls_once, self.ends)

    def message(self, output: CompletionOutput) -> ChatMessage:
        """Return a complete output, parsed."""
        text, is_cut = output.text, output.finish_reason is FinishReason.LENGTH
        if self.format is None and self.tags is None and self.channels is None:
            return ChatMessage(content=text)
        return deltas.ParsedMessage().add(self.reader(is_whole=True, is_cut=is_cut).push(text, is_last=True))

    def keep(self, model: LoadedModel, request: Request, found: Iterable[tuple[CompletionOutput, ChatMessage]]) -> None:
        """Store the parsed outputs of a finished request for the conversation that continues them, if its KV is
        retained."""
        if request.parks:
            keep_answers(model, request, self.rendered, found)

    def num_thinking(self, tokens: list[int]) -> int:
        """Return the number of reasoning tokens in an output, tags included."""
        if self.tags is None or not tokens or not (self.is_thinking or self.tags.opening_token in tokens[:2]):
            return 0
        closing = self.tags.closing_token
        return tokens.index(closing) + 1 if closing in tokens else len(tokens)


class TurnReader:
    """Separates reasoning, calls and content of one output. With `calls_once`, only the first call is read. A text of
    `ends` at the end of the output is dropped."""

    def __init__(
        self,
        thoughts: ReasoningReader | None,
        tools: deltas.ToolReader | None,
        calls_once: bool = False,
        ends: tuple[str, ...] = (),
    ) -> None:
        self._thoughts, self._tools = thoughts, tools
        self._calls_once, self._ends = calls_once, ends
        self._arguments: list[str] | None = None  # arguments of the last call
        self.found = deltas.ParsedMessage()

    def push(self, text: str, is_last: bool = False) -> list[deltas.StreamDelta]:
        """Return the deltas that are certain after `text`."""
        pieces = self._push(text, is_last)
        self.found.add(pieces)
        return pieces

    @property
    def is_plain(self) -> bool:
        """Return whether all text of the output is content, up to its end."""
        return self._tools is None and not self._ends and (self._thoughts is None or self._thoughts.is_over)

    def add_content(self, text: str) -> None:
        """Record text that was sent as content without parsing, because the output `is_plain`."""
        self.found.content += text

    def _push(self, text: str, is_last: bool) -> list[deltas.StreamDelta]:
        pieces: list[deltas.StreamDelta] = []
        if is_last:
            text = text.removesuffix(next(filter(text.endswith, self._ends), ""))
        if self._thoughts is not None:
            thoughts, text = self._thoughts.push(text, is_last)
            pieces += [deltas.Thought(thoughts)] if thoughts else []
        if self._tools is None:
            return [*pieces, deltas.Content(text)] if text else pieces
        found = self._tools.push(text, is_last)
        if self._calls_once:
            found = [piece for piece in found if not getattr(piece, "number", 0)]
        for piece in found:
            match piece:
                case deltas.ToolCallStart():
                    self._arguments = []
                case deltas.CallArguments() if self._arguments is not None:
                    self._arguments.append(piece.text)
        return pieces + found

    @property
    def has_calls(self) -> bool:
        """Return whether there are calls and the last call is complete. A stop string in the arguments of a call may
        cut the call off."""
        try:
            return self._arguments is not None and msgspec.json.decode("".join(self._arguments)) is not None
        except (msgspec.DecodeError, RecursionError):
            return False


class SteeringFields(Named, Protocol):
    """Fields of a request body that steer its output. With `stream`, the answer is streamed."""

    rewind: Any
    stream: bool | None

    def form(self) -> Constraint | None:
        """Return the output constraint; None if the body has none."""
        raise NotImplementedError


class ChatServing(Protocol):
    """The context of a chat: a server's request (`RequestLifecycle`), or a program's own model (`InProcessServing`)."""

    model: LoadedModel
    user: str

    def bounded(self, doing: str) -> AbstractAsyncContextManager[None]:
        """Raise `DeadlineExceeded` when the deadline passes inside the block, if the context enforces a deadline
        there."""
        raise NotImplementedError

    def steering(self, named: Named, constraint: Constraint | None, rewind: str | None) -> Steering:
        """Return the controllers, constraint and rewind policy that a request's fields choose."""
        raise NotImplementedError


async def prepare_chat(
    serving: ChatServing,
    conversation: Conversation,
    sampling: SamplingParams,
    given: Steering | SteeringFields = PLAIN,
    *,
    tells_rewinds: bool = False,
) -> ChatRequest:
    """Validate, render and compile a chat of any API, steered by `given`, without submitting it. Recent answers to the
    same user are repeated in the prompt with their exact tokens. `tells_rewinds`: the API's streams can report
    rolled-back text. Raises `InvalidRequest` that names the field."""
    if isinstance(given, Steering):
        steering, has_stream = given, False
    else:
        steering, has_stream = serving.steering(given, given.form(), given.rewind), bool(given.stream)
    if sampling.describe_constraint:
        conversation = with_description(conversation, steering.constraint)
        sampling = sampling.with_(describe_constraint=False)
    model, offer = serving.model, conversation.offer()
    limit = model.tokenizer.chat_settings.max_repeated_calls
    if limit and offer.functions and not offer.is_required and repeats_calls(conversation.messages, limit):
        offer = ToolChoice()
    async with serving.bounded("its prompt was made"):
        await learn_marks(model)
        made = await _prompt(serving, conversation, offer)
        marks = OutputMarks.of(model, offer, made.text, is_held=steering.rewind is RewindPolicy.HOLD)
        steered, is_vouched = await _constrain(model, conversation, offer, steering, marks, made.text)
    if has_stream:
        _check_rewind(steering, marks.format, tells_rewinds)
    if marks.token is not None or marks.are_special:
        sampling = sampling.with_(skip_special_tokens=False)
    return ChatRequest(
        prompt=(*made.tokens, marks.token) if marks.token is not None and marks.is_calling else made.tokens,
        sampling=sampling,
        steering=steered,
        format=marks.format,
        tags=marks.tags,
        is_thinking=marks.is_thinking,
        is_calling=marks.is_calling,
        events={
            "sights": made.sights,
            "parks": marks.format is not None,
            "continues": made.continues,
            "retains": await _retained(serving, conversation, offer, made) if conversation.breakpoints else (),
            "repeats": None if marks.format is None else marks_of(marks.format, marks.tags),
        },
        calls_once=offer.max_calls == 1,
        ends=marks.ends(model.tokenizer) if marks.are_special else (),
        functions=offer.functions,
        is_vouched=is_vouched,
        rendered="" if conversation.prefill or made.sights.runs or conversation.template is not None else made.text,
        channels=marks.channels,
    )


async def _constrain(
    model: LoadedModel,
    conversation: Conversation,
    offer: ToolChoice,
    steering: Steering,
    marks: OutputMarks,
    prompt: str,
) -> tuple[Steering, bool]:
    """Add the grammar of calls, reasoning and answer, if the chat needs a grammar. Returns the steering, and whether it
    enforces the format of calls. A request with its own controller gets no grammar unless one of its features needs a
    grammar."""
    kind, tags, budget = marks.format, marks.tags, conversation.thinking_budget
    if kind is None and budget is None and (tags is None or steering.constraint is None):
        return steering, False
    is_asked_for = steering.constraint is not None or offer.is_required or offer.is_strict or budget is not None
    if steering.controller is not None and not is_asked_for:
        return steering, False
    own, opens = None if marks.is_calling else tags, may_open(model, conversation, tags, prompt)
    sentence = _sentence(model, conversation)
    form = OutputGrammar(model, own, marks.is_thinking, budget, sentence, marks.token, opens)
    return await form.steer(steering, kind, offer)


def _check_rewind(steering: Steering, kind: ToolFormat | None, tells_rewinds: bool) -> None:
    """Raise `InvalidRequest` if streamed text may be rolled back but the API cannot report that."""
    if steering.rewind is not RewindPolicy.HOLD and (kind is not None or not tells_rewinds):
        where = "with tools" if tells_rewinds else "in streams of this route"
        raise InvalidRequest(f"rewind is {steering.rewind.value!r}; {where} it must be 'hold'", "rewind")


async def limited(model: LoadedModel, conversation: Conversation, made: ChatPrompt, given: Steering) -> Steering:
    """Return `given` with the reasoning budget of the conversation, for an output that is not parsed."""
    if conversation.thinking_budget is None:
        return given
    tags, _ = await model.in_text_thread(known_marks, model.tokenizer)
    is_thinking = tags is not None and made.text.rstrip().endswith(tags.opening)
    form = OutputGrammar(model, tags, is_thinking, conversation.thinking_budget, _sentence(model, conversation))
    return (await form.steer(given, None, ToolChoice()))[0]


def _sentence(model: LoadedModel, conversation: Conversation) -> str:
    """Return the text that the model must write when its reasoning budget ends."""
    own = conversation.thinking_budget_message
    return model.tokenizer.chat_settings.thinking_budget_message if own is None else own


async def render_prompt(serving: ChatServing, conversation: Conversation) -> ChatPrompt:
    """Return the prompt of a conversation, for a request whose output is not parsed."""
    async with serving.bounded("its prompt was made"):
        return await _prompt(serving, conversation, conversation.offer())


async def _retained(
    serving: ChatServing, conversation: Conversation, offer: ToolChoice, made: ChatPrompt
) -> tuple[Retention, ...]:
    """Return the part of the prompt's KV that each breakpoint retains: the blocks that the prompt shares with the
    breakpoint's shortened prompt. A prompt with images is retained as a whole, because images are not read twice. A
    shortened conversation that the template refuses is skipped."""
    if made.sights.runs:
        return tuple(Retention(len(made.tokens), seconds) for _, seconds in conversation.breakpoints[-1:])
    found, size = [], max(serving.model.info.block_size, 1)
    for cut, seconds in conversation.breakpoints:
        with suppress(InvalidRequest):
            common = num_common(made.tokens, (await _prompt(serving, cut, offer)).tokens)
            found.append(Retention(common // size * size, seconds))
    return tuple(found)


async def _prompt(serving: ChatServing, conversation: Conversation, offer: ToolChoice) -> ChatPrompt:
    """Return the prompt. Earlier answers that called tools have the model's exact tokens."""
    model, messages = serving.model, conversation.messages
    is_fetched = model.pictures is not None and (has_remote(messages) or has_remote_file(messages))
    in_thread = model.in_fetching_thread if is_fetched else model.in_text_thread
    made = await in_thread(make_prompt, model, conversation, offer)
    if any(message.get("tool_calls") for message in messages):
        made = await in_thread(recalled, model, serving.user, conversation, offer, made)
    return made
