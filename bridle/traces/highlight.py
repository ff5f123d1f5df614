"""Tokens coloured by their origin, as HTML for notebooks and as styles for terminals.

Texts are escaped, and no external files are loaded. The colours are transparent, so that they suit light and dark
pages. Rolled-back text is struck through, in the place where it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from bridle.traces.records import Draw, ForkRecord, PromptRecord, ReplacedRecord, RewindRecord, TokenRecord, Trace
from bridle.traces.replay_text import Rebuilt, rebuild

#: Origins of text, each with its style in a terminal, and its style in a page.
ORIGINS: dict[str, tuple[str, str]] = {
    "prompt": ("dim", "opacity:.6"),
    "cached": ("dim underline", "opacity:.6;text-decoration:underline dotted"),
    "sampled": ("none", "background:rgba(64,160,96,.16)"),
    "drafted": ("green", "background:rgba(64,160,96,.34)"),
    "forced": ("cyan", "background:rgba(48,128,240,.26)"),
    "fought": ("yellow", "background:rgba(240,176,32,.36)"),
    "rewound": ("red strike", "background:rgba(224,64,64,.18);text-decoration:line-through"),
}
#: Minimum probability that the mask removed, for a sampled token to be shown as a conflict.
FOUGHT = 0.5
#: Maximum number of characters of a page.
_MAX_CHARS = 200_000
_MAX_TITLE_CHARS = 40


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A piece of text with its origin, and a tooltip with details."""

    text: str
    origin: str
    title: str = ""


def origin_of(token: TokenRecord) -> str:
    """Return the origin of a token, which is a key of `ORIGINS`."""
    if token.forced:
        return "forced"
    if token.draw is not None and token.draw.taken > FOUGHT:
        return "fought"
    return "drafted" if token.drafted else "sampled"


def spans(trace: Trace, index: int = 0, *, prompt: bool = True) -> list[TextSpan]:
    """Return the text of an output in pieces, including its prompt and its rolled-back text."""
    told = prompt_spans(trace.records) if prompt else []
    output = next((each for each in rebuild(trace) if each.index == index), Rebuilt(index))
    pieces = dict(zip(map(id, output.records), output.pieces, strict=False))
    for record in _line(trace, index):
        if isinstance(record, ReplacedRecord):
            told.append(TextSpan(record.spelled, "rewound", title_of(record.draw)))
        elif id(record) in pieces:
            told.append(TextSpan(pieces[id(record)], origin_of(record), _title(record)))
        else:
            told.append(TextSpan(record.spelled or record.text, "rewound", _title(record)))
    rest = output.pieces[-1]
    return [*told, TextSpan(rest, "sampled")] if rest else told


def prompt_spans(records: Iterable[object]) -> list[TextSpan]:
    """Return the prompt in pieces, with the cached part marked."""
    prompt = next((record for record in records if isinstance(record, PromptRecord)), None)
    if prompt is None:
        return []
    texts = "".join(prompt.texts[: prompt.num_cached]), "".join(prompt.texts[prompt.num_cached :])
    return [TextSpan(text, origin) for text, origin in zip(texts, ("cached", "prompt"), strict=True) if text]


def _line(trace: Trace, index: int) -> list[TokenRecord | ReplacedRecord]:
    """Return all tokens that an output ever had, in order: first its parent's tokens at the fork, then its own."""
    lines: dict[int, list[TokenRecord | ReplacedRecord]] = {0: []}
    alive: dict[int, list[TokenRecord]] = {0: []}
    for record in trace.records:
        line, kept = lines.setdefault(record.output, []), alive.setdefault(record.output, [])
        if isinstance(record, ForkRecord):
            alive[record.output] = list(alive.get(record.parent, []))
            lines[record.output] = list(alive[record.output])
        elif isinstance(record, RewindRecord):
            del kept[max(len(kept) - record.num_tokens, 0) :]
        elif isinstance(record, TokenRecord):
            kept.append(record)
            line.append(record)
        elif isinstance(record, ReplacedRecord):
            line.append(record)
    return lines.get(index, [])


def _title(token: TokenRecord) -> str:
    if token.forced:
        return f"forced by {token.by or 'a controller'}"
    return title_of(token.draw)


def title_of(draw: Draw | None) -> str:
    """Return a line about the alternatives of a sampled token."""
    if draw is None:
        return ""
    odds, parts = draw.odds, [f"{_percent(draw.odds.logprob)} of"]
    texts = [text[:_MAX_TITLE_CHARS] for text in odds.texts] or [str(token) for token, _ in odds.top]
    best = ", ".join(f"{text!r} {_percent(value)}" for text, (_, value) in zip(texts, odds.top, strict=False))
    parts.append(best or "all")
    if draw.num_allowed is not None:
        parts.append(f"| {draw.num_allowed} allowed, {100 * draw.taken:.1f} % taken away")
    return " ".join(parts)


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(min(logprob, 0.0)):.1f} %"


# -- pages ---------------------------------------------------------------------------------------------------


def html_of(pieces: Iterable[TextSpan]) -> str:
    """Return pieces as HTML, one element for each piece, up to a maximum length."""
    made, room = [], _MAX_CHARS
    for piece in pieces:
        if room <= 0:
            made.append("<span>…</span>")
            break
        text, room = piece.text[:room], room - len(piece.text)
        title = f' title="{escape(piece.title)}"' if piece.title else ""
        made.append(f'<span style="{ORIGINS[piece.origin][1]}"{title}>{escape(text)}</span>')
    return "".join(made)


def page_of(trace: Trace | None, prompt: str, texts: Iterable[str], indexes: Iterable[int]) -> str:
    """Return the outputs of a request as HTML: coloured if there is a trace, otherwise plain."""
    blocks = []
    for number, (index, text) in enumerate(zip(indexes, texts, strict=True)):
        if trace is None:
            shown = [TextSpan(prompt, "prompt"), TextSpan(text, "sampled")]
        else:
            shown = spans(trace, index)
        blocks.append(f"<div data-output={number}>{html_of(shown)}</div>")
    return f'<div style="white-space:pre-wrap;font-family:monospace">{"".join(blocks)}</div>'
