"""Pictures in prompts, up to what an engine takes: bytes, limits, decoding, the checkpoint's image processor, and the
places that pictures take in a prompt. Imports no torch."""

from bridle.media.families import FAMILIES
from bridle.media.hosts import ImageHosts
from bridle.media.limits import MediaLimits
from bridle.media.pictures import check_picture, open_picture
from bridle.media.reader import MediaReader, Picture, open_reader
from bridle.media.sources import PICTURE_PARTS, Source, has_remote, read_base64, read_url, source_of

__all__ = [
    "FAMILIES",
    "PICTURE_PARTS",
    "ImageHosts",
    "MediaLimits",
    "MediaReader",
    "Picture",
    "Source",
    "check_picture",
    "has_remote",
    "open_picture",
    "open_reader",
    "read_base64",
    "read_url",
    "source_of",
]
