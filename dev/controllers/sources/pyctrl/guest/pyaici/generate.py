"""Generating text: `gen_tokens` and `gen_text` of AICI, and what they are made of.

Beyond AICI: constraints by `json_schema` and `lark`, parameters of sampling for these draws alone (`temperature=0.2`,
`top_p=0.9`, ...), `bias`, and `top_logprobs` to see what else the model considered. Tokens that a constraint leaves no
choice about are appended without asking the model, and an end of text that the model draws is not kept. A text that
matches a regex ends where the model would leave the pattern, unless the `longest` one is wanted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pyaici import sequence
from pyaici.constraints import (
    CfgConstraint,
    ChooseConstraint,
    Constraint,
    HostConstraint,
    JsonConstraint,
    LarkConstraint,
    RegexConstraint,
    SubStrConstraint,
)
from pyaici.results import Branch, MidProcessResult, Splice, checked_sampling
from pyaici.sequence import Candidate, Label, num_changes
from pyaici.steps import ConstrainedToken, NextToken, log
from pyaici.tokens import TokenSet, all_tokens, detokenize, eos_token, tokenize
from pyaici.variables import set_var


@dataclass
class Generation:
    """What `gen` made. `candidates[i]` are what the model considered for `tokens[i]`, best first; none where a token
    was forced. `reason`: `end` (the model's or the constraint's), `stop_at` or `max_tokens`."""

    tokens: list[int] = field(default_factory=list)
    candidates: list[list[Candidate]] = field(default_factory=list)
    reason: str = "max_tokens"

    @property
    def data(self) -> bytes:
        return detokenize(self.tokens)

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


class _Draw(ConstrainedToken):
    """One token, or all that are forced, up to a limit. With `ends` it looks, where the text may end, at what the model
    would write without the constraint: a draw that is taken back, and appended in the next step if it fits."""

    def __init__(self, mk_constraint: Callable[[], Constraint], branch: Mapping[str, Any], ends: bool = False) -> None:
        super().__init__(mk_constraint)
        self._branch = branch
        self._ends = ends and sequence.backtrack_supported()
        self._num_tokens = 0
        self._is_look = self._must_mask = False
        self._chosen: list[int] = []  # what the model chose when it was looked
        self._forced: list[int] = []
        self.considered: list[Candidate] = []
        self.limit: Callable[[list[int]], list[int]] = list

    def is_fixed(self) -> bool:
        self._forced = self._chosen
        if self._forced:
            return True
        find = getattr(self.constraint, "forced_tokens", None)
        self._forced = self.limit(find()) if find is not None and sequence.get_config("ff_tokens") else []
        return bool(self._forced)

    def mid_process(self) -> MidProcessResult:
        if self._forced:
            return MidProcessResult.splice(0, self._forced)
        self._is_look = self._ends and not self._must_mask and self._num_tokens > 0 and self.constraint.eos_allowed()
        if self._is_look:
            return MidProcessResult([Branch(all_tokens(), [Splice([], 1, [])], **self._branch)])
        splices = [Splice([eos_token()], 1, [])] if sequence.get_config("when_sampled") else []
        return MidProcessResult([Branch(self.allowed(), splices, **self._branch)])

    def post_process(self, backtrack: int, tokens: list[int]) -> None:
        self.considered = self.considered if self._chosen else sequence.state.candidates
        self._num_tokens += len(tokens)
        if self._is_look:
            self._is_look = False
            self._look_at(sequence.state.sampled)
            return
        self._must_mask = False
        if self._forced:
            self._forced, self._chosen = [], []
        elif sequence.state.sampled == eos_token():
            self.finished = True
        super().post_process(backtrack, tokens)

    def _look_at(self, token: int | None) -> None:
        """Keep the model's choice, end where it leaves the pattern, or let the constraint choose."""
        allowed = self.allowed()
        if token is None or token == eos_token():
            self.finished = True
        elif allowed[token]:
            self._chosen = [token]
        else:
            self._must_mask = _begins_inside(token, allowed)
            self.finished = not self._must_mask


def _begins_inside(token: int, allowed: TokenSet) -> bool:
    """Whether a forbidden token begins with whole characters that are allowed."""
    text = detokenize([token]).decode(errors="ignore")
    heads = [tokenize(text[:end]) for end in range(1, len(text))]
    return any(len(head) == 1 and allowed[head[0]] for head in heads)


