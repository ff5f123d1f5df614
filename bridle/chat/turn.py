"""An assistant's turn: from a conversation to the request behind it, and from its growing text to what a
client is told.

Every API with conversations uses this path: messages become a prompt, tools and thoughts become a constraint of the
request, and a reader separates thoughts, calls and the answer. This module knows no wire format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import msgspec

from bridle.chat.conversation import ChatPrompt, Conversation, make_prompt
from bridle.chat.reasoning import GAP, ReasoningReader, Tags, switched, tags_of, thinks_unasked
from bridle.chat.recall import keep_answers, recalled
from bridle.chat.tools.formats import ToolFormat, format_of
from bridle.chat.tools.offer import Offer
from bridle.chat.tools.pieces import CallArguments, CallBegun, CallRules, Content, Found, Piece, Thought, ToolReader
from bridle.constraints import Constraint, OneOf
from bridle.controllers.composition import compose
from bridle.controllers.free_part import FreePart, Grammar, compile_grammar
from bridle.engine.media import NO_SIGHTS, Sights
from bridle.engine.request import Request
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.media import has_remote
from bridle.outputs import ChatMessage, CompletionOutput
from bridle.sampling import SamplingParams
from bridle.service import LoadedModel, RewindPolicy
from bridle.service.requests import Wanted
from bridle.service.steering import PLAIN, Steering
from bridle.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Turn:
    """The engine request of a turn, and how its text is read. `is_thinking` says that the prompt ends inside of
    thoughts, `is_calling` that it ends with the token that begins calls, `calls_once` that one call is all that a
    client takes. `ends` are special tokens that may end an output and show as text. `functions` may be called, and
    `is_vouched` says that a grammar holds the calls. `sights` are the pictures of the prompt, `rendered` is its text as
    the template wrote it. It goes on from what a request has parked that it `continues`."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    steering: Steering
    format: ToolFormat | None
    tags: Tags | None
    is_thinking: bool
    is_calling: bool
    calls_once: bool = False
    ends: tuple[str, ...] = ()
    functions: frozenset[str] = frozenset()
    is_vouched: bool = False
    sights: Sights = NO_SIGHTS
    rendered: str = ""
    continues: str = ""

    @property
    def wanted(self) -> Wanted:
        """What the request is beside its prompt and how it is drawn."""
        return {"sights": self.sights, "parks": self.format is not None, "continues": self.continues}

    def reader(self, is_whole: bool = False) -> TurnReader:
        """A reader for one output. With `is_whole` it can tell a call that was cut off from a complete one."""
        rules = CallRules(self.functions, is_held=is_whole or not self.is_vouched)
        tools = None if self.format is None else self.format.reader(self.is_calling, rules)
        thoughts = None if self.tags is None or self.is_calling else ReasoningReader(self.tags, self.is_thinking)
        return TurnReader(thoughts, tools, self.calls_once, self.ends)

    def message(self, text: str) -> ChatMessage:
        """A whole output, told apart."""
        if self.format is None and self.tags is None:
            return ChatMessage(content=text)
        return Found().add(self.reader(is_whole=True).push(text, is_last=True))

    def keep(self, model: LoadedModel, request: Request, found: Iterable[tuple[CompletionOutput, ChatMessage]]) -> None:
        """Remember the outputs of a request that is over, told apart, for the conversation that goes on from them."""
        if request.parks:
            keep_answers(model, request, self.rendered, found)

    def num_thinking(self, tokens: list[int]) -> int:
        """How many of an output's tokens are thoughts, tags included."""
        if self.tags is None or not tokens or not (self.is_thinking or self.tags.opening_token in tokens[:2]):
            return 0
        closing = self.tags.closing_token
        return tokens.index(closing) + 1 if closing in tokens else len(tokens)


