"""The demo model in the package: a very small Llama with a tokenizer and a chat template of its own.

It exists so that the quickstart, the examples and the tests show sensible text with nothing to download. It
is an ordinary Hugging Face folder. In a checkout `lab.demo.corpus` generates the text it was trained on,
`lab.demo.train` trains it again, `lab.demo.evaluate` measures it. Importing this package loads neither
torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """The folder with the demo model, to be given to whatever loads a Hugging Face folder."""
    return Path(__file__).parent / "weights"


__all__ = ["demo_model_path"]
