"""Generating text: `gen_tokens` and `gen_text` of AICI, and what they are made of.

Beyond AICI: constraints by `json_schema` and `lark`, parameters of sampling for these draws alone (`temperature=0.2`,
`top_p=0.9`, ...), `bias`, and `top_logprobs` to see what else the model considered. Tokens that a constraint leaves no
choice about are appended without asking the model, and an end of text that the model draws is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyaici import sequence
from pyaici.constraints import (
    CfgConstraint,
    ChooseConstraint,
    Constraint,
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
    """One token, or all that are forced, up to a limit."""

    def __init__(self, mk_constraint: Callable[[], Constraint], branch: Mapping[str, Any]) -> None:
        super().__init__(mk_constraint)
        self._branch = branch
        self._forced: list[int] = []
        self.limit: Callable[[list[int]], list[int]] = list

    def is_fixed(self) -> bool:
        find = getattr(self.constraint, "forced_tokens", None)
        self._forced = self.limit(find()) if find is not None and sequence.get_config("ff_tokens") else []
        return bool(self._forced)

    def mid_process(self) -> MidProcessResult:
        if self._forced:
            return MidProcessResult.splice(0, self._forced)
        splices = [Splice([eos_token()], 1, [])] if sequence.get_config("when_sampled") else []
        return MidProcessResult([Branch(self.allowed(), splices, **self._branch)])

    def post_process(self, backtrack: int, tokens: list[int]) -> None:
        if self._forced:
            self._forced = []
        elif sequence.state.sampled == eos_token():
            self.finished = True
        super().post_process(backtrack, tokens)


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
    **sampling: float | None,
) -> Generation:
    """Generate under at most one constraint, until `max_tokens` tokens are there, `stop_at` is in the text, the model
    ends it or the constraint does. `constraint` makes one of the script's own."""
    makers: dict[Callable[..., Constraint], Any] = {
        RegexConstraint: regex,
        CfgConstraint: yacc,
        ChooseConstraint: options,
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
    step = _Draw(chosen[0] if chosen else Constraint, branch)
    made = await _collect(step, stop_at, max_tokens)
    if store_var is not None:
        set_var(store_var, made.data)
    log(1, "GEN", repr(made.text))
    return made


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
        considered = sequence.state.candidates if len(tokens) == 1 else []
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
