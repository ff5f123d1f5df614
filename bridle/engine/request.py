"""What a client asked for, after validation: the engine's input.

A `Request` owns one or more sequences. Everything in it was checked at the edge; the engine only reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridle.sampling import DEFAULT_SAMPLING, SamplingParams

if TYPE_CHECKING:
    from bridle.engine.interfaces import StoppingCriteria


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request.

    `controller` is what steers it, in whatever form the controller pool that owns it understands. `deadline` is a
    point of the engine's clock in seconds. `tenant` salts the prefix cache: requests share cached blocks only
    within one tenant. Waiting requests are taken in order of `priority`, then `turn`, then arrival, smaller ones first.
    `detokenize` False leaves text out of the events. `stopping` are user-made criteria beside
    the ones in `sampling`. `tell_resuming` asks for a `Resuming` event when the device is lost. `generated` are tokens
    that the output had on another engine, and that its client has: it goes on after them as if it had never been
    elsewhere. Only for a single output that nothing steers. One that `embeds` wants to know what the model makes of the
    prompt, and no token.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = DEFAULT_SAMPLING
    controller: object | None = None
    adapter: str | None = None
    stopping: tuple[StoppingCriteria, ...] = ()
    deadline: float | None = None
    tenant: str = ""
    priority: int = 0
    turn: float = 0.0
    detokenize: bool = True
    tell_resuming: bool = False
    generated: tuple[int, ...] = ()
    embeds: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
