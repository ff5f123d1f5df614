"""Steps: what a script awaits. Each decides about the sequence until the step is over.

A step of a script's own overrides `mid_process` and `post_process`, or the three callbacks of AICI's first
generation, where `post_process` takes the tokens alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

from pyaici import sequence
from pyaici.constraints import Constraint
from pyaici.results import Branch, MidProcessResult, PostProcessResult, PreProcessResult
from pyaici.sequence import Label, get_tokens, num_changes, self_seq_id
from pyaici.tokens import TokenSet, all_tokens, eos_token, tokenize, tokens_repr
from pyaici.variables import get_var


def log(level: int, *words: object) -> None:
    """Print for whoever asked for so much: `pyaici.server.log_level`."""
    if sys.modules["pyaici.server"].log_level >= level:
        sys.stdout.write(" ".join(map(str, words)) + "\n")


class NextToken:
    """Awaited, it draws one token; gives what was appended."""

    def __init__(self) -> None:
        self.finished = False
        self.curr_tokens: list[int] | None = None
        self.value: Any = None  # what awaiting it gives; `post_process` may say otherwise
        self.fork_group: list[int] = []

    def pre_process(self) -> PreProcessResult | None:
        """First generation: asked before `mid_process`."""
        return None

    def mid_process(self) -> MidProcessResult:
        """What may come next? By default any token."""
        return MidProcessResult.bias(all_tokens())

    def post_process(self, backtrack: int, tokens: list[int]) -> Any:
        """What `mid_process` said was done; these tokens were appended."""
        return None

    def is_fixed(self) -> bool:
        """The next answer does not depend on the model, so that the script may go on before it is carried out."""
        return False

    def __await__(self) -> Generator[NextToken, None, Any]:
        yield self
        return [] if self.value is None else self.value

    # -- called by the driver ------------------------------------------------------------------------------

    def ask(self, fork_group: list[int]) -> MidProcessResult:
        self.fork_group = fork_group
        return self.mid_process()

    def told(self, backtrack: int, tokens: list[int]) -> bool:
        """Whether the sequence goes on."""
        self.curr_tokens = self.value = tokens
        self.finished = self.finished or eos_token() in tokens
        code = getattr(self.post_process, "__code__", None)
        is_old = code is not None and code.co_argcount == 2  # self, tokens
        result = self.post_process(tokens) if is_old else self.post_process(backtrack, tokens)  # type: ignore[call-arg, arg-type]
        return not (isinstance(result, PostProcessResult) and result.stop_seq)


class PreToken(NextToken):
    """First generation: a step that is over when `pre_process` has had its way; it draws nothing."""


class StopToken(NextToken):
    """Ends the sequence."""

    def mid_process(self) -> MidProcessResult:
        return MidProcessResult.stop()


class Noop(NextToken):
    """Lets one step pass."""

    def mid_process(self) -> MidProcessResult:
        return MidProcessResult.noop()


class ConstrainedToken(NextToken):
    """Draws one token under the constraint that `mk_constraint` gives when the first is due. `finished` is true
    when the model has ended the text or nothing may follow."""

    def __init__(self, mk_constraint: Callable[[], Constraint]) -> None:
        super().__init__()
        self.mk_constraint = mk_constraint
        self._constraint: Constraint | None = None
        self._begin = Label()  # where its text begins
        self._seen = 0

    @property
    def constraint(self) -> Constraint:
        """Made when it is needed: that can take a moment."""
        self._renew()
        if self._constraint is None:
            self._constraint, self._begin, self._seen = self.mk_constraint(), Label(), num_changes()
        return self._constraint

    def _renew(self) -> bool:
        """Where policies have changed the text: begin again, with the text as it is now. Says whether that was done."""
        if self._constraint is None or self._seen == num_changes():
            return False
        self._constraint, self._seen = self.mk_constraint(), num_changes()
        try:
            for token in self._begin.tokens_since():
                self._constraint.append_token(token)
        except ValueError as error:
            what = "a policy has changed the text, and what is there now does not fit"
            raise ValueError(f"constraint: {what}: {error}. Allow such text in the constraint.") from None
        return True

    def allowed(self) -> TokenSet:
        """What may come next; the end if nothing may."""
        allowed = TokenSet()
        self.constraint.allow_tokens(allowed)
        if allowed.is_empty():
            log(1, "Constraint doesn't allow any tokens; adding EOS")
            allowed[eos_token()] = True
        log(2, "ALLOW:", allowed)
        return allowed

    def mid_process(self) -> MidProcessResult:
        return MidProcessResult.bias(self.allowed())

    def post_process(self, backtrack: int, tokens: list[int]) -> Any:
        for token in () if self._renew() else tokens:
            self.constraint.append_token(token)
        if self.constraint.eos_forced():
            self.finished = True


class FixedTokens(NextToken):
    """Appends a text; with `following`, takes everything after that label back first."""

    def __init__(self, text: str | bytes, following: Label | None = None) -> None:
        super().__init__()
        self.text = text
        self.fixed_tokens = tokenize(text)
        self.following = following

    def is_fixed(self) -> bool:
        return True

    def mid_process(self) -> MidProcessResult:
        backtrack = 0
        if self.following is not None:
            backtrack = len(get_tokens()) - self.following.ptr
            if backtrack < 0:
                raise ValueError("the label lies after the end: tokens before it were taken back")
            log(1, "BACKTRACK", backtrack, tokens_repr(get_tokens()[self.following.ptr :]))
        log(1, "FIXED", repr(self.text.decode(errors="replace") if isinstance(self.text, bytes) else self.text))
        return MidProcessResult.splice(backtrack, self.fixed_tokens)


class GetPrompt:
    """Awaited, it gives the tokens of the prompt."""

    def __init__(self) -> None:
        self.prompt: list[int] | None = None

    def __await__(self) -> Generator[GetPrompt, None, list[int]]:
        yield self
        self.prompt = get_tokens()[: sequence.get_prompt_len()]
        return self.prompt


#: What a script may await.
CbType = GetPrompt | NextToken


class _Fork(NextToken):
    def __init__(self, branches: list[Branch]) -> None:
        super().__init__()
        self.branches = branches

    def mid_process(self) -> MidProcessResult:
        return MidProcessResult(self.branches)


class _ForkMember(NextToken):
    """Where a fork finds out which one it is."""

    def mid_process(self) -> MidProcessResult:
        return MidProcessResult.skip()


async def fork(forks: int | Sequence[Branch]) -> int:
    """Go on in several ways; gives the number of this one, from 0. A list has a `Branch` for each of them."""
    if not sequence.fork_supported():
        raise ValueError("this server cannot fork")
    branches = [Branch.noop() for _ in range(forks)] if isinstance(forks, int) else list(forks)
    if not branches:
        raise ValueError("fork needs at least one branch")
    await _Fork(branches)
    member = _ForkMember()
    await member
    number = member.fork_group.index(self_seq_id())
    seed = random.getrandbits(64)
    if number:
        random.seed(seed + number)  # forks would all throw the same dice
    return number


class _Wait(NextToken):
    """Rests until a variable is there or so many milliseconds have passed."""

    def __init__(self, variable: str | None, ms: float | None) -> None:
        super().__init__()
        self.variable, self.ms = variable, ms

    def mid_process(self) -> MidProcessResult:
        if self.variable is not None and get_var(self.variable) is not None:
            return MidProcessResult.skip()
        return MidProcessResult.wait(self.variable, 0, self.ms)


async def wait_vars(*names: str, timeout: float | None = None) -> list[bytes]:
    """Wait until all variables are set, perhaps by other forks; gives their values.

    Beyond AICI: `timeout` is how many seconds to wait for the next of them; then `TimeoutError` is raised."""
    for name in names:
        if get_var(name) is None:
            await _Wait(name, None if timeout is None else 1000 * timeout)
            if get_var(name) is None:
                raise TimeoutError(f"variable {name!r} was not set within {timeout} seconds")
    return [get_var(name) or b"" for name in names]


async def sleep(seconds: float) -> None:
    """Beyond AICI: let time pass; other sequences go on."""
    await _Wait(None, 1000 * seconds)
