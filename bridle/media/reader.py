"""From pictures in a request to what an engine takes: `Medium` and `MediaRun`.

The reader belongs to a model: it has the model's image processor, which makes arrays of a picture, and its rule of what
stands in a prompt for one. Pictures that were read lately are kept by the digest of their bytes: a chat sends the same
ones in each turn. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.engine.media import MediaArray, MediaRun, Medium, Sights
from bridle.errors import InvalidRequest, MediaRefused, UnsupportedFeature
from bridle.media.families import FAMILIES, Layout
from bridle.media.hosts import ImageHosts
from bridle.media.limits import MediaLimits
from bridle.media.pictures import check_picture, open_picture
from bridle.media.sources import NO_HOSTS, Source
from bridle.media.whole_prompts import Tokens, completed, is_lines, whole_arrays

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig

#: Bytes of arrays that a reader keeps for pictures that come again.
KEPT_BYTES = 256 << 20
#: What is shown of a picture that is to be seen in low detail.
LOW_PIXELS = 512 * 512


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture as a model reads it."""

    medium: Medium
    layout: Layout


class MediaReader:
    """Reads pictures for the checkpoint in `folder`, whose configuration is `settings`. Those that are named by an
    address are fetched from `hosts`."""

    def __init__(
        self,
        folder: Path,
        settings: PreTrainedConfig,
        limits: MediaLimits | None = None,
        hosts: ImageHosts = NO_HOSTS,
    ) -> None:
        self.limits, self.hosts = limits or MediaLimits(), hosts
        self._family = FAMILIES[settings.model_type]
        self._config = settings.to_dict()
        self._folder = folder
        self._processor: Any = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()
        #: The token that stands for a picture in a prompt, and the one that stands at each of its rows.
        self.placeholder = _token_of(settings, self._family.placeholder)
        self._row_token = _token_of(settings, "image_token_id")
        #: What templates write for it, where that is another text.
        self.written = self._family.written

    # -- reading -------------------------------------------------------------------------------------------------

    def read_all(self, sources: Sequence[Source]) -> list[Picture]:
        """The pictures of a request, within its limits. Slow; raises `MediaRefused` and `UnsupportedFeature`."""
        limits = self.limits
        if len(sources) > limits.max_images:
            raise MediaRefused(f"{len(sources)} pictures were sent; at most {limits.max_images}", "image")
        files = self._open_all(sources)
        pictures: list[Picture] = []
        for file, source in zip(files, sources, strict=True):
            pictures.append(self.read(file, source.where, LOW_PIXELS if source.is_low else None))
            made = sum(picture.medium.num_bytes for picture in pictures)
            if made > limits.max_array_bytes:
                raise MediaRefused(
                    f"the pictures make {made} bytes for the model; at most {limits.max_array_bytes}", source.where
                )
        return pictures

    def _open_all(self, sources: Sequence[Source]) -> list[bytes | Image]:
        """The files of a request, or what a program has opened."""
        limits, deadline = self.limits, time.monotonic() + self.limits.fetch_seconds
        files: list[bytes | Image] = []
        num_bytes = 0
        for source in sources:
            file = source.open(limits, self.hosts, deadline)
            num_bytes += len(file) if isinstance(file, bytes) else 0
            if num_bytes > limits.max_total_bytes:
                raise MediaRefused(f"the pictures have {num_bytes} bytes; at most {limits.max_total_bytes}", "image")
            files.append(file)
        return files

    def read(self, file: bytes | Image, where: str = "image", max_shown_pixels: int | None = None) -> Picture:
        """A picture in a file, or one that a program has opened; raises `MediaRefused`."""
        limits = self.limits
        if max_shown_pixels is not None:
            limits = replace(limits, max_shown_pixels=min(max_shown_pixels, limits.max_shown_pixels))
        if not isinstance(file, bytes):
            return self._prepare(check_picture(file, limits, where), where)
        digest = blake2b(file, digest_size=16, salt=limits.max_shown_pixels.to_bytes(8, "little")).digest()
        with self._lock:
            if (known := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                return known
        picture = self._prepare(open_picture(file, limits, where), where)
        self._keep(digest, picture)
        return picture

    def _prepare(self, image: Image, where: str) -> Picture:
        try:
            with self._lock:  # processors are not made for several threads
                results = self._load()(images=[image], return_tensors="np", **(self._family.options or {}))
            layout = self._family.lay_out(self._config, results)
        except UnsupportedFeature:
            raise
        except Exception:  # of the library, in words that may quote the picture
            raise MediaRefused(f"{where} has a size that this model's image processor does not take", where) from None
        arrays = tuple(
            MediaArray(name, str(value.dtype), tuple(value.shape), value.tobytes())
            for name in self._family.arrays
            if (value := results.get(name)) is not None
        )
        return Picture(Medium(_key(arrays), arrays, layout.num_rows), layout)

    def _keep(self, digest: bytes, picture: Picture) -> None:
        with self._lock:
            self._kept[digest] = picture
            used = sum(each.medium.num_bytes for each in self._kept.values())
            while used > KEPT_BYTES:
                used -= self._kept.popitem(last=False)[1].medium.num_bytes

    def _load(self) -> Any:
        """The checkpoint's image processor, in the form that needs Pillow and numpy alone."""
        if self._processor is None:
            with _quiet():
                from transformers import AutoImageProcessor

                try:
                    self._processor = AutoImageProcessor.from_pretrained(
                        self._folder, backend="pil", local_files_only=True, trust_remote_code=False
                    )
                except Exception as error:
                    raise UnsupportedFeature(
                        f"the checkpoint's image processor cannot be used: {type(error).__name__}", "image"
                    ) from error
        return self._processor

    # -- placing -------------------------------------------------------------------------------------------------

    def place(
        self, prompt: Sequence[int], pictures: Sequence[Picture], tokenizer: Tokens
    ) -> tuple[tuple[int, ...], Sights]:
        """The prompt with each placeholder grown to what its picture takes, and where the pictures stand in it. Raises
        `InvalidRequest` unless there is a placeholder for each."""
        if self._family.is_whole and pictures:
            prompt = completed(prompt, self.placeholder, len(pictures), tokenizer)
        num_places = sum(token == self.placeholder for token in prompt)
        if self._row_token in prompt and self._row_token != self.placeholder:
            raise InvalidRequest(
                f"the prompt has the text {tokenizer.token_text(self._row_token)!r}, which stands for a row of one",
                "image",
            )
        if num_places != len(pictures):
            raise InvalidRequest(
                f"the prompt has places for {num_places} pictures, each the text "
                f"{tokenizer.token_text(self.placeholder)!r}; {len(pictures)} were sent",
                "image",
            )
        tokens: list[int] = []
        runs: list[MediaRun] = []
        waiting = iter(pictures)
        left = deque(prompt)
        while left:
            token = left.popleft()
            if token == self.placeholder:
                self._grow(tokens, left, runs, next(waiting), tokenizer)
            else:
                tokens.append(token)
        if self._family.is_whole and pictures:
            arrays = whole_arrays(tokens, [picture.medium for picture in pictures])
            medium = Medium(_key(arrays), arrays, len(tokens))
            return tuple(tokens), Sights((medium,), (MediaRun(0, len(tokens), medium.key, is_mutual=True),))
        media = {picture.medium.key: picture.medium for picture in pictures}
        return tuple(tokens), Sights(tuple(media.values()), tuple(runs))

    def _grow(
        self, tokens: list[int], left: deque[int], runs: list[MediaRun], picture: Picture, tokenizer: Tokens
    ) -> None:
        """Append what the picture takes; line ends beside it are made tokens of together with the prompt's."""
        offset, layout = 0, picture.layout
        for number, part in enumerate(layout.parts):
            if isinstance(part, str):
                lines = ""
                while (
                    number == 0
                    and part.startswith("\n")
                    and tokens
                    and is_lines(text := tokenizer.token_text(tokens[-1]))
                ):
                    tokens.pop()
                    lines = text + lines
                part = lines + part
                while (
                    number + 1 == len(layout.parts)
                    and part.endswith("\n")
                    and left
                    and is_lines(text := tokenizer.token_text(left[0]))
                ):
                    left.popleft()
                    part += text
                tokens += tokenizer.encode(part, add_special_tokens=False)
            else:
                run = MediaRun(len(tokens), part, picture.medium.key, offset, layout.grid, self._family.is_mutual)
                runs.append(run)
                tokens += [self._row_token] * part
                offset += part


def _token_of(settings: PreTrainedConfig, field: str) -> int:
    found = getattr(settings, field, None)
    if not isinstance(found, int):
        raise UnsupportedFeature("the checkpoint does not say which token stands for a picture", "image")
    return found


def _key(arrays: Sequence[MediaArray]) -> bytes:
    """A digest of names, types, shapes and numbers: bytes without their shape would say too little."""
    digest = blake2b(digest_size=16)
    for array in arrays:
        head = f"{array.name} {array.dtype} {array.shape} ".encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(array.data)
    return digest.digest()


def open_reader(folder: Path, limits: MediaLimits | None = None, hosts: ImageHosts = NO_HOSTS) -> MediaReader | None:
    """A reader for the checkpoint in `folder`; None if its model reads text alone, or pictures in a way that is not
    known."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None  # a file of another kind; the model's loader tells what is wrong with a folder
    if kind not in FAMILIES:
        return None
    with _quiet():
        from transformers import AutoConfig

        settings = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return MediaReader(folder, settings, limits, hosts)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's advice about other packages."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
