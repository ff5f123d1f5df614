"""The grammar of an assistant's output: combines tools, reasoning and a constraint.

If there is a grammar of calls, it constrains the calls. Reasoning before the answer is unconstrained, and a budget may
limit it. This module does not depend on prompts and output readers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bridle.chat.reasoning import GAP, ThinkTags
from bridle.chat.tool_choice import ToolChoice
from bridle.chat.tool_parsers.formats import InferredFormat, ToolFormat
from bridle.controllers.composition import compose
from bridle.controllers.reasoning_gate import CompiledGrammar, ReasoningThenGrammar, compile_grammar
from bridle.controllers.thinking import sentence_tokens
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.serving import LoadedModel
from bridle.serving.requests.steering import Steering
from bridle.structured_output import Constraint, OneOf


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """The grammar of one output. With `may_open`, the model may reason before a format that the client demands.
    `sentence` is the text that ends reasoning at the `budget`."""

    model: LoadedModel
    tags: ThinkTags | None
    is_thinking: bool
    budget: int | None
    sentence: str = ""
    call_token: int | None = None
    may_open: bool = True

    async def steer(self, given: Steering, kind: ToolFormat | None, offer: ToolChoice) -> tuple[Steering, bool]:
        """Return the steering of a request with tools and `given` (a constraint, a controller, or neither), and whether
        a grammar enforces the format of calls."""
        form = await self._form(kind, offer, given.constraint)
        if form is not None and self._is_out_of_reach(form, offer):
            if offer.is_strict or given.constraint is not None:
                raise UnsupportedFeature("strict tools cannot be combined with reasoning for this model", "tools")
            form = None
        is_vouched = kind is not None and form is not None and given.constraint is None
        return await self._steer(given, form, offer, is_vouched), is_vouched

    async def _steer(self, given: Steering, form: Constraint | None, offer: ToolChoice, is_vouched: bool) -> Steering:
        if self.tags is not None and self._thinks_first(form, is_vouched):
            thinking = await self._thinking(self.tags, form)
            return replace(given, constraint=None, controller=compose(given.controller, thinking))
        if self.budget and not offer.is_required:
            raise UnsupportedFeature(
                f"thinking_budget: {self.model.name!r} writes no reasoning here; leave it out", "thinking_budget"
            )
        if self.call_token is not None and not offer.is_required and form is not None:
            calls = ReasoningThenGrammar(self.call_token, then=await self._grammar(form))
            return replace(given, constraint=None, controller=compose(given.controller, calls))
        return replace(given, constraint=form)

    def _is_out_of_reach(self, form: Constraint, offer: ToolChoice) -> bool:
        """Return whether the grammar of calls cannot apply, because reasoning precedes the token that the grammar must
        follow."""
        return self.call_token is not None and not offer.is_required and self._thinks_first(form, False)

    def _thinks_first(self, form: Constraint | None, is_vouched: bool) -> bool:
        """Return whether unconstrained reasoning precedes `form`. A grammar of calls always leaves reasoning
        unconstrained, because a call within reasoning does not count. For any other format, it does if the model may
        begin reasoning; the format then applies to the text after the reasoning."""
        if self.tags is None or form is None:
            return self.tags is not None and self.budget is not None
        if self.budget is not None or self.is_thinking:
            return True
        return self.call_token is None and (is_vouched or self.may_open)

    async def _form(
        self, kind: ToolFormat | None, offer: ToolChoice, constraint: Constraint | None
    ) -> Constraint | None:
        """Return the constraint on the text after the reasoning."""
        if kind is None:
            return constraint
        if offer.is_required:
            return await self._usable(kind, offer)
        if constraint is not None:
            if self.call_token is not None:
                raise UnsupportedFeature(
                    f"{self.model.name!r} begins calls with a special token that constraints cannot contain: "
                    "tools cannot be combined with a constraint here; set tool_choice to 'none' or 'required'",
                    "tools",
                )
            return OneOf(await self._usable(kind, offer), constraint)
        return await self._freely(kind, offer)

    async def _freely(self, kind: ToolFormat, offer: ToolChoice) -> Constraint | None:
        """Return the grammar of an output in which the model may call tools. The grammar enforces names and syntax of
        calls, and the arguments of strict functions. Returns None if there is no such grammar and no function is
        strict."""
        if not (kind.is_spelled or offer.is_strict):
            return None
        loose = _loosened(kind, offer)
        form = kind.may_call(loose.functions) or kind.must_call(loose.functions, offer.max_calls)
        try:
            return await self._checked(form.constraint())
        except InvalidRequest:
            if offer.is_strict:
                raise
            return None

    async def _usable(self, kind: ToolFormat, offer: ToolChoice) -> Constraint:
        """Return the grammar of calls. Schemas of functions that are not strict are dropped if they cannot be
        compiled."""
        loose = _loosened(kind, offer)
        try:
            return await self._checked(kind.must_call(offer.functions, offer.max_calls).constraint())
        except InvalidRequest:
            if loose == offer:
                raise
            return await self._checked(kind.must_call(loose.functions, offer.max_calls).constraint())

    async def _checked(self, form: Constraint) -> Constraint:
        """Compile the constraint before the request runs. Raises `InvalidRequest` about the tools."""
        try:
            await self.model.try_constraint(form)
        except InvalidRequest as error:
            error.param = "tools"
            raise
        return form

    async def _thinking(self, tags: ThinkTags, form: Constraint | None) -> ReasoningThenGrammar:
        encode = self.model.tokenizer.encode
        gap = tuple(encode(GAP, add_special_tokens=False))
        said = sentence_tokens(self.model.tokenizer, self.sentence, (tags.opening_token, tags.closing_token))
        return ReasoningThenGrammar(
            end=tags.closing_token,
            opening=None if self.is_thinking else tags.opening_token,
            budget=self.budget,
            closing=(*said, *encode("\n", add_special_tokens=False), tags.closing_token, *(() if form else gap)),
            gap=gap if form else (),
            then=await self._grammar(form) if form else None,
            may_stop=form is None,
        )

    async def _grammar(self, form: Constraint | None) -> CompiledGrammar:
        pool = self.model.constraints
        if pool is None or form is None:
            raise UnsupportedFeature(
                f"{self.model.name!r} is served without constraints, which tools need here", "tools"
            )
        return await compile_grammar(pool, form)


def _loosened(kind: ToolFormat, offer: ToolChoice) -> ToolChoice:
    """Return the tools without the schemas of functions that are not strict. Grammars of tagged arguments keep all
    schemas, because they spell the name of each argument."""
    return offer if isinstance(kind, InferredFormat) and kind.needs_schemas else offer.loosened()
