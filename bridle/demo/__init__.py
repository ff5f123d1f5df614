"""The demo models in the package: a very small Llama, and a very small SmolVLM that is asked about images of shapes.

Examples and tests use them, because they need no download. Each is an ordinary Hugging Face folder with its own
tokenizer and chat template. Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

_FOLDERS = {"demo": "weights", "demo-sees": "seeing"}

#: Their names; these come before folders and hub ids.
DEMO_MODELS = tuple(_FOLDERS)


def demo_model_path(name: str = "demo") -> Path:
    """Return the folder of a demo model. Raises `KeyError` for a name that is not in `DEMO_MODELS`."""
    return Path(__file__).parent / _FOLDERS[name]


__all__ = ["DEMO_MODELS", "demo_model_path"]
