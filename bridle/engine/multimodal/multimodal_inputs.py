"""Media of requests: images as arrays for the model's encoder, and the prompt positions of their features. Audio and
video are handled like images.

A `MultiModalItem` is one image, prepared for a model. A `PlaceholderRange` maps feature rows of an item to positions of
a prompt; one item may have several ranges. The tokens at the positions of a range are placeholders. The KV of a
placeholder depends on its image. So code that compares tokens must also compare ranges (`marks`). Outside of a range,
the id of a placeholder is normal text. This module has only plain data; it does not read or encode images.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b

from bridle.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class MediaArray:
    """Input of an encoder: `data` has the elements of an array of the shape `shape` and numpy's type `dtype`, in
    row-major order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """One image. Equal keys of items mean equal arrays. Keys of items cannot be forged, and differ between tenants. The
    image's features are a matrix with `num_rows` rows. `pictures` is set only for an item that is a whole prompt: the
    keys of the images in the prompt, in order."""

    key: bytes
    arrays: tuple[MediaArray, ...]
    num_rows: int
    pictures: tuple[bytes, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(len(array.data) for array in self.arrays)


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Feature rows of the medium `key` in a prompt: rows `offset .. offset+length-1` are at positions `position ..
    position+length-1`.

    `grid` (time, height, width) is the arrangement of the feature rows in the image, for models whose positions have
    three coordinates. Feature rows of consecutive times are `pace` positions apart. With `is_mutual`, the feature rows
    attend to each other in both directions, so they are computed in one step.
    """

    position: int
    length: int
    key: bytes
    offset: int = 0
    grid: tuple[int, int, int] | None = None
    is_mutual: bool = False
    pace: float = 1.0

    @property
    def end(self) -> int:
        return self.position + self.length


Runs = tuple[PlaceholderRange, ...]

#: Name of the first array of an item that is a whole prompt: its token ids. The arrays after it have the pixels of its
#: images.
PROMPT_IDS = "input_ids"
#: Name of the array that has the token of each row, for items in which some rows are marker tokens.
ROW_TOKENS = "row_tokens"


@dataclass(frozen=True, slots=True)
class MultiModalInputs:
    """The images of a prompt, with their positions in the prompt."""

    media: tuple[MultiModalItem, ...] = ()
    runs: Runs = ()

    def of(self, tenant: str) -> MultiModalInputs:
        """Return the media inputs with keys that depend on the tenant. Without the tenant in the key, a fast answer
        would reveal that another tenant has sent the same image."""
        if not tenant:
            return self
        salt = blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        every = {key for each in self.media for key in (each.key, *each.pictures)}
        keys = {key: blake2b(key, key=salt, digest_size=16).digest() for key in every}
        media = tuple(
            replace(each, key=keys[each.key], pictures=tuple(keys[key] for key in each.pictures)) for each in self.media
        )
        return MultiModalInputs(media, tuple(replace(run, key=keys[run.key]) for run in self.runs))


NO_SIGHTS = MultiModalInputs()


def marks(runs: Runs, start: int, end: int) -> bytes:
    """Return bytes that differ between token ranges `start .. end-1` with different images. These bytes contain the
    medium, rows and positions of each range."""
    parts = []
    for run in runs:
        first, last = max(run.position, start), min(run.end, end)
        if first < last:
            numbers = (first - start, last - start, run.offset + first - run.position)
            pace = b"" if run.pace == 1.0 else struct.pack("<d", run.pace)
            parts.append(run.key + b"".join(number.to_bytes(8, "little") for number in numbers) + pace)
    return b"".join(parts)


def before(runs: Runs, num_tokens: int) -> Runs:
    """Return the ranges within the first `num_tokens` tokens."""
    return runs if not runs or runs[-1].end <= num_tokens else tuple(run for run in runs if run.end <= num_tokens)


def splits(runs: Runs, num_tokens: int) -> bool:
    """Return whether the first `num_tokens` tokens end inside a range."""
    return any(run.position < num_tokens < run.end for run in runs)


def align_to_item(runs: Runs, start: int, end: int) -> int:
    """Return the end of a chunk that begins at `start` and ends near `end`, so that no range with mutual attention is
    split. A chunk ends before a range with mutual attention. A chunk that begins in a range with mutual attention ends
    after that range."""
    for run in runs:
        if run.is_mutual and run.position < end < run.end:
            return run.position if run.position > start else run.end
    return end


def is_whole(runs: Runs, num_prompt: int) -> bool:
    """Return whether all tokens of a prompt, including its text, attend to each other."""
    return len(runs) == 1 and runs[0].is_mutual and runs[0].length == num_prompt


def check_media(media: Iterable[MultiModalItem], runs: Runs, num_prompt: int) -> None:
    """Raise `InvalidRequest` if ranges are out of order, exceed the prompt, or exceed the rows of their media."""
    rows = {medium.key: medium.num_rows for medium in media}
    last = 0
    for run in runs:
        if run.length < 1 or run.position < last or run.end > num_prompt:
            raise InvalidRequest(
                f"an image has the prompt positions {run.position} to {run.end - 1}; they must be after {last - 1} "
                f"and before {num_prompt}",
                "media",
            )
        if run.key not in rows or run.offset < 0 or run.offset + run.length > rows[run.key]:
            raise InvalidRequest("a prompt position refers to embedding rows that no image of the request has", "media")
        last = run.end
