"""Images, sounds and videos in prompts: reads and decodes them within limits, runs the model's processors, and expands
placeholders. The results are inputs of bridle's engine. The package does not import torch. Each module is imported when
one of its names is first used."""

from typing import TYPE_CHECKING

from bridle.lazy_names import lazy_names

if TYPE_CHECKING:
    from bridle.multimodal.families import FAMILIES as FAMILIES
    from bridle.multimodal.image_decoding import check_picture as check_picture
    from bridle.multimodal.image_decoding import open_picture as open_picture
    from bridle.multimodal.limits import MediaLimits as MediaLimits
    from bridle.multimodal.media_fetcher import ImageHosts as ImageHosts
    from bridle.multimodal.modalities import reads as reads
    from bridle.multimodal.placeholders import Picture as Picture
    from bridle.multimodal.reader import MediaReader as MediaReader
    from bridle.multimodal.reader import open_reader as open_reader
    from bridle.multimodal.sources import Source as Source
    from bridle.multimodal.sources import has_remote as has_remote
    from bridle.multimodal.sources import read_base64 as read_base64
    from bridle.multimodal.sources import read_url as read_url
    from bridle.multimodal.sources import source_of as source_of
else:
    __getattr__, __all__ = lazy_names(
        __name__,
        {
            "families": "FAMILIES",
            "image_decoding": "check_picture open_picture",
            "limits": "MediaLimits",
            "media_fetcher": "ImageHosts",
            "modalities": "reads",
            "placeholders": "Picture",
            "reader": "MediaReader open_reader",
            "sources": "Source has_remote read_base64 read_url source_of",
        },
    )
