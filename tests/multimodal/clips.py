"""Clips, and how transformers samples their frames."""

from __future__ import annotations
import __future__

import ast
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers

from bridle.multimodal.video_decoding import Clip
from tests.fakes import audio_checkpoints


def library(family: str, name: str, **more: Any) -> Any:
    """A function of the library's video processor, whose module cannot be imported without torchvision."""
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