async def gen(
    regex: str | None = None,
    yacc: str | None = None,
    substring: str | None = None,
    substring_end: str = '"',
    options: list[str] | None = None,
    store_var: str | None = None,
    stop_at: str | None = None,
    max_tokens: int = 20,
    *,
    json_schema: Mapping[str, Any] | str | None = None,
    lark: str | None = None,
    constraint: Callable[[], Constraint] | None = None,
    bias: Mapping[int, float] | None = None,
    top_logprobs: int = 0,
    longest: bool = False,
    **sampling: float | None,
) -> Generation:
    """Generate under at most one constraint, until `max_tokens` tokens are there, `stop_at` is in the text, the model
    ends it or the constraint does. `constraint` makes one of the script's own. A text that matches `regex` ends where
    the model would leave the pattern; the `longest` one goes on."""
    makers: dict[Callable[..., Constraint], Any] = {
        RegexConstraint: regex,
        CfgConstraint: yacc,
        partial(_choice_of, max_tokens, stop_at): options,
        JsonConstraint: json_schema,
        LarkConstraint: lark,
    }
    chosen: list[Callable[[], Constraint]] = [
        lambda kind=kind, spec=spec: kind(spec)  # type: ignore[misc]
        for kind, spec in makers.items()
        if spec is not None
    ]
    if substring is not None:
        chosen.append(lambda: SubStrConstraint(substring, substring_end))
    if constraint is not None:
        chosen.append(constraint)
    assert len(chosen) <= 1, "at most one constraint can be given"
    branch = {"sampling": checked_sampling(sampling), "bias": bias or {}, "top_logprobs": top_logprobs}
    step = _Draw(chosen[0] if chosen else Constraint, branch, ends=regex is not None and not longest)
    made = await _collect(step, stop_at, max_tokens)
    if store_var is not None:
        set_var(store_var, made.data)
    log(1, "GEN", repr(made.text))
    return made


def _choice_of(max_tokens: int, stop_at: str | None, options: list[str]) -> Constraint:
    """The host's choice, since its engine scores whole texts; the script's own if a text is empty or may be cut."""
    if isinstance(options, list) and options and stop_at is None and all(_fits(each, max_tokens) for each in options):
        return HostConstraint("choice", json.dumps(options))
    return ChooseConstraint(options)


def _fits(text: str, max_tokens: int) -> bool:
    return bool(text) and (len(text.encode()) <= max_tokens or len(tokenize(text)) <= max_tokens)


async def _collect(step: _Draw, stop_at: str | None, max_tokens: int) -> Generation:
    """Await the step until it is time to stop."""
    made, begin, seen = Generation(), Label(), num_changes()

    def limit(forced: list[int]) -> list[int]:
        """As many of these tokens as there is room for, and none after the stop text."""
        forced = forced[: max_tokens - len(made.tokens)]
        if stop_at is not None:
            for end in range(1, len(forced) + 1):
                if stop_at in detokenize(made.tokens + forced[:end]).decode(errors="replace"):
                    return forced[:end]
        return forced

    step.limit = limit
    while len(made.tokens) < max_tokens:
        tokens = await step
        if seen == num_changes():
            made.tokens += tokens
        else:
            made.tokens, seen = begin.tokens_since(), num_changes()
        considered = step.considered if len(tokens) == 1 else []
        made.candidates += [considered, *([] for _ in tokens[1:])][: len(tokens)]
        if stop_at is not None and stop_at in made.text:
            made.reason = "stop_at"
            break
        if step.finished:
            made.reason = "end"
            break
    return made


async def gen_tokens(
    regex: str | None = None,
    yacc: str | None = None,
    substring: str | None = None,
    substring_end: str = '"',
    options: list[str] | None = None,
    store_var: str | None = None,
    stop_at: str | None = None,
    max_tokens: int = 20,
    **more: Any,
) -> list[int]:
    """The tokens of `gen`."""
    made = await gen(regex, yacc, substring, substring_end, options, store_var, stop_at, max_tokens, **more)
    return made.tokens


async def gen_text(
    regex: str | None = None,
    yacc: str | None = None,
    substring: str | None = None,
    substring_end: str = '"',
    options: list[str] | None = None,
    store_var: str | None = None,
    stop_at: str | None = None,
    max_tokens: int = 20,
    **more: Any,
) -> str:
    """The text of `gen`; bytes that are no text are replaced."""
    made = await gen(regex, yacc, substring, substring_end, options, store_var, stop_at, max_tokens, **more)
    return made.text


async def choose(options: list[str], **more: Any) -> str:
    """Beyond AICI: one of these texts; nothing if there are none."""
    longest = max((len(tokenize(option)) for option in options), default=0)
    return await gen_text(options=options, max_tokens=longest + 1, **more)


class _Look(NextToken):
    """Draws, and takes it back."""

    def __init__(self, count: int, among: TokenSet) -> None:
        super().__init__()
        self.count, self.among = count, among

    def mid_process(self) -> MidProcessResult:
        return MidProcessResult([Branch(self.among, [Splice([], 1, [])], top_logprobs=self.count)])


async def candidates(count: int = 5, among: TokenSet | Sequence[int] | None = None) -> list[Candidate]:
    """Beyond AICI: the likeliest next tokens and their log-probabilities, best first. Nothing is appended."""
    if among is None:
        among = all_tokens()
    elif not isinstance(among, TokenSet):
        tokens, among = among, TokenSet()
        for token in tokens:
            among[token] = True
    await _Look(count, among)
    return sequence.state.candidates
