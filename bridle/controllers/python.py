"""Controllers written in plain Python: trusted code that runs inside the engine's process.

    class Shout(Controller):
        def next(self, view):
            return Decision.sample(mask=view.mask_of(UPPER_CASE_TOKENS))

    llm.generate("Say hello:", controller=Shout())

One instance controls one output; a fork copies it. Untrusted code needs Wasm controllers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bridle.controller_tools import Call, ToolSession
from bridle.engine.control.decision import Decision, mask_of
from bridle.engine.interfaces import StoredValue
from bridle.errors import ControllerError


@dataclass(slots=True)
class SequenceView:
    """An output's sequence as its controller sees it, with methods to send logs and variables.

    `tokens` are all tokens, the first `num_prompt` of them prompt; treat the list as read-only. `new_tokens` were
    appended since the last call, after `num_rewound` older ones were rolled back. `sampled` is the token that was
    sampled, None if no token was. `candidates` are the most probable tokens at that position with their
    log-probabilities, best first, if the last decision asked for them (`top_logprobs`). `index` is the number of the
    output within its request. `probes` are the projections of the hidden state from which `sampled` was sampled on
    control vectors, by the names in the request's `probes`. `may_force` is False for a controller that `is_lenient` if
    another controller forbids the tokens that it just tried to force. `rewritten_by` is the policy that replaced a part
    of the sampled or forced text since the last call.
    """

    tokens: list[int]
    num_prompt: int
    vocab_size: int
    index: int = 0
    new_tokens: tuple[int, ...] = ()
    num_rewound: int = 0
    sampled: int | None = None
    candidates: tuple[tuple[int, float], ...] | None = None
    may_force: bool = True
    rewritten_by: str = ""
    probes: Mapping[str, float] = field(default_factory=dict)
    _logs: list[str] = field(default_factory=list)
    _stored: list[StoredValue] = field(default_factory=list)
    _caller: ToolSession | None = None
    _calls: list[Call] = field(default_factory=list)  # calls whose answers this output may still need
    _encode: Callable[[str], Iterable[int]] | None = None
    _probe_names: tuple[str, ...] = ()

    @property
    def generated(self) -> list[int]:
        """Return the tokens after the prompt."""
        return self.tokens[self.num_prompt :]

    def mask_of(self, tokens: Iterable[int]) -> bytes:
        """Return the mask that allows exactly `tokens`."""
        return mask_of(tokens, self.vocab_size)

    def log(self, text: str) -> None:
        """Send a line to the client."""
        self._logs.append(text if text.endswith("\n") else text + "\n")

    def store(self, name: str, value: bytes) -> None:
        """Send a variable to the client."""
        self._stored.append(StoredValue(name, value))

    def tool(self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None) -> Call:
        """Call a tool. Returns at once. `Decision.wait_for(call)` waits for the answer, which is `call.text`. Several
        calls may run at once. A call ends with an error after `timeout` seconds."""
        if self._caller is None:
            raise ControllerError("this controller declares is_pure, so it may not call tools")
        call = self._caller.call(name, arguments, timeout)
        self._calls = [*(each for each in self._calls if not each.is_done), call]
        if call.notice is not None:
            self.store(*call.notice)
        return call

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, to be appended with `Decision.splice`."""
        if self._encode is None:
            raise ControllerError("the controller needs a tokenizer, and this engine has none")
        return tuple(self._encode(text))

    def copy(self) -> SequenceView:
        """Return a copy without pending logs and calls."""
        return replace(self, tokens=self.tokens.copy(), _logs=[], _stored=[], _caller=None, _calls=[])

    def take_logs(self) -> tuple[str, tuple[StoredValue, ...]]:
        """Return the logs and variables since the last call, and clear them."""
        logs, stored = "".join(self._logs), tuple(self._stored)
        self._logs.clear()
        self._stored.clear()
        return logs, stored


class Controller:
    """Controls one output, token by token. Override the methods that you need.

    An exception in any method ends only that output, with a `ControllerError`.

    A class may set `is_pure = True` if its answers depend only on its own state and its view. Such a class must have no
    other effects, such as files, clocks, random numbers or shared state. Copies of the controller are then asked about
    draft tokens, so that its output is as fast as one without a controller. The copy whose tokens are sampled replaces
    the controller, with its logs and variables; other copies are dropped. Controllers of other classes get no draft
    tokens.
    """

    is_pure: ClassVar[bool] = False
    #: The place MODULE:CLASS and the argument from which an operator's policy made the controller, so that another
    #: process can make it too.
    made_from: tuple[str, Any] | None = None
    #: The name by which a request selected the controller; logs and traces show this name.
    asked_as: str | None = None

    def start(self, prompt: tuple[int, ...]) -> Iterable[int] | None:
        """Called once, before the prompt is computed. May return another prompt."""
        return None

    def next(self, view: SequenceView) -> Decision:
        """Decide how the output continues. Called whenever tokens become known, first with the prompt."""
        return Decision.sample()

    def fork(self, branch: int) -> Controller:
        """Return the controller of a new output, made by branch `branch` (from 1) of this controller's last decision.

        A request for `n` outputs repeats the branches of its first sampling decision n times; `branch` counts all of
        them.
        """
        return copy.deepcopy(self)

    def finish(self, view: SequenceView) -> None:
        """Called once when the output has ended. Only `view.log` and `view.store` still have an effect."""
