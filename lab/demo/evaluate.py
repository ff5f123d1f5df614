"""Measures the demo model on prompts that were held out of its training: `python -m lab.demo.evaluate`.

Plain transformers, greedy. An answer counts if all of it is exactly right and the model ended it by itself.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from bridle.demo import demo_model_path
from lab.demo.corpus import Exercise, chat_pieces, draw, facts, lists, records, sums, tools
from lab.demo.corpus.document import BOS, END, EOS

MAX_NEW_TOKENS = 128
BATCH_SIZE = 20


class Question(NamedTuple):
    """A held-out prompt, and everything the model should write, its end mark included."""

    category: str
    prompt: str
    expected: str


class Verdict(NamedTuple):
    """A question with what the model wrote."""

    question: Question
    written: str

    @property
    def is_right(self) -> bool:
        """Whether the whole answer is exactly as expected."""
        return self.written == self.question.expected


CATEGORIES: dict[str, tuple[Callable[[random.Random], Exercise], ...]] = {
    "facts": (facts.question, facts.statement),
    "sums": (sums.question, sums.completion),
    "tool calls": (tools.any_call,),
    "lists": (lists.any_list,),
    "yes/no": (facts.yes_no,),
}
"""The categories of the target, and what makes their prompts."""

EXTRA_CATEGORIES: dict[str, tuple[Callable[[random.Random], Exercise], ...]] = {
    "thought sums": (sums.thought,),
    "invented tools": (tools.named_call,),
    "records": (records.any_request,),
}


def questions(category: str, number: int, seed: int) -> list[Question]:
    """Distinct held-out questions of one category; sums only with results up to 99."""
    makers = (CATEGORIES | EXTRA_CATEGORIES)[category]
    rng = random.Random(f"evaluate:{seed}:{category}")
    found: dict[str, Question] = {}
    while len(found) < number:
        exercise = draw(rng, rng.choice(makers), "heldout")
        if exercise.key[0] == "sum" and int(exercise.key[1]) + int(exercise.key[2]) > 99:
            continue
        question = _question(rng, category, exercise)
        found.setdefault(question.prompt, question)
    return list(found.values())


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """What the model writes after each prompt, up to and with the token at which it stops."""
    written: list[str] = []
    tokenizer.padding_side = "left"
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = tokenizer(
            prompts[start : start + BATCH_SIZE], return_tensors="pt", padding=True, add_special_tokens=False
        )
        ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)  # (batch, prompt + new)
        for row in ids[:, batch["input_ids"].shape[1] :].tolist():
            written.append(_until_stop(tokenizer, row))
    return written


def evaluate(model_path: Path, number: int, seed: int, categories: list[str]) -> list[Verdict]:
    """The verdicts of `number` questions of each category."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    asked = [question for category in categories for question in questions(category, number, seed)]
    return [Verdict(*pair) for pair in zip(asked, answer(model, tokenizer, [q.prompt for q in asked]), strict=True)]


def scores(verdicts: list[Verdict]) -> dict[str, float]:
    """The share of right answers of each category."""
    by_category: dict[str, list[bool]] = {}
    for verdict in verdicts:
        by_category.setdefault(verdict.question.category, []).append(verdict.is_right)
    return {category: sum(right) / len(right) for category, right in by_category.items()}


def _question(rng: random.Random, category: str, exercise: Exercise) -> Question:
    if exercise.messages and not (exercise.prompt and rng.random() < 0.2):
        given = exercise.messages[: 1 + next(i for i, m in enumerate(exercise.messages) if m["role"] == "assistant")]
        *prompt, target = chat_pieces(given, exercise.tools, exercise.thinking)
        return Question(category, "".join(piece.text for piece in prompt), target.text)
    return Question(category, BOS + exercise.prompt, exercise.completion + EOS)


def _until_stop(tokenizer: PreTrainedTokenizerFast, row: list[int]) -> str:
    stops = tokenizer.convert_tokens_to_ids([EOS, END])
    end = next((index + 1 for index, token in enumerate(row) if token in stops), len(row))
    return str(tokenizer.decode(row[:end], skip_special_tokens=False))


def _table(shares: dict[str, float], number: int) -> Table:
    table = Table("category", "prompts", "exact")
    for category, share in shares.items():
        table.add_row(category, str(number), f"{share:.1%}")
    return table


def main() -> None:
    """Parses the command line, asks, and prints a table; with `--json` a JSON line comes last."""
    parser = argparse.ArgumentParser(prog="python -m lab.demo.evaluate", description=__doc__)
    parser.add_argument(
        "model", type=Path, nargs="?", default=demo_model_path(), help="default: the one in the package"
    )
    parser.add_argument("--number", type=int, default=40, help="prompts of each category (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--extra", action="store_true", help="also the categories beyond the target")
    parser.add_argument("--show-wrong", action="store_true", help="print the answers that were not exact")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    options = parser.parse_args()
    verdicts = evaluate(
        options.model,
        options.number,
        options.seed,
        [*CATEGORIES, *(EXTRA_CATEGORIES if options.extra else ())],
    )
    shares, console = scores(verdicts), Console()
    console.print(_table(shares, options.number))
    overall = sum(shares[category] for category in CATEGORIES) / len(CATEGORIES)
    console.print(f"all of the target: {overall:.1%}")
    if options.show_wrong:
        for verdict in verdicts:
            if not verdict.is_right:
                console.print(
                    repr(verdict.question.prompt),
                    repr(verdict.question.expected),
                    repr(verdict.written),
                    markup=False,
                )
    if options.json:
        print(json.dumps({"exact": overall, "categories": shares, "number": options.number, "seed": options.seed}))


if __name__ == "__main__":
    main()
