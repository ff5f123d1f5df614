"""Images, sounds and videos in prompts: bytes, limits, decoding, the checkpoint's processors, and placeholders. The
results are the engine's inputs. Imports no torch."""

from bridle.multimodal.families import FAMILIES
from bridle.multimodal.image_decoding import check_picture, open_picture
from bridle.multimodal.limits import MediaLimits
from bridle.multimodal.media_fetcher import ImageHosts
from bridle.multimodal.modalities import reads
from bridle.multimodal.placeholders import Picture
from bridle.multimodal.reader import MediaReader, open_reader
from bridle.multimodal.sources import Source, has_remote, read_base64, read_url, source_of

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
