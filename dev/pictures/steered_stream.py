"""Draws the image at the top of the README: one controlled request, token by token, from the engine's events.

    python -m dev.pictures.steered_stream docs/pictures/steered.svg

The demo model fills in a JSON record. The controller of the output writes the fixed parts itself, and masks the tokens
that the model may write into each field. The controller rolls back a name that it has to refuse, and forks the output
for a second city. The image shows the engine's recorded events; the same model and seed give the same image.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from bridle import LLM, Branch, Controller, Decision, SamplingParams
from bridle.controllers import SequenceView
from bridle.outputs import Event, Forked, Rewind, TokenEvent
from bridle.serving import build_request
from bridle.tokenizer import Tokenizer

PROMPT = "A person as JSON:\n"
SEED = 2
#: The fixed parts, and the fields between them: the tokens that a field may have, and their number.
PARTS = ('{"name": "', '", "age": ', ', "city": "', '"}')
FIELDS = (("names", 1), ("digits", 2), ("cities", 1))

#: Words of the demo model that are one token each.
NAMES = (
    "Ada Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olive Paul Quinn Rosa Sam Tina "
    "Uma Victor Wendy Xavier Yara Zoe Alice Bob Carol Dora Eric Fiona George Hanna Ivan Julia Karl Lucy "
    "Max Nina Oscar Petra Ralph Sara Tom Ursula Vera Will "
)
CITIES = (
    "Paris Berlin Rome Madrid Lisbon London Dublin Vienna Warsaw Athens Budapest Oslo Stockholm "
    "Copenhagen Helsinki Reykjavik Bucharest Sofia Zagreb Kyiv Moscow Ankara Tehran Baghdad Amman Tokyo "
    "Beijing Kathmandu Bangkok Hanoi Ulaanbaatar Seoul Cairo Rabat Nairobi Accra Dakar Luanda Ottawa "
    "Havana Kingston Brasilia Santiago Lima Bogota Canberra Wellington "
)

COLORS = {
    "prompt": ("#d8dee6", "prompt"),
    "sampled": ("#9cc9f5", "sampled under a mask"),
    "forced": ("#f6c177", "forced: no draw, no forward pass of its own"),
    "rewound": ("#f2b8b5", "rolled back"),
    "shared": ("#e9edf2", "shared by the fork: computed once"),
}
_CHAR, _HEIGHT, _GAP, _LEFT = 7.6, 24, 4, 14  # pixels
_WIDTH = 820


class RecordingController(Controller):
    """A controller that fills in the record. `step` counts the fixed parts and the fields of the record together, since
    they alternate."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.parts = [tokenizer.encode(part, add_special_tokens=False) for part in PARTS]
        texts = {token: tokenizer.token_text(token) for token in range(tokenizer.vocab_size)}
        self.inside = {
            "names": [token for token, text in texts.items() if text in NAMES.split()],
            "digits": [token for token, text in texts.items() if text.isascii() and text.isdigit() and text != "0"],
            "cities": [token for token, text in texts.items() if text in CITIES.split()],
        }
        self.has_refused = self.has_forked = False
        self.step = self.begin = 0

    def next(self, view: SequenceView) -> Decision:
        number, is_field = divmod(self.step, 2)
        if not is_field:
            return self._write(view, number)
        kind, length = FIELDS[number][0], len(view.tokens) - self.begin
        if length >= FIELDS[number][1]:
            if number == 0 and not self.has_refused:
                self.has_refused = True
                return Decision.splice(backtrack=length)
            self.step += 1
            return self._write(view, number + 1)
        mask = view.mask_of(self.inside[kind])
        if number == len(FIELDS) - 1 and not length and not self.has_forked:
            self.has_forked = True
            return Decision.fork([Branch(mask=mask), Branch(mask=mask)])
        return Decision.sample(mask)

    def _write(self, view: SequenceView, number: int) -> Decision:
        if number == len(FIELDS) and len(view.tokens) == self.begin:
            return Decision.stop()
        part = self.parts[number]
        self.begin = len(view.tokens) + len(part)
        self.step += 1 if number < len(FIELDS) else 0
        return Decision.splice(0, part)


@dataclass(slots=True)
class Token:
    """One token, drawn as a box in the image."""

    text: str
    kind: str


@dataclass(slots=True)
class Lane:
    """One output. `tokens` includes tokens that were rolled back."""

    parent: int | None = None
    tokens: list[Token] = field(default_factory=list)

    def take_back(self, number: int) -> None:
        for token in reversed([token for token in self.tokens if token.kind != "rewound"][-number:]):
            token.kind = "rewound"

    def fork(self, parent: int, number: int) -> Lane:
        kept = [token for token in self.tokens if token.kind not in ("rewound", "prompt")][:number]
        return Lane(parent, [Token(token.text, "shared") for token in kept])