class TurnReader:
    """Separates thoughts, calls and content of one output; of calls it reads only the first if the turn `calls_once`.
    One of `ends` at the end of the output is dropped."""

    def __init__(
        self,
        thoughts: ReasoningReader | None,
        tools: ToolReader | None,
        calls_once: bool = False,
        ends: tuple[str, ...] = (),
    ) -> None:
        self._thoughts, self._tools = thoughts, tools
        self._calls_once, self._ends = calls_once, ends
        self._arguments: list[str] | None = None  # of the last call
        self.found = Found()

    def push(self, text: str, is_last: bool = False) -> list[Piece]:
        """What became certain with `text`."""
        pieces = self._push(text, is_last)
        self.found.add(pieces)
        return pieces

    def _push(self, text: str, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if is_last:
            text = text.removesuffix(next(filter(text.endswith, self._ends), ""))
        if self._thoughts is not None:
            thoughts, text = self._thoughts.push(text, is_last)
            pieces += [Thought(thoughts)] if thoughts else []
        if self._tools is None:
            return [*pieces, Content(text)] if text else pieces
        found = self._tools.push(text, is_last)
        if self._calls_once:
            found = [piece for piece in found if not getattr(piece, "number", 0)]
        for piece in found:
            match piece:
                case CallBegun():
                    self._arguments = []
                case CallArguments() if self._arguments is not None:
                    self._arguments.append(piece.text)
        return pieces + found

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, and the last one is complete; a stop string in its arguments may cut it off."""
        try:
            return self._arguments is not None and msgspec.json.decode("".join(self._arguments)) is not None
        except msgspec.DecodeError:
            return False


async def plan_turn(
    model: LoadedModel,
    conversation: Conversation,
    sampling: SamplingParams,
    steering: Steering = PLAIN,
    user: str = "",
) -> Turn:
    """Check, render and compile everything; nothing is submitted. Answers that the `user` got of late go into the
    prompt as they were written. Raises `InvalidRequest` that names the field."""
    offer = conversation.offer()
    is_fetched = model.pictures is not None and has_remote(conversation.messages)
    in_thread = model.in_fetching_thread if is_fetched else model.in_text_thread
    made = await in_thread(_make_prompt, model, conversation, offer, user)
    text, prompt = made.text, made.tokens
    kind = format_of(model.tokenizer) if offer.functions else None
    tags = _known_tags(model.tokenizer) if steering.rewind is RewindPolicy.HOLD else None
    is_thinking = tags is not None and text.rstrip().endswith(tags.opening)
    has_thought = tags is not None and text.rstrip().endswith(tags.closing)
    may_open = tags is not None and not has_thought and _may_think(model.tokenizer, conversation)
    plan = _Plan(model, tags, is_thinking, conversation.thinking_budget, may_open=may_open)
    is_calling = kind is not None and offer.is_required and kind.opening_token is not None
    if kind is not None and kind.opening_token is not None:
        token = model.tokenizer.id_of(kind.opening_token)
        if token is None:
            raise UnsupportedFeature(f"{model.name!r} has no token {kind.opening_token}, so it cannot call", "tools")
        sampling = sampling.with_(skip_special_tokens=False)
        prompt = (*prompt, token) if is_calling else prompt
        plan = replace(plan, call_token=token, tags=None if is_calling else tags)
    is_vouched = False
    budget = conversation.thinking_budget
    is_planned = kind is not None or budget is not None or (tags is not None and steering.constraint is not None)
    if is_planned:
        is_asked_for = steering.constraint is not None or offer.is_required or offer.is_strict or budget is not None
        if steering.controller is None or is_asked_for:
            steering, is_vouched = await plan.steer(steering, kind, offer)
    ends: tuple[str, ...] = ()
    if tags is not None and tags.are_special:
        sampling = sampling.with_(skip_special_tokens=False)
        ends = tuple(map(model.tokenizer.token_text, model.tokenizer.eos_token_ids))
    once, names = offer.max_calls == 1, frozenset(function.name for function in offer.functions)
    return Turn(
        prompt,
        sampling,
        steering,
        kind,
        tags,
        is_thinking,
        is_calling,
        once,
        ends,
        names,
        is_vouched,
        made.sights,
        "" if conversation.prefill or made.sights.runs or conversation.template is not None else text,
        made.continues,
    )


def _make_prompt(model: LoadedModel, conversation: Conversation, offer: Offer, user: str) -> ChatPrompt:
    """The prompt, with the model's own tokens in place of earlier answers that called tools."""
    made = make_prompt(model, conversation, offer)
    has_calls = any(message.get("tool_calls") for message in conversation.messages)
    return recalled(model, user, conversation, offer, made) if has_calls else made


#: What was found out about tokenizers, as long as they are there.
_TAGS: WeakKeyDictionary[Tokenizer, Tags | None] = WeakKeyDictionary()
_THINKS: WeakKeyDictionary[Tokenizer, bool] = WeakKeyDictionary()


def _known_tags(tokenizer: Tokenizer) -> Tags | None:
    if tokenizer not in _TAGS:
        _TAGS[tokenizer] = tags_of(tokenizer)
    return _TAGS[tokenizer]


def _may_think(tokenizer: Tokenizer, conversation: Conversation) -> bool:
    """Whether a model may open thoughts before a form: if it is told to think, or does so by itself. Else the tag is
    only the likeliest of what a mask leaves, and an answer that was demanded would be thoughts."""
    said = switched(conversation.options())
    if said is not None or conversation.template is not None:
        return said is not False
    if tokenizer not in _THINKS:
        _THINKS[tokenizer] = thinks_unasked(tokenizer)
    return _THINKS[tokenizer]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Decides how an output is steered. It `may_open` thoughts before a form that the client demands."""

    model: LoadedModel
    tags: Tags | None
    is_thinking: bool
    budget: int | None
    call_token: int | None = None
    may_open: bool = True

    async def steer(self, given: Steering, kind: ToolFormat | None, offer: Offer) -> tuple[Steering, bool]:
        """What steers a request with these tools and the constraint `given` (a constraint, a controller, or nothing),
        and whether a grammar enforces the form of its calls."""
        form = await self._form(kind, offer, given.constraint)
        if form is not None and self._is_out_of_reach(form, offer):
            if offer.is_strict or given.constraint is not None:
                raise UnsupportedFeature("strict tools cannot be combined with thoughts here", "tools")
            form = None
        is_vouched = kind is not None and form is not None and given.constraint is None
        return await self._steer(given, form, offer, is_vouched), is_vouched

    async def _steer(self, given: Steering, form: Constraint | None, offer: Offer, is_vouched: bool) -> Steering:
        if self.tags is not None and self._thinks_first(form, is_vouched):
            thinking = await self._thinking(self.tags, form)
            return replace(given, constraint=None, controller=compose(given.controller, thinking))
        if self.budget and not offer.is_required:
            raise UnsupportedFeature(
                f"{self.model.name!r} writes no thoughts that a budget could limit", "thinking_budget"
            )
        if self.call_token is not None and not offer.is_required and form is not None:
            calls = FreePart(self.call_token, then=await self._grammar(form))
            return replace(given, constraint=None, controller=compose(given.controller, calls))
        return replace(given, constraint=form)

    def _is_out_of_reach(self, form: Constraint, offer: Offer) -> bool:
        """Whether thoughts come before the token that a grammar of calls would have to follow, so that it
        cannot apply."""
        return self.call_token is not None and not offer.is_required and self._thinks_first(form, False)

    def _thinks_first(self, form: Constraint | None, is_vouched: bool) -> bool:
        """Whether a free part for thoughts comes before the form. A grammar of calls always leaves the thoughts free,
        because calls in thoughts are no calls. Any other form leaves them free if the model may open them: what
        follows them has to have the form."""
        if self.tags is None or form is None:
            return self.tags is not None and self.budget is not None
        if self.budget is not None or self.is_thinking:
            return True
        return self.call_token is None and (is_vouched or self.may_open)

    async def _form(self, kind: ToolFormat | None, offer: Offer, constraint: Constraint | None) -> Constraint | None:
        """The form of the text after the thoughts."""
        if kind is None:
            return constraint
        if offer.is_required:
            return await self._usable(kind, offer)
        if constraint is not None:
            if self.call_token is not None:
                raise UnsupportedFeature(
                    f"{self.model.name!r} begins calls with a token that no constraint knows: "
                    "tools cannot be combined with a constraint here; set tool_choice to 'none' or 'required'",
                    "tools",
                )
            return OneOf(await self._usable(kind, offer), constraint)
        return await self._freely(kind, offer)

    async def _freely(self, kind: ToolFormat, offer: Offer) -> Constraint | None:
        """The grammar of an output in which the model may call. It enforces names and syntax of calls, and the
        arguments of strict functions. None if there is no such grammar and the client does not insist."""
        if not (kind.is_spelled or offer.is_strict):
            return None
        loose = offer.loosened()
        form = kind.may_call(loose.functions) or kind.must_call(loose.functions, offer.max_calls)
        try:
            return await self._checked(form.constraint())
        except InvalidRequest:
            if offer.is_strict:
                raise
            return None

    async def _usable(self, kind: ToolFormat, offer: Offer) -> Constraint:
        """The grammar of calls. Schemas that cannot be used are left out if the client does not insist on them."""
        loose = offer.loosened()
        try:
            return await self._checked(kind.must_call(offer.functions, offer.max_calls).constraint())
        except InvalidRequest:
            if loose == offer:
                raise
            return await self._checked(kind.must_call(loose.functions, offer.max_calls).constraint())

    async def _checked(self, form: Constraint) -> Constraint:
        """Compile the form before the request runs. Raises `InvalidRequest` about the tools."""
        try:
            await self.model.try_constraint(form)
        except InvalidRequest as error:
            error.param = "tools"
            raise
        return form

    async def _thinking(self, tags: Tags, form: Constraint | None) -> FreePart:
        encode = self.model.tokenizer.encode
        gap = tuple(encode(GAP, add_special_tokens=False))
        return FreePart(
            end=tags.closing_token,
            opening=None if self.is_thinking else tags.opening_token,
            budget=self.budget,
            closing=(*encode("\n", add_special_tokens=False), tags.closing_token, *(() if form else gap)),
            gap=gap if form else (),
            then=await self._grammar(form) if form else None,
            may_stop=form is None,
        )

    async def _grammar(self, form: Constraint | None) -> Grammar:
        pool = self.model.constraints
        if pool is None or form is None:
            raise UnsupportedFeature(f"{self.model.name!r} is served without constraints", "tools")
        return await compile_grammar(pool, form)
