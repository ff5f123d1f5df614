"""Explains a request from its trace: conflicts between mask and model, the cost of controllers, and repeated
computation. All figures are computed from the records. Other modules display these figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bridle.traces import records as r

#: Minimum probability that a mask must remove for a sampled token to count as a conflict.
LEAST = 0.01


@dataclass(frozen=True, slots=True)
class Fight:
    """A token at which mask and model disagree. The model gave the token `wanted` the probability `chance`, and gave
    the sampled token the probability `own`."""

    output: int
    at: int
    step: int
    text: str
    own: float
    wanted: str
    chance: float
    taken: float
    num_allowed: int | None


@dataclass(slots=True)
class OutputCount:
    """Counts of one output in a trace."""

    index: int
    parent: int | None = None
    num_sampled: int = 0
    num_forced: int = 0
    num_drafted: int = 0
    num_rewound: int = 0
    num_replaced: int = 0
    ended: str = "not over"


@dataclass(slots=True)
class OperationCount:
    """Counts of one kind of request that was sent to a control runtime. `slowest` is the number of the exchange that
    took longest."""

    name: str
    num_exchanges: int = 0
    num_refused: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    slowest: int = 0


@dataclass(slots=True)
class Explanation:
    """Counts and conflicts in a trace. `fights` are the conflicts between mask and model, sorted from the strongest to
    the weakest. The times of steps, in seconds, include only steps that sampled tokens."""

    trace: r.Trace
    outputs: list[OutputCount] = field(default_factory=list)
    fights: list[Fight] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0
    queued: float = 0.0
    opening: float = 0.0
    num_again: int = 0
    num_bits: float = 0.0  # bits of information that mask and bias gave
    answer: float = 0.0
    slowest: r.TokenRecord | None = None
    waits: list[r.WaitRecord] = field(default_factory=list)
    num_steps: int = 0
    forward: float = 0.0
    wait: float = 0.0
    sample: float = 0.0
    operations: dict[str, OperationCount] = field(default_factory=dict)
    _costs: dict[int, r.Cost] = field(default_factory=dict)

    @property
    def controller(self) -> str | None:
        """Return the name of the controller."""
        form = self.trace.header.controller
        return None if form is None else str(form.get("name"))

    def total(self, name: str) -> int:
        """Return a count summed over all outputs."""
        return sum(getattr(output, name) for output in self.outputs)

    @property
    def sentences(self) -> list[str]:
        """Return the explanation in a few sentences."""
        if self.trace.header.runtime is not None:
            told = [self._exchanged()]
        else:
            told = [self._what(), *self._fought(), *self._controlled(), *self._in_vain(), self._timed()]
        if self.trace.num_cut:
            told.append(f"{self.trace.num_cut} records are missing, because there were too many.")
        return told

    def _exchanged(self) -> str:
        each = list(self.operations.values())
        most = max(each, key=lambda operation: operation.longest, default=None)
        slowest = (
            ""
            if most is None
            else (f"; the longest took {1000 * most.longest:.1f} ms, number {most.slowest}, {most.name}")
        )
        return (
            f"{_count(sum(operation.num_exchanges for operation in each), 'exchange')} with the control runtime in "
            f"{1000 * sum(operation.seconds for operation in each):.1f} ms, of which "
            f"{sum(operation.num_refused for operation in each)} were answered with an error{slowest}."
        )

    def _what(self) -> str:
        parts = [f"{_count(self.total('num_sampled'), 'token')} sampled"]
        if drafted := self.total("num_drafted"):
            parts[0] += f" ({drafted} of them drafted)"
        parts.append(f"{_count(self.total('num_forced'), 'token')} forced")
        by = f" by {self.controller}" if self.controller is not None else ""
        cached = f", {self.num_cached} of them cached" if self.num_cached else ""
        return (
            f"{_count(len(self.outputs), 'output')} from {_count(self.num_prompt, 'prompt token')}{cached}: "
            f"{' and '.join(parts)}{by}."
        )

    def _fought(self) -> list[str]:
        if not self.fights:
            return ["No mask removed a token that the model preferred."] if self.controller else []
        worst = self.fights[0]
        return [
            f"A mask overruled the model at {_count(len(self.fights), 'token')}, most strongly at token {worst.at} of "
            f"output {worst.output}: it removed {100 * worst.taken:.1f} % of the probability, the model preferred "
            f"{worst.wanted!r} ({100 * worst.chance:.1f} %) and got {worst.text!r} ({100 * worst.own:.2g} %).",
            f"All masks and biases together added {self.num_bits:.1f} bits of information.",
        ]

    def _controlled(self) -> list[str]:
        told = []
        if self.answer and self.controller is not None:
            slow = self.slowest
            most = f", the longest {1000 * slow.answer:.1f} ms before token {slow.at}" if slow is not None else ""
            told.append(f"{self.controller} took {1000 * self.answer:.1f} ms for its answers{most}.")
        late = sum(wait.num_steps for wait in self.waits if wait.late)
        if late:
            told.append(f"It was late in {_count(late, 'step')}.")
        waited = [wait for wait in self.waits if not wait.late]
        if waited:
            names = sorted({name for wait in waited for name in wait.variables})
            what = f" for {', '.join(names)}" if names else ""
            seconds = sum(wait.seconds for wait in waited)
            told.append(f"It waited {_count(len(waited), 'time')}{what}, {1000 * seconds:.1f} ms in all.")
        return told

    def _in_vain(self) -> list[str]:
        vain = [
            f"{_count(count, 'token')} {what}"
            for count, what in (
                (self.total("num_rewound"), "rolled back"),
                (self.total("num_replaced"), "replaced as soon as sampled"),
                (self.num_again, "computed again"),
            )
            if count
        ]
        return [f"Wasted: {', '.join(vain)}."] if vain else ["No work was wasted."]

    def _timed(self) -> str:
        return (
            f"It took {_count(self.num_steps, 'step')}: {1000 * self.forward:.1f} ms of forward passes, "
            f"{1000 * self.wait:.1f} ms of waiting for controllers, {1000 * self.sample:.1f} ms of sampling; before, "
            f"{1000 * self.queued:.1f} ms in the queue and {1000 * self.opening:.1f} ms to make the controller."
        )


def explain(trace: r.Trace) -> Explanation:
    """Return the explanation of a trace, computed from all of its records."""
    made = Explanation(trace)
    counts = {0: OutputCount(0)}
    for record in trace.records:
        _add(made, counts.setdefault(record.output, OutputCount(record.output)), record)
    made.outputs = [count for _, count in sorted(counts.items())]
    made.fights.sort(key=lambda fight: -fight.taken)
    costs = made._costs.values()
    made.num_steps = len(costs)
    made.forward, made.wait = sum(cost.forward for cost in costs), sum(cost.wait for cost in costs)
    made.sample = sum(cost.sample for cost in costs)
    return made


def _add(made: Explanation, count: OutputCount, record: r.Record) -> None:
    match record:
        case r.PromptRecord():
            made.num_prompt, made.num_cached = len(record.tokens), record.num_cached
            made.queued, made.opening = record.queued, record.opening
        case r.ChunkRecord():
            made.num_again += record.num_again
            _add_cost(made, record.step, record.cost)
        case r.TokenRecord():
            count.num_sampled += not record.forced
            count.num_forced += record.forced
            count.num_drafted += record.drafted
            made.answer += record.answer
            if made.slowest is None or record.answer > made.slowest.answer:
                made.slowest = record
            _add_cost(made, record.step, record.cost)
            _add_fight(made, record)
        case r.ReplacedRecord():
            count.num_replaced += 1
        case r.RewindRecord():
            count.num_rewound += record.num_tokens
        case r.ForkRecord():
            count.parent = record.parent
        case r.WaitRecord():
            made.waits.append(record)
        case r.ExchangeRecord():
            _add_exchange(made, record)
        case r.EndRecord():
            count.ended = record.reason


def _add_exchange(made: Explanation, record: r.ExchangeRecord) -> None:
    name = str(record.request.get("op")) if isinstance(record.request, dict) else "no JSON"
    count = made.operations.setdefault(name, OperationCount(name))
    count.num_exchanges += 1
    count.num_refused += not isinstance(record.reply, dict) or record.reply.get("type") != "ok"
    count.seconds += record.seconds
    if record.seconds >= count.longest:
        count.longest, count.slowest = record.seconds, record.step


def _add_cost(made: Explanation, step: int, cost: r.Cost | None) -> None:
    if cost is not None:
        made._costs[step] = cost


def _add_fight(made: Explanation, token: r.TokenRecord) -> None:
    draw = token.draw
    if draw is None or draw.after is None:
        return
    made.num_bits += max(draw.after.logprob - draw.before.logprob, 0.0) / math.log(2)
    if draw.taken >= LEAST:
        wanted, chance = best_of(draw.before)
        own = math.exp(min(draw.before.logprob, 0.0))
        text = token.spelled or str(token.token)
        place = (token.output, token.at, token.step)
        made.fights.append(Fight(*place, text, own, wanted, chance, draw.taken, draw.num_allowed))


def best_of(odds: r.Odds) -> tuple[str, float]:
    """Return the most probable token of a distribution in readable form, and its probability."""
    if not odds.top:
        return "", 0.0
    token, logprob = odds.top[0]
    return (odds.texts[0] if odds.texts else str(token)), math.exp(min(logprob, 0.0))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
