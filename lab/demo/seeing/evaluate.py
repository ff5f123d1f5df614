"""Measures the demo model that sees on pictures of held-out scenes: `python -m lab.demo.seeing.evaluate`.

By bridle, greedy. An answer counts if all of it is exactly right and the model ended it by itself.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from rich.console import Console
from rich.table import Table

from bridle import LLM
from bridle.demo import demo_model_path
from lab.demo.seeing.questions import KINDS, Question, ask
from lab.demo.seeing.scenes import Scene, draw_scene, paint

MAX_TOKENS = 48


class Exam(NamedTuple):
    """A question about a picture that the model never saw, nor any other picture of its scene."""

    question: Question
    picture: Image.Image
    scene: Scene

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The question as a chat."""
        parts = [{"type": "image", "image": self.picture}, {"type": "text", "text": self.question.text}]
        return [{"role": "user", "content": parts}]


class Verdict(NamedTuple):
    """An exam with what the model wrote."""

    exam: Exam
    written: str
    is_ended: bool

    @property
    def is_right(self) -> bool:
        """Whether the whole answer is exactly as expected."""
        return self.is_ended and self.written == self.exam.question.answer


def exams(kind: str, number: int, seed: int) -> list[Exam]:
    """Questions of one kind, each about a picture of its own."""
    rng = random.Random(f"evaluate:{seed}:{kind}")
    found: list[Exam] = []
    while len(found) < number:
        scene = draw_scene(rng, "heldout")
        question = ask(rng, scene, kind)
        if question is not None:
            found.append(Exam(question, paint(scene, rng), scene))
    return found


def evaluate(llm: LLM, number: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Verdict]:
    """The verdicts of `number` questions of each kind."""
    asked = [exam for kind in kinds for exam in exams(kind, number, seed)]
    outputs = llm.chat([exam.messages for exam in asked], temperature=0.0, max_tokens=MAX_TOKENS, use_tqdm=False)
    return [
        Verdict(exam, output.outputs[0].text, output.outputs[0].finish_reason == "stop")
        for exam, output in zip(asked, outputs, strict=True)
    ]


def scores(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The share of right answers of each kind."""
    by_kind: dict[str, list[bool]] = {}
    for verdict in verdicts:
        by_kind.setdefault(verdict.exam.question.kind, []).append(verdict.is_right)
    return {kind: sum(right) / len(right) for kind, right in by_kind.items()}


def _table(shares: dict[str, float], number: int) -> Table:
    table = Table("kind", "pictures", "exact")
    for kind, share in shares.items():
        table.add_row(kind, str(number), f"{share:.1%}")
    return table


def main() -> None:
    """Parses the command line, asks, and prints a table; with `--json` a JSON line comes last."""
    parser = argparse.ArgumentParser(prog="python -m lab.demo.seeing.evaluate", description=__doc__)
    shipped = demo_model_path("demo-sees")
    parser.add_argument("model", type=Path, nargs="?", default=shipped, help="default: the one in the package")
    parser.add_argument("--number", type=int, default=100, help="pictures of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--show-wrong", action="store_true", help="print the answers that were not exact")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    options = parser.parse_args()
    with LLM(str(options.model)) as llm:
        verdicts = evaluate(llm, options.number, options.seed)
    shares, console = scores(verdicts), Console()
    overall = sum(shares[kind] for kind in KINDS) / len(KINDS)
    console.print(_table(shares, options.number))
    console.print(f"all of the target: {overall:.1%}")
    if options.show_wrong:
        for exam, written, _ in (verdict for verdict in verdicts if not verdict.is_right):
            scene = ", ".join(str(thing) for thing in exam.scene)
            console.print(repr(exam.question.text), repr(exam.question.answer), repr(written), scene, markup=False)
    if options.json:
        print(json.dumps({"exact": overall, "kinds": shares, "number": options.number, "seed": options.seed}))


if __name__ == "__main__":
    main()
