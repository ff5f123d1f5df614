"""A validated request of a client, which is the engine's input.

A `Request` has one or more sequences. The front end checks all fields, and the engine only reads them. Stopping
criteria end an output. Each criterion is called after every new token of a sequence. A criterion returns None to
continue. To stop the output, a criterion returns the token, a short text with the reason, or `FinishReason.LENGTH` for
a limit. Stop strings are not criteria: they need text, so `OutputText` finds them. User-defined criteria are called
after the standard ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

from bridle.engine.guardrails.guardrails import Guardrails
from bridle.engine.multimodal.multimodal_inputs import MultiModalItem, Runs
from bridle.engine.sampling.token_healing import TokenHealing
from bridle.outputs import FinishReason
from bridle.sampling import DEFAULT_SAMPLING, SamplingParams

_MAX_NAME_CHARS = 64

# -- completion of an output -------------------------------------------------------------------------------


@runtime_checkable
class StoppingCriteria(Protocol):
    """A condition that completes an output. Called after each new token of a sequence, with all tokens of the sequence
    and the number of prompt tokens. Returns a short reason to stop the output, or None to continue. The criterion must
    not modify `tokens`."""

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> str | int | None: ...


class StopOnTokens:
    """Stop when the last token is one of `ids`."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = frozenset(ids)

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> int | None:
        return tokens[-1] if tokens[-1] in self.ids else None


class MaxLength:
    """Stop when the sequence has `max_len` tokens, including the prompt."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> str | None:
        return FinishReason.LENGTH if len(tokens) >= self.max_len else None


class MaxNewTokens:
    """Stop after `limit` generated tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> str | None:
        return FinishReason.LENGTH if len(tokens) - num_prompt >= self.limit else None


class StopOnRepetition:
    """Stop when the last `num_tokens` tokens were generated `times` times in a row."""

    def __init__(self, num_tokens: int, times: int) -> None:
        self.num_tokens = num_tokens
        self.times = times

    def __call__(self, tokens: Sequence[int], num_prompt: int) -> str | None:
        size = self.num_tokens
        if len(tokens) - num_prompt < size * self.times:
            return None
        last = list(tokens[-size:])
        for k in range(2, self.times + 1):
            if list(tokens[-k * size : -(k - 1) * size]) != last:
                return None
        return "repetition"


def name_of(controller: object) -> str:
    """Return the name of a controller for logs and traces: its name in the request, or else the name of its class."""
    kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(controller).__name__).lower()
    names = (getattr(controller, field, None) for field in ("asked_as", "module", "__name__"))
    return str(next(filter(None, names), kind))[:_MAX_NAME_CHARS]


class RepeatMarks(NamedTuple):
    """Marks of parts of a text that must not be repeated. A part is the text from `opening` to `closing`. A repeated
    part ends the output and is left out of it. Text before the mark `restart` does not count."""

    opening: str
    closing: str
    restart: str = ""


# -- the request -------------------------------------------------------------------------------------------

#: In the key of a retained prefix that has a name: stands in place of an output's number.
NAMED = -1
#: As `num_tokens`: all tokens, including those of the output.
ALL_TOKENS = 1 << 60


@dataclass(frozen=True, slots=True)
class Retention:
    """Retain the KV of the first `num_tokens` tokens of a prompt for `seconds` seconds. Only full blocks are retained.

    A retention without a name is prolonged whenever a request uses it. `name` must be unique among all users. A new
    prefix with the same name replaces the old one, and use does not prolong a named prefix."""

    num_tokens: int
    seconds: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `num_tokens` tokens of a prompt, which users share. The user `owner` shares the prefix with a `group`;
    all users of the group share its KV."""

    group: str
    owner: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request.

    `controller` has any form that the pool of this kind of controller accepts. `deadline` is a time of the engine's
    clock, in seconds. `tenant` salts the prefix cache: requests share cached blocks only within one tenant. The prefix
    `shared` is an exception: tenants of its group share its blocks. Waiting requests are served in order of `priority`,
    then `place`, then arrival; smaller values come first. With `detokenize` False, events have no text. `stopping` are
    user-defined criteria in addition to those of `sampling`. `tell_resuming` asks for a `Resuming` event if the device
    is lost. `generated` are output tokens from another engine that the client already has; the output continues after
    them. `generated` is allowed only for a single output without a controller. `media` are the images of the prompt;
    `runs` are their positions in it. A request that `embeds` asks only for the vector of the prompt. With `trace`, the
    request gets a `Traced` event for every change of an output. The request's controllers may call `tools` (None: all);
    its client answers calls of `client_tools`. With `parks`, the KV of an output that ended by itself is retained for a
    while. A request that names this request in `continues` uses its retained KV. The beginnings of the prompt in
    `retains` are retained too, no matter how the output ends. Replicas send requests with the same `cache_key` to the
    same engine, as long as that engine is not too busy. `guard` has the operator's rules for the output texts.
    `healing` says how the output replaces the removed end of the prompt. `repeats` marks parts of an output that must
    not occur twice. With `is_composed`, the request stands for one controller of a request with several controllers.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = DEFAULT_SAMPLING
    controller: object | None = None
    adapter: str | None = None
    stopping: tuple[StoppingCriteria, ...] = ()
    deadline: float | None = None
    tenant: str = ""
    shared: SharedPrefix | None = None
    priority: int = 0
    place: float = 0.0
    detokenize: bool = True
    tell_resuming: bool = False
    generated: tuple[int, ...] = ()
    embeds: bool = False
    media: tuple[MultiModalItem, ...] = ()
    runs: Runs = ()
    trace: bool = False
    tools: tuple[str, ...] | None = None
    client_tools: tuple[str, ...] = ()
    parks: bool = False
    retains: tuple[Retention, ...] = ()
    cache_key: str = ""
    repeats: RepeatMarks | None = None
    continues: str = ""
    guard: Guardrails | None = None
    healing: TokenHealing | None = None
    is_composed: bool = False
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def controller_name(self) -> str | None:
        """Return the name of the request's controller, or None."""
        return None if self.controller is None else name_of(self.controller)

    @property
    def salt(self) -> str | SharedPrefix:
        """Return the owner (salt) of the prompt's first block. Two requests can share their first block only if their
        salts are equal."""
        return self.tenant if self.shared is None else replace(self.shared, owner="", num_tokens=0)

    @property
    def is_plain(self) -> bool:
        """Return whether an output is determined by its tokens alone, so that another engine can resume it. Outputs
        with controllers are excluded, and samplers whose state depends on more than the previous tokens."""
        return self.sampling.n == 1 and self.controller is None and not self.sampling.has_mirostat
