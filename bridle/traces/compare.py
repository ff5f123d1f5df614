"""Compares two traces of the same request: tokens, masks, rollbacks, forks, logs and variables. Times are not compared.
Steps are not compared either, because a controller may be late in one run and in time in the other. The moves (changes)
of an output are compared in order. The logs and variables of an output's controller are compared separately."""

from __future__ import annotations

from dataclasses import dataclass, field

from bridle.traces import records as r

#: Number of moves before a difference that are shown with it.
AROUND = 6
#: Reasons that end an output from outside. The length of such an output does not count as a difference.
_BROKEN_OFF = frozenset({"cancelled", "deadline"})


@dataclass(frozen=True, slots=True)
class Move:
    """A move is one change of an output. Two moves are equal if they look the same to a reader of the trace. `record`
    has further details of the move."""

    what: str
    values: tuple[object, ...]
    record: r.Record | None = field(default=None, compare=False)

    @property
    def draw(self) -> r.Draw | None:
        record = self.record
        return record.draw if isinstance(record, (r.TokenRecord, r.ReplacedRecord)) else None

    def __str__(self) -> str:
        match self.record:
            case r.TokenRecord() as token:
                how = f"forced by {token.by}" if token.forced else "sampled" + _mask(token.draw)
                return f"token {token.token} {token.spelled!r} {how}"
            case r.ReplacedRecord() as replaced:
                return f"token {replaced.token} {replaced.spelled!r} sampled{_mask(replaced.draw)}, and replaced"
            case r.RewindRecord() as rewind:
                return f"{rewind.num_tokens} tokens rolled back"
            case r.ForkRecord() as fork:
                return f"fork of output {fork.parent} after {fork.num_tokens} tokens"
            case r.EndRecord() as end:
                return f"end ({end.reason})" + (f": {end.error}" if end.error else "")
            case _:
                return self.what


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """The first difference of two traces in output `output`: one move from each trace (None: no more moves), and the
    moves `before`. `gap` is the difference in log-probability between the most probable and the second most probable
    token, in the first run."""

    output: int
    number: int
    before: tuple[Move, ...]
    old: Move | None
    new: Move | None
    gap: float | None = None


@dataclass(slots=True)
class Comparison:
    """The result of comparing two traces. `num_moves` is the number of compared moves. `is_exact` says that all
    log-probabilities were equal to the last bit."""

    num_moves: int = 0
    num_tokens: int = 0
    differences: list[TraceDifference] = field(default_factory=list)
    outputs_with_other_logs: list[int] = field(default_factory=list)
    outputs_with_other_variables: list[int] = field(default_factory=list)
    is_exact: bool = True

    @property
    def is_same(self) -> bool:
        return not (self.differences or self.outputs_with_other_logs or self.outputs_with_other_variables)

    @property
    def sentences(self) -> list[str]:
        """Return the differences of the traces as sentences."""
        told = []
        for each in self.differences:
            told.append(
                f"Output {each.output} differs at move {each.number}: {each.old or 'nothing more'} before, "
                f"{each.new or 'nothing more'} now."
            )
            if each.gap is not None:
                told.append(
                    f"There the best token was likelier than the second one by {each.gap:.3g} (difference of "
                    "log-probabilities)"
                    + ("; so close, another arithmetic decides otherwise." if each.gap < 0.05 else ".")
                )
        if self.outputs_with_other_logs:
            told.append(f"Other logs: outputs {', '.join(map(str, self.outputs_with_other_logs))}.")
        if self.outputs_with_other_variables:
            told.append(f"Other variables: outputs {', '.join(map(str, self.outputs_with_other_variables))}.")
        if self.is_same:
            bits = "to the last bit of every log-probability" if self.is_exact else "but for bits of log-probabilities"
            told.append(f"All is the same, {bits}: {self.num_tokens} tokens in {self.num_moves} moves.")
        return told


def compare(old: r.Trace, new: r.Trace) -> Comparison:
    """Compare a trace with another run of the same request."""
    found = Comparison()
    before, now = _moves(old.records), _moves(new.records)
    for output in sorted(before.keys() | now.keys()):
        _compare_output(found, output, before.get(output, []), now.get(output, []))
    for output in sorted(before.keys() | now.keys()):
        if _is_broken_off(before.get(output, [])):
            continue
        if said_in(old.records, output) != said_in(new.records, output):
            found.outputs_with_other_logs.append(output)
        if wrote_in(old.records, output) != wrote_in(new.records, output):
            found.outputs_with_other_variables.append(output)
    return found


def _compare_output(found: Comparison, output: int, old: list[Move], new: list[Move]) -> None:
    if _is_broken_off(old):
        old = old[:-1]
        new = new[: len(old)]
    length = max(len(old), len(new))
    for number in range(length):
        before = old[number] if number < len(old) else None
        now = new[number] if number < len(new) else None
        if before != now:
            draw = None if before is None else before.draw
            around = tuple(old[max(number - AROUND, 0) : number])
            gap = None if draw is None or now is None or now.what != "token" else draw.gap
            found.differences.append(TraceDifference(output, number, around, before, now, gap))
            return
        assert before is not None
        assert now is not None
        found.num_moves += 1
        found.num_tokens += before.what == "token"
        found.is_exact = found.is_exact and _odds(before) == _odds(now)


def _moves(records: list[r.Record]) -> dict[int, list[Move]]:
    moves: dict[int, list[Move]] = {}
    for record in records:
        move = _move(record)
        if move is not None:
            moves.setdefault(record.output, []).append(move)
    return moves


def _move(record: r.Record) -> Move | None:
    match record:
        case r.TokenRecord():
            return Move("token", (record.token, record.forced, _allowed(record.draw)), record)
        case r.ReplacedRecord():
            return Move("replaced", (record.token, _allowed(record.draw)), record)
        case r.RewindRecord() if record.num_tokens or record.num_prompt:
            return Move("rewind", (record.num_tokens, record.num_prompt), record)
        case r.ForkRecord():
            return Move("fork", (record.parent, record.num_tokens), record)
        case r.EndRecord():
            return Move("end", (record.reason, record.stop), record)
        case _:
            return None


def _allowed(draw: r.Draw | None) -> int | None:
    return None if draw is None else draw.num_allowed


def _mask(draw: r.Draw | None) -> str:
    return "" if draw is None or draw.num_allowed is None else f" of {draw.num_allowed}"


def _odds(move: Move) -> object:
    draw = move.draw
    return None if draw is None else (draw.before.logprob, draw.before.top, draw.taken)


def _is_broken_off(moves: list[Move]) -> bool:
    last = moves[-1].record if moves else None
    return not isinstance(last, r.EndRecord) or last.reason in _BROKEN_OFF


def said_in(records: list[r.Record], output: int) -> str:
    """Return all text that the controller of an output printed."""
    return "".join(record.text for record in records if isinstance(record, r.LogRecord) and record.output == output)


def wrote_in(records: list[r.Record], output: int) -> str:
    """Return all writes of variables by the controller of an output, one line for each write."""
    return "\n".join(
        f"{record.name} {'+=' if record.is_append else '='} {record.value!r}"
        for record in records
        if isinstance(record, r.StoredRecord) and record.output == output
    )
