"""Compares a packed pass over several texts with the attention of transformers over each text alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bridle.errors import UnsupportedModel
from bridle.model.attention import ATTENTION_NAME
from bridle.model.parity import TOLERANCES
from bridle.model.pooling.model import PooledModel
from bridle.model.pooling.segments import Segments

#: Families that the test-suite compares. Other families are compared while they are loaded.
TRIED = frozenset(
    {
        *("bert", "roberta", "xlm-roberta", "modernbert", "distilbert", "electra", "mpnet", "deberta", "deberta-v2"),
        *("llama", "qwen2", "qwen3"),
    }
)
#: Length of the longest trial text, if no window needs a longer one, and its maximum.
_LONGEST, _MOST = 40, 400


def check_packing(model: PooledModel, family: str, max_len: int) -> None:
    """Raise `UnsupportedModel` if the embedding of a text in a packed pass differs from its embedding by the attention
    of transformers. Only model families outside `TRIED` are tested."""
    if family in TRIED:
        return
    error, scale = compare_with_eager(model, max_len)
    dtype = next(model.base.parameters()).dtype
    limit = TOLERANCES.get(dtype, 1e-1) * max(1.0, scale)
    if not error <= limit:  # true for NaN as well
        raise UnsupportedModel(
            f"model type {family!r} would give wrong vectors: its packed forward pass differs from its own by "
            f"{error:.3g} (limit {limit:.3g})"
        )


def compare_with_eager(model: PooledModel, max_len: int) -> tuple[float, float]:
    """Return the largest difference between the hidden states of both passes, and the largest magnitude of a hidden
    state."""
    texts = _trial_texts(model, max_len)
    segments = Segments([len(text) for text in texts])
    try:
        found = model.hidden(texts, segments).float()
        want = torch.cat([_eager(model, texts[number]) for number in segments.order]).float()
    except UnsupportedModel:
        raise
    except Exception as error:
        name = type(model.base).__name__
        raise UnsupportedModel(f"{name} cannot run a packed forward pass: {type(error).__name__}: {error}") from error
    return float(torch.nan_to_num((want - found).abs(), nan=float("inf")).max()), float(want.abs().max())


def _trial_texts(model: PooledModel, max_len: int) -> list[list[int]]:
    """Return texts of random tokens, the same in each call. Two texts have the same length, and one is longer than any
    window."""
    windows = [w for module in model.base.modules() if isinstance(w := vars(module).get("sliding_window"), int)]
    longest = max([_LONGEST, *(window + 8 for window in windows)])
    generator = torch.Generator().manual_seed(20)
    lengths = [min(length, max_len) for length in (7, min(longest, _MOST), 17, 7, 1)]
    first = min(5, model.num_ids - 1)  # no tokens for padding, which transformers leaves out
    return [torch.randint(first, model.num_ids, (length,), generator=generator).tolist() for length in lengths]


def _eager(model: PooledModel, text: list[int]) -> Tensor:
    """Return hidden states [L, hidden] of one plain pass with the model's own attention and positions."""
    base: Any = model.base
    base.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.tensor([text], device=model.device)
            rows: Tensor = base(input_ids=ids).last_hidden_state[0]
            return rows
    finally:
        base.set_attn_implementation(ATTENTION_NAME)
