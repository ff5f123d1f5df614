"""Expands the placeholders of images and sounds in a prompt to one token per feature row, with marker tokens around
them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridle.engine.multimodal.multimodal_inputs import MultiModalInputs, MultiModalItem, PlaceholderRange
from bridle.errors import InvalidRequest
from bridle.multimodal.families import PlaceholderLayout
from bridle.multimodal.modalities import IMAGE, counted
from bridle.multimodal.prefix_lm import completed, is_lines, whole_arrays
from bridle.multimodal.processor import ModalityProcessor, PlacingTokenizer, key_of


@dataclass(frozen=True, slots=True)
class Picture:
    """One image, or one file of another `modality`, after processing: the tower's input, and the layout of the
    placeholder in the prompt."""

    medium: MultiModalItem
    layout: PlaceholderLayout
    modality: str = IMAGE


class PlaceholderExpander:
    """Expands the placeholders of one prompt. Collects the expanded tokens and the ranges of images among them."""

    def __init__(self, senses: Mapping[str, ModalityProcessor], tokenizer: PlacingTokenizer) -> None:
        self._senses, self._tokenizer = senses, tokenizer
        self._tokens: list[int] = []
        self._left: deque[int] = deque()
        self._runs: list[PlaceholderRange] = []

    def place(self, prompt: Sequence[int], pictures: Sequence[Picture]) -> tuple[tuple[int, ...], MultiModalInputs]:
        """Return the tokens of the prompt with each placeholder expanded, and the images with their positions. Raises
        `InvalidRequest` unless each image has exactly one placeholder."""
        whole = next((sense for sense in map(self._sense_of, pictures) if sense.is_whole), None)
        if whole is not None:
            prompt = completed(prompt, whole.placeholder, len(pictures), self._tokenizer)
        waiting = {modality: [each for each in pictures if each.modality == modality] for modality in self._senses}
        for modality, sense in self._senses.items():
            self._check(prompt, sense, len(waiting[modality]))
        coming = {sense.placeholder: iter(waiting[modality]) for modality, sense in self._senses.items()}
        self._left.extend(prompt)
        while self._left:
            token = self._left.popleft()
            if token in coming:
                self._grow(next(coming[token]))
            else:
                self._tokens.append(token)
        if whole is not None:
            return tuple(self._tokens), self._as_one(pictures)
        media = {picture.medium.key: picture.medium for picture in pictures}
        return tuple(self._tokens), MultiModalInputs(tuple(media.values()), tuple(self._runs))

    def _sense_of(self, picture: Picture) -> ModalityProcessor:
        return self._senses[picture.modality]

    def _as_one(self, pictures: Sequence[Picture]) -> MultiModalInputs:
        """Return the whole prompt as a single medium whose placeholder range covers all tokens."""
        arrays = whole_arrays(self._tokens, [picture.medium for picture in pictures])
        keys = tuple(picture.medium.key for picture in pictures for _ in picture.medium.arrays)
        medium = MultiModalItem(key_of(arrays), arrays, len(self._tokens), keys)
        return MultiModalInputs((medium,), (PlaceholderRange(0, len(self._tokens), medium.key, is_mutual=True),))

    def _check(self, prompt: Sequence[int], sense: ModalityProcessor, num_sent: int) -> None:
        num_places, text = prompt.count(sense.placeholder), self._tokenizer.token_text
        is_place = any(sense.row_token == other.placeholder for other in self._senses.values())
        if not is_place and sense.row_token in prompt:
            raise InvalidRequest(
                f"the prompt has the reserved text {text(sense.row_token)!r}; leave it out", sense.modality
            )
        if num_places != num_sent:
            raise InvalidRequest(
                f"the prompt has placeholders for {counted(num_places, sense.modality)}, each "
                f"{text(sense.placeholder)!r}, but {num_sent} were sent",
                sense.modality,
            )

    def _grow(self, picture: Picture) -> None:
        """Append the expanded placeholder of an image. Whitespace before the placeholder is tokenized together with the
        first marker text."""
        layout, sense, offset = picture.layout, self._senses[picture.modality], 0
        self._drop_around(*layout.around)
        for number, part in enumerate(layout.parts):
            if isinstance(part, str):
                part = part if number else self._space_before() + part
                is_end = number + 1 == len(layout.parts) and part.endswith("\n")
                self._tokens += self._ended(part) if is_end else self._encode(part)
            else:
                key = picture.medium.key
                run = PlaceholderRange(len(self._tokens), part, key, offset, layout.grid, sense.is_mutual, layout.pace)
                self._runs.append(run)
                self._tokens += layout.tokens or [sense.row_token] * part
                offset += part

    def _drop_around(self, before: str, behind: str) -> None:
        """Remove the marker tokens that a template wrote around the placeholder, because the layout has its own marker
        tokens."""
        text = self._tokenizer.token_text
        has_before = not before or (bool(self._tokens) and text(self._tokens[-1]) == before)
        has_behind = not behind or (bool(self._left) and text(self._left[0]) == behind)
        if has_before and has_behind:
            if before:
                self._tokens.pop()
            if behind:
                self._left.popleft()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _space_before(self) -> str:
        space = ""
        while self._tokens and (text := self._tokenizer.token_text(self._tokens[-1])).isspace():
            self._tokens.pop()
            space = text + space
        return space

    def _ended(self, part: str) -> list[int]:
        """Return the tokens of `part`, the last marker text of a layout, which ends in line ends. Line ends are
        tokenized together with the prompt text that follows them."""
        part += self._lines_behind()
        if self._left and (text := self._tokenizer.token_text(self._left[0])):
            *tokens, last = self._encode(part + text)
            if last == self._left[0]:
                return tokens
        return self._encode(part)

    def _lines_behind(self) -> str:
        lines = ""
        while self._left and is_lines(text := self._tokenizer.token_text(self._left[0])):
            self._left.popleft()
            lines += text
        return lines
