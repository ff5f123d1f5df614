"""Video clips for tests, and transformers' functions that sample their frames."""

from __future__ import annotations
import __future__

import ast
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
import torch
import transformers
from PIL import Image

from bridle.multimodal.video_decoding import Clip
from tests.fakes import audio_checkpoints


def library(family: str, name: str, **more: Any) -> Any:
    """Return a function of transformers' video processor, whose module cannot be imported without torchvision."""
    path = Path(transformers.__file__).parent / "models" / family / f"video_processing_{family}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    names: dict[str, Any] = {"torch": torch, "np": np, "math": math, **more}
    code = ast.Module([found], [])
    exec(compile(code, str(path), "exec", __future__.annotations.compiler_flag, dont_inherit=True), names)
    return names[name]


def clip(count: int, rate: float, width: int = 64, height: int = 48) -> Clip:
    return Clip(count, rate, width, height, lambda indices: iter(()))


TEXT = "What is said?"


def noise(seed: int = 0) -> np.ndarray[Any, Any]:
    return (np.random.RandomState(seed).randint(-9_000, 9_000, 5_000) / 32_768).astype(np.float32)


def wav(seed: int = 0) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, noise(seed), audio_checkpoints.RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


#: Shades of the frames of a film.
GREYS = [0, 60, 120, 180, 240, 200, 150, 100]


def plain(greys: Sequence[int] = GREYS, width: int = 64, height: int = 48) -> list[Image.Image]:
    return [Image.new("RGB", (width, height), (grey, grey, grey)) for grey in greys]


def film(form: str = "mp4", codec: str = "mpeg4", rate: int = 4, shown: Sequence[Image.Image] = ()) -> bytes:
    file = io.BytesIO()
    shown = shown or plain()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = shown[0].size  # type: ignore[attr-defined]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"  # type: ignore[attr-defined]
        for picture in shown:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))  # type: ignore[attr-defined]
        container.mux(stream.encode(None))  # type: ignore[attr-defined]
    return file.getvalue()