def record(llm: LLM) -> list[Lane]:
    """Run the request and record the engine's events."""
    tokenizer = llm.tokenizer
    prompt = tuple(tokenizer.encode(PROMPT))
    sampling = SamplingParams(temperature=1.0, max_tokens=80, seed=SEED)
    request = build_request(
        llm.model, prompt, sampling, request_id="picture", controller=RecordingController(tokenizer)
    )
    lanes = {0: Lane(tokens=[Token(tokenizer.token_text(token), "prompt") for token in prompt])}
    for events in llm.model.client.submit(request):
        for event in events:
            _note(lanes, event, tokenizer)
    return [lanes[index] for index in sorted(lanes)]


def _note(lanes: dict[int, Lane], event: Event, tokenizer: Tokenizer) -> None:
    match event:
        case TokenEvent():
            kind = "forced" if event.forced else "sampled"
            lanes[event.index].tokens.append(Token(tokenizer.token_text(event.token), kind))
        case Rewind():
            lanes[event.index].take_back(event.num_tokens)
        case Forked():
            lanes[event.index] = lanes[event.parent].fork(event.parent, event.num_tokens)


def draw(lanes: list[Lane]) -> str:
    """Return the image of all outputs as SVG, in light or dark colours like the page that shows it."""
    shapes: list[str] = []
    top = 18.0
    for index, lane in enumerate(lanes):
        title = "output 0" if lane.parent is None else f"output {index}, forked from output {lane.parent}"
        shapes.append(f'<text class="title" x="{_LEFT}" y="{top:.0f}">{title}</text>')
        top = _draw_tokens(lane.tokens, top + 8, shapes) + 26
    top = _draw_legend(lanes, top - 4, shapes)
    style = (
        ".title,.legend{font:12px sans-serif;fill:#57606a}.token{font:12.5px ui-monospace,Menlo,Consolas,monospace;"
        "fill:#1f2328}.gone{text-decoration:line-through}"
        "@media(prefers-color-scheme:dark){.title,.legend{fill:#9da7b3}}"
    )
    size = f'width="{_WIDTH}" height="{top:.0f}" viewBox="0 0 {_WIDTH} {top:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>A steered stream, token by token</title>'
    return "\n".join([head, f"<style>{style}</style>", *shapes, "</svg>", ""])


def _draw_tokens(tokens: list[Token], top: float, shapes: list[str]) -> float:
    """Draw tokens as boxes in rows; return the lower edge of the last row."""
    left = float(_LEFT)
    for token, text in ((token, _visible(token.text)) for token in tokens):
        width = len(text) * _CHAR + 8
        if left + width > _WIDTH - _LEFT:
            left, top = float(_LEFT), top + _HEIGHT + _GAP
        shapes += _box(left, top, width, text, token.kind)
        left += width + _GAP
    return top + _HEIGHT


def _box(left: float, top: float, width: float, text: str, kind: str) -> Iterator[str]:
    gone = " gone" if kind == "rewound" else ""
    place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_HEIGHT}" rx="4"'
    yield f'<rect {place} fill="{COLORS[kind][0]}"/>'
    where = f'x="{left + 4:.1f}" y="{top + 16.5:.1f}"'
    yield f'<text class="token{gone}" {where} xml:space="preserve">{escape(text)}</text>'


def _draw_legend(lanes: list[Lane], top: float, shapes: list[str]) -> float:
    used = {token.kind for lane in lanes for token in lane.tokens}
    left = float(_LEFT)
    for kind in (kind for kind in COLORS if kind in used):
        color, words = COLORS[kind]
        width = len(words) * 6.2 + 40
        if left + width > _WIDTH - _LEFT:
            left, top = float(_LEFT), top + 20
        shapes.append(f'<rect x="{left:.1f}" y="{top:.1f}" width="14" height="14" rx="3" fill="{color}"/>')
        shapes.append(f'<text class="legend" x="{left + 20:.1f}" y="{top + 11.5:.1f}">{words}</text>')
        left += width
    return top + 26


def _visible(text: str) -> str:
    return text.replace(" ", "\u00b7").replace("\n", "\u21b5")


def main(path: str) -> None:
    """Record the request and draw the image."""
    with LLM("demo") as llm:
        Path(path).write_text(draw(record(llm)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
