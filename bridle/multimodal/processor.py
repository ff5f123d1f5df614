"""Interface of the processor of one modality, which computes the tower's input and the layout of the placeholder in a
prompt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bridle.engine.multimodal.multimodal_inputs import MediaArray
from bridle.errors import UnsupportedFeature
from bridle.multimodal.families import Arrays, PlaceholderLayout
from bridle.multimodal.limits import MediaLimits
from bridle.multimodal.modalities import WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class PlacingTokenizer(Protocol):
    """Interface of the tokenizer functions that are needed to expand placeholders."""

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    def token_text(self, token: int) -> str: ...


class ModalityProcessor(Protocol):
    """Interface of the processor for one modality of a checkpoint. `placeholder` is the token that stands for a file in
    a prompt. A placeholder is expanded to one `row_token` per feature row. Instead of the placeholder, templates may
    write the text `written`, which is not a token. With `is_mutual`, the rows of a file attend to each other in both
    directions. With `is_whole`, all tokens of a prompt with files attend to each other."""

    modality: str
    placeholder: int
    row_token: int
    written: str
    is_mutual: bool
    is_whole: bool

    def read(self, file: Any, limits: MediaLimits, where: str) -> tuple[Arrays, PlaceholderLayout]:
        """Return the tower's input for a file, and the layout of its placeholder. `file` is bytes or an object that a
        Python program passes. Raises `MediaRefused`, and `UnsupportedFeature` if a library is missing."""


def key_of(arrays: Sequence[MediaArray]) -> bytes:
    """Return a digest of the arrays' names, types, shapes and values. Shapes are included, because arrays of different
    shapes may have equal bytes."""
    digest = blake2b(digest_size=16)
    for array in arrays:
        head = f"{array.name} {array.dtype} {array.shape} ".encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(array.data)
    return digest.digest()


def token_of(settings: PreTrainedConfig, field: str, modality: str) -> int:
    """Return the token id in the configuration field `field`."""
    found = getattr(settings, field, None)
    if not isinstance(found, int):
        what = WORDS[modality][1]
        raise UnsupportedFeature(f"the checkpoint does not name a placeholder token for {what}", modality)
    return found


def added_token(folder: Path, texts: Sequence[str], modality: str) -> int:
    """Return the id of the first of `texts` that is an added token of the checkpoint's tokenizer."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        found = {token["content"]: token["id"] for token in added}
    for text in texts:
        if text in found:
            return found[text]
    raise UnsupportedFeature(f"the checkpoint has no placeholder token for {WORDS[modality][1]}", modality)


def read_settings(folder: Path, names: tuple[tuple[str, str], ...], modality: str) -> Mapping[str, Any]:
    """Return a checkpoint's processor settings. Each of `names` is a file name and the name of a part of this file ("":
    the whole file). The first of `names` that exists is used."""
    for name, part in names:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            found = found.get(part) if part and isinstance(found, dict) else found
            if isinstance(found, dict):
                return found
    raise UnsupportedFeature(f"the checkpoint has no {WORDS[modality][0]} processor settings", modality)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress log messages of transformers that advise other packages."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
