"""A check of a whole model with adapters, compared with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.model.loaded_adapters import Loaded, all_logits


def check_model(family: str, folder: Path, **settings: Any) -> None:
    """Check that rows of three adapters and rows without an adapter get the logits that PEFT computes."""
    loaded = Loaded(family, folder, num_blocks=64, **settings)
    try:
        loaded.place_all()
        prompts = [[3 + (7 * number + place) % 50 for place in range(5 + 9 * number)] for number in range(5)]
        adapters = ("0", "1", "1", None, "2")
        for prompt, adapter, have in zip(
            prompts, adapters, all_logits(loaded.executor, prompts, adapters), strict=True
        ):
            want = loaded.oracle.logits(prompt, adapter)
            assert float((want - have.cpu()).abs().max()) < 1e-3
    finally:
        loaded.close()
