"""From a coroutine to callbacks: what the host calls, step by step.

Steps that do not need the model run ahead: several texts in a row reach the host as one splice, and the script goes on
before it is carried out. The host tells of each splice when it asks next; by then this side has reckoned with it.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Mapping
from typing import Any

from pyaici import sequence
from pyaici.results import Branch, MidProcessResult, Splice
from pyaici.steps import CbType, GetPrompt, NextToken, PreToken, StopToken
from pyaici.tokens import all_tokens

#: How many tokens a script may run ahead.
_MAX_AHEAD = 1024


class AiciCallbacks:
    """What the host calls. `register` an object of such a class to do without coroutines.

    A `mid_process` with one parameter, the fork group, is told by `post_process` what was done, as in AICI's first
    generation."""

    def init_prompt(self, prompt: list[int]) -> None:
        """Once, at first."""

    def mid_process(self, backtrack: int, tokens: list[int], fork_group: list[int]) -> MidProcessResult:
        """So many tokens were taken back, then these appended: what next?"""
        return MidProcessResult.bias(all_tokens())

    def post_process(self, backtrack: int, tokens: list[int]) -> Any:
        """First generation: what `mid_process` said was done."""


_registered: AiciCallbacks | None = None


def register(callbacks: AiciCallbacks) -> None:
    """Let the host call this object. Once."""
    global _registered
    if _registered is not None:
        raise RuntimeError("start or test was called before; a script calls one of them, once")
    _registered = callbacks


def registered() -> AiciCallbacks:
    """What was registered. Raises `RuntimeError` if nothing was."""
    if _registered is None:
        raise RuntimeError("the script ended without a call of aici.start(...) or aici.test(...)")
    return _registered


def ask(callbacks: AiciCallbacks, step: Mapping[str, Any], *, is_first: bool) -> MidProcessResult:
    """Tell callbacks of either generation what was done, ask them what comes next."""
    code = getattr(callbacks.mid_process, "__code__", None)
    if code is None or code.co_argcount != 2:  # self, fork_group
        return callbacks.mid_process(step["backtrack"], step["tokens"], step["fork_group"])
    if not is_first:
        callbacks.post_process(step["backtrack"], step["tokens"])
    return callbacks.mid_process(step["fork_group"])  # type: ignore[call-arg, arg-type]


class AiciAsync(AiciCallbacks):
    """Runs a coroutine as callbacks. `instance` is the one that runs."""

    instance: AiciAsync | None = None

    def __init__(self, coroutine: Coroutine[CbType, None, Any]) -> None:
        if not hasattr(coroutine, "send"):
            raise TypeError(f"start wants a coroutine, such as main(), not {type(coroutine).__name__}")
        self._coroutine = coroutine
        self._step: NextToken = StopToken()
        self._is_told = False  # whether the step hears of what is done next
        self._has_forked = False  # whether the step's own pre_process has
        self._ahead: Splice | None = None
        self._before: list[int] = []  # the tokens when it began to run ahead
        self._held: MidProcessResult | None = None
        self._failure: BaseException | None = None
        self._has_begun = False
        self.fork_group: list[int] = []
        register(self)
        AiciAsync.instance = self

    def init_prompt(self, prompt: list[int]) -> None:
        self.step()

    def step(self) -> None:
        """Let the script run to where it awaits its next step."""
        self._advance()

    def mid_process(self, backtrack: int, tokens: list[int], fork_group: list[int]) -> MidProcessResult:
        if self._has_begun:
            self._hear(backtrack, tokens)
        self._has_begun = True
        self.fork_group = fork_group
        return self._decide(fork_group)

    def _hear(self, backtrack: int, tokens: list[int]) -> None:
        if self._ahead is not None:  # told and reckoned with before, unless a policy had something else done
            ahead, self._ahead = self._ahead, None
            if (backtrack, tokens) != (ahead.backtrack, ahead.ff_tokens):
                sequence.state.tokens[:] = self._before
                sequence.apply(backtrack, tokens)
            return
        sequence.apply(backtrack, tokens)
        if self._is_told:
            self._finish(backtrack, tokens)

    def _decide(self, fork_group: list[int]) -> MidProcessResult:
        if self._failure is not None:
            raise self._failure
        ahead = Splice()
        ran = False
        self._before = []
        while len(ahead.ff_tokens) < _MAX_AHEAD:
            step = self._step
            try:
                is_fixed = step.is_fixed()
                if ran and not is_fixed:
                    break
                result, self._held = self._held or self._ask(step, fork_group), None
            except Exception as error:  # the script's affair: it may catch it, and it shows where it happened
                self._advance(error)
                continue
            if result.is_skip():
                self._finish(0, [])
                continue
            splice = result.only_splice
            if not (is_fixed and splice is not None and self._is_told):
                if not ran:
                    return result
                self._held = result  # until what ran ahead is carried out
                break
            if not ran:
                self._before = sequence.get_tokens().copy()
            ran = True
            sequence.apply(splice.backtrack, splice.ff_tokens)
            ahead.add_splice(splice)
            try:
                self._finish(splice.backtrack, splice.ff_tokens)
            except BaseException as error:  # after what was written before
                self._failure = error
                break
        self._ahead = ahead
        return MidProcessResult([Branch(splices=[ahead])])

    def _ask(self, step: NextToken, fork_group: list[int]) -> MidProcessResult:
        """The step's answer, of whichever generation."""
        step.fork_group = fork_group
        self._is_told = True
        pre = None if self._has_forked else step.pre_process()
        if pre is not None and pre.suspended:
            self._is_told = False
            return MidProcessResult.noop()
        if pre is not None and pre.num_forks > 1:
            self._is_told, self._has_forked = False, True
            return MidProcessResult([Branch.noop() for _ in range(pre.num_forks)])
        if pre is not None and pre.ff_tokens:
            return MidProcessResult.splice(0, pre.ff_tokens)
        return MidProcessResult.skip() if isinstance(step, PreToken) else step.ask(fork_group)

    def _finish(self, backtrack: int, tokens: list[int]) -> None:
        """The step is over."""
        try:
            goes_on = self._step.told(backtrack, tokens)
        except Exception as error:
            self._advance(error)
            return
        if goes_on:
            self._advance()
        else:
            self._coroutine.close()
            self._step = StopToken()

    def _advance(self, error: Exception | None = None) -> None:
        """Let the script run to its next step, perhaps with an error at the one where it is."""
        self._has_forked = False
        step: Any = None
        try:
            while not isinstance(step, NextToken):
                step = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
                error = None
                if not isinstance(step, (NextToken, GetPrompt)):
                    error = TypeError(f"a script awaits steps of pyaici.server, not {type(step).__name__}")
        except StopIteration:
            step = StopToken()
        self._step = step


def start(coroutine: Coroutine[CbType, None, Any]) -> AiciAsync:
    """Run a coroutine as the controller. When it returns, the sequence ends."""
    return AiciAsync(coroutine)


def test(coroutine: Coroutine[CbType, None, Any]) -> AiciAsync:
    """The same; prints `TEST OK` at the end."""

    async def tested() -> None:
        await coroutine
        sys.stdout.write("TEST OK\n")

    return AiciAsync(tested())
