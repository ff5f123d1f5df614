"""Rows for training: a conversation with pictures, and behind it many ways in which it may go on, each one question.

The ways share the row's pictures, but none sees another: `Rows.visible` says which token sees which, and each way is
counted from the same position. So a picture is encoded once for many questions. A batch follows from the seed and its
step number alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from lab.demo.corpus.document import ASSISTANT, BOS, END, SYSTEM, USER
from lab.demo.seeing.questions import STAGES, Question, Weights, any_question, without_picture
from lab.demo.seeing.scenes import PLACES, Scene, draw_scene, paint
from lab.demo.seeing.tokenizer import AROUND, IMAGE, WHOLE

SIDE = 48
"""Pixels along a side of what the model sees."""
ROWS_PER_PICTURE = 4
MARKED_PICTURE = f"{AROUND}{WHOLE}{IMAGE * ROWS_PER_PICTURE}{AROUND}"
"""What stands in a prompt for a picture."""

NO_PICTURE_SHARE, SYSTEM_SHARE, HISTORY_SHARE, ANOTHER_PICTURE_SHARE = 0.05, 0.1, 0.25, 0.5
_SYSTEM_TEXTS = ("You are a helpful assistant.", "Be brief.", "You see pictures.", "Answer in one sentence.")


@dataclass(frozen=True, slots=True)
class RowShape:
    """Rows of a batch, and tokens of each. At the steps in `stages` the later of `STAGES` begin: other questions are
    asked more often."""

    rows: int = 24
    length: int = 128
    stages: tuple[int, ...] = (300, 750, 1250, 3000)


class Rows(NamedTuple):
    """A batch, of pictures in the order of their rows of tokens."""

    tokens: torch.Tensor  # (rows, length) int64
    positions: torch.Tensor  # (rows, length) int64
    is_target: torch.Tensor  # (rows, length) bool: which the model must predict
    visible: torch.Tensor  # (rows, 1, length, length) bool
    pixels: torch.Tensor  # (pictures, 1, 3, SIDE, SIDE) float32
    words: torch.Tensor  # (pictures, ROWS_PER_PICTURE, 4) int64: the words for what is in each quarter


@dataclass(slots=True)
class _Row:
    """A row as it grows. Way 0 is what the others share."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    is_target: list[bool] = field(default_factory=list)
    ways: list[int] = field(default_factory=list)
    pictures: list[Image.Image] = field(default_factory=list)
    words: list[list[list[int]]] = field(default_factory=list)

    def add(self, tokens: list[int], begin: int, way: int, is_target: bool = False) -> int:
        """Appends tokens at positions from `begin`; returns the next one."""
        self.tokens += tokens
        self.positions += range(begin, begin + len(tokens))
        self.is_target += [is_target] * len(tokens)
        self.ways += [way] * len(tokens)
        return begin + len(tokens)


class RowMaker:
    """Makes rows with a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def make(self, shape: RowShape, seed: int, step: int) -> Rows:
        """The batch of one step."""
        rng = random.Random(f"rows:{seed}:{step}")
        weights = STAGES[sum(step >= begin for begin in shape.stages)]
        rows = [self._row(rng, shape.length, weights) for _ in range(shape.rows)]
        return _stacked(rows, shape.length, self._tokenizer.pad_token_id)

    def _row(self, rng: random.Random, length: int, weights: Weights) -> _Row:
        """A row of at most `length` tokens, half of it for what the ways share."""
        row = _Row()
        begin = row.add(self._ids(BOS), 0, 0)
        if rng.random() < SYSTEM_SHARE:
            begin = row.add(self._ids(f"{SYSTEM}{rng.choice(_SYSTEM_TEXTS)}{END}"), begin, 0)
        begin, scene = self._turn(rng, row, begin, None)
        while begin < length // 4 and rng.random() < HISTORY_SHARE:
            begin = self._ask(row, begin, 0, self._question(rng, scene, weights))
            begin, scene = self._turn(rng, row, begin, scene)
        way, misses = 1, 0
        while misses < 3:
            question = self._question(rng, scene, weights)
            if len(row.tokens) + self._length(question) > length:
                misses += 1
                continue
            self._ask(row, begin, way, question)
            way += 1
        return row

    def _turn(self, rng: random.Random, row: _Row, begin: int, scene: Scene | None) -> tuple[int, Scene | None]:
        """Begins the user's turn, in a first one or now and then in a later one with a picture."""
        begin = row.add(self._ids(USER), begin, 0)
        is_first = scene is None and not row.pictures
        if rng.random() < (1 - NO_PICTURE_SHARE if is_first else ANOTHER_PICTURE_SHARE):
            scene = draw_scene(rng, "train")
            row.pictures.append(paint(scene, rng))
            row.words.append([[self._ids(f" {word}")[0] for word in words] for words in words_of(scene)])
            begin = row.add(self._ids(MARKED_PICTURE), begin, 0)
        return begin, scene

    def _question(self, rng: random.Random, scene: Scene | None, weights: Weights) -> Question:
        if scene is None:
            return without_picture(rng, draw_scene(rng, "train"))
        return any_question(rng, scene, weights)

    def _ask(self, row: _Row, begin: int, way: int, question: Question) -> int:
        begin = row.add(self._ids(question.text) + self._ids(END + ASSISTANT), begin, way)
        return row.add(self._ids(question.answer) + self._ids(END), begin, way, is_target=True)

    def _length(self, question: Question) -> int:
        return len(self._ids(question.text)) + len(self._ids(question.answer)) + 3

    def _ids(self, text: str) -> list[int]:
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return known


def words_of(scene: Scene) -> list[tuple[str, ...]]:
    """What is in each quarter of a scene, and where that is, in four words."""
    seen = [(thing.shape, thing.color) if thing else ("empty", "empty") for thing in scene]
    return [(*each, *place.split()) for each, place in zip(seen, PLACES, strict=True)]


def pixels_of(pictures: list[Image.Image]) -> torch.Tensor:
    """Pictures as the tower reads them, (pictures, 1, 3, SIDE, SIDE), as the shipped image processor makes them."""
    small = [np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS), np.float32) for picture in pictures]
    pixels = np.stack(small).transpose(0, 3, 1, 2) / 127.5 - 1
    return torch.from_numpy(pixels).unsqueeze(1)


def _stacked(rows: list[_Row], length: int, pad: int) -> Rows:
    def table(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([each + [fill] * (length - len(each)) for each in values])

    ways = table([row.ways for row in rows], -1)  # (rows, length)
    is_shared = (ways[:, None, :] == 0) | (ways[:, None, :] == ways[:, :, None])
    visible = is_shared & torch.ones(length, length, dtype=torch.bool).tril()
    return Rows(
        table([row.tokens for row in rows], pad),
        table([row.positions for row in rows], 0),
        table([list(map(int, row.is_target)) for row in rows], 0).bool(),
        visible.unsqueeze(1),
        pixels_of([picture for row in rows for picture in row.pictures]),
        torch.tensor([words for row in rows for words in row.words]),
    )
