"""The kinds of media (modalities) in prompts besides text, with their names in APIs and in messages."""

from __future__ import annotations

from collections.abc import Collection

IMAGE, AUDIO, VIDEO = "image", "audio", "video"
#: The words for files of a kind in messages, singular and plural.
WORDS = {IMAGE: ("image", "images"), AUDIO: ("sound", "sounds"), VIDEO: ("video", "videos")}
#: The types of content parts of each kind.
PARTS = {
    IMAGE: ("image_url", "input_image", "image"),
    AUDIO: ("input_audio", "audio_url", "audio"),
    VIDEO: ("video_url", "input_video", "video"),
}
OF_PARTS = {part: modality for modality, parts in PARTS.items() for part in parts}


def word(modality: str) -> str:
    """Return the word for one file of a modality, for messages."""
    return WORDS[modality][0] if modality in WORDS else "file"


def counted(number: int, modality: str) -> str:
    """Return a number of files as text, such as `3 images`."""
    return f"{number} {WORDS[modality][1]}"


def reads(name: str, modalities: Collection[str]) -> str:
    """Return a message text that lists the modalities that the model called `name` reads."""
    words = ["text", *(WORDS[modality][1] for modality in modalities)]
    return f"{name!r} reads only " + (", ".join(words[:-1]) + " and " if words[1:] else "") + words[-1]
