"""Rebuilds the tokens and the text of each output from a trace, with the origin of each token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bridle.traces.records import EndRecord, ForkRecord, Record, RewindRecord, TokenRecord, Trace


@dataclass(slots=True)
class Rebuilt:
    """One output. `ends[i]` is the length of the text that was final after token i. `records` are the records of those
    tokens that were not rolled back."""

    index: int
    text: str = ""
    records: list[TokenRecord] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    end: EndRecord | None = None

    @property
    def token_ids(self) -> list[int]:
        return [record.token for record in self.records]

    @property
    def pieces(self) -> list[str]:
        """Return the text of each token, and the text after the last token."""
        starts = [0, *self.ends]
        return [self.text[start:stop] for start, stop in zip(starts, [*self.ends, len(self.text)], strict=True)]

    def _cut(self, num_tokens: int, num_chars: int) -> None:
        kept = max(len(self.records) - num_tokens, 0)
        del self.records[kept:], self.ends[kept:]
        self.text = self.text[: max(len(self.text) - num_chars, 0)]
        self.ends = [min(end, len(self.text)) for end in self.ends]

    def _fork(self, index: int) -> Rebuilt:
        return Rebuilt(index, self.text, list(self.records), list(self.ends))


def rebuild(trace: Trace) -> list[Rebuilt]:
    """Return the outputs of a trace, in the order of their index."""
    return [output for _, output in sorted(rebuild_records(trace.records).items())]


def rebuild_records(records: Iterable[Record]) -> dict[int, Rebuilt]:
    """Return the outputs that the given records describe, by index. If records are missing, their tokens are missing
    too."""
    outputs = {0: Rebuilt(0)}
    for record in records:
        output = outputs.setdefault(record.output, Rebuilt(record.output))
        match record:
            case TokenRecord():
                output.records.append(record)
                output.text += record.text
                output.ends.append(len(output.text))
            case RewindRecord():
                output._cut(record.num_tokens, record.num_chars)
            case ForkRecord():
                outputs[record.output] = outputs.get(record.parent, output)._fork(record.output)
            case EndRecord():
                output.text += record.text
                output.end = record
    return outputs
