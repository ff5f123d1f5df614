"""Pictures and sounds in prompts, up to what an engine takes: bytes, limits, decoding, what the checkpoint's processors
do, and the places that they take in a prompt. Imports no torch."""

from bridle.media.families import FAMILIES
from bridle.media.hosts import ImageHosts
from bridle.media.limits import MediaLimits
from bridle.media.modalities import reads
from bridle.media.pictures import check_picture, open_picture
from bridle.media.places import Picture
from bridle.media.reader import MediaReader, open_reader
from bridle.media.sources import Source, has_remote, read_base64, read_url, source_of

__all__ = [
    "FAMILIES",
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
    "reads",
    "source_of",
]
