"""Parts of an output that must not be repeated, such as tool calls. A part becomes a stop string once it is
complete."""

from __future__ import annotations

from dataclasses import dataclass, field

from bridle.engine.request import RepeatMarks

#: Limits for one output: number of remembered parts, and characters of each part.
MAX_PARTS, MAX_CHARS = 64, 16_384


@dataclass(slots=True)
class Repeats:
    """The complete parts of an output so far, each with the position of its end."""

    marks: RepeatMarks
    parts: list[tuple[int, str]] = field(default_factory=list)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts that would end the output if they were repeated."""
        return tuple(text for _, text in self.parts)

    def changes(self, recent: str) -> bool:
        """Return whether the latest characters contain a mark that completes a part or starts a new count."""
        return self.marks.closing in recent or bool(self.marks.restart and self.marks.restart in recent)

    def add(self, tail: str, base: int, num_new: int) -> None:
        """Record the parts that the last `num_new` characters complete. `tail` is the end of the text; it begins at
        position `base`."""
        marks = self.marks
        if marks.restart and tail.find(marks.restart, max(len(tail) - num_new - len(marks.restart) + 1, 0)) >= 0:
            self.parts.clear()
        closed = tail.find(marks.closing, max(len(tail) - num_new - len(marks.closing) + 1, 0))
        opened = -1 if closed < 0 else tail.rfind(marks.opening, 0, closed)
        if opened < 0 or len(self.parts) >= MAX_PARTS:
            return
        end = closed + len(marks.closing)
        self.parts.append((base + end, tail[opened:end]))

    def rewind(self, num_chars: int) -> None:
        """Forget parts that ended after the first `num_chars` characters."""
        self.parts = [part for part in self.parts if part[0] <= num_chars]

    def copy(self) -> Repeats:
        """Return an independent copy, for a fork."""
        return Repeats(self.marks, self.parts.copy())
