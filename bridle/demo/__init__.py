"""The demo models in the package: a very small Llama, and a very small SmolVLM that is asked about pictures of shapes.

They exist so that the quickstart, the examples and the tests show sensible text with nothing to download. Each
is an ordinary Hugging Face folder with a tokenizer and a chat template of its own. In a checkout `lab.demo` generates
what they were trained on, trains them again and measures them. Importing this package loads neither torch nor
transformers.
"""

from __future__ import annotations

from pathlib import Path

_FOLDERS = {"demo": "weights", "demo-sees": "seeing"}

#: Their names; these come before folders and hub ids.
DEMO_MODELS = tuple(_FOLDERS)


def demo_model_path(name: str = "demo") -> Path:
    """The folder with a demo model, to be given to whatever loads a Hugging Face folder. Raises `KeyError` for a name
    that is not in `DEMO_MODELS`."""
    return Path(__file__).parent / _FOLDERS[name]


__all__ = ["DEMO_MODELS", "demo_model_path"]
