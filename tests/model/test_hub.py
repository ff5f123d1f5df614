"""Tests that `LLM` and the command line suggest models with similar names, and that clients of a server get no
suggestion."""

from __future__ import annotations

import pytest

from bridle import LLM
from bridle.errors import UnsupportedModel
from bridle.model import resolve_model


def test_llm_says_which_model_is_meant() -> None:
    with pytest.raises(UnsupportedModel, match=r"Did you mean Qwen/Qwen3-0\.6B\?"):
        LLM("Qwen/Qwen3-0.6", use_tqdm_on_load=False)


def test_a_name_like_no_other_is_refused_with_the_commands_that_list_models() -> None:
    with pytest.raises(UnsupportedModel, match="`bridle list` shows the models on this machine"):
        LLM("zzqqxxj", use_tqdm_on_load=False)


def test_a_load_by_itself_suggests_nothing() -> None:
    with pytest.raises(UnsupportedModel, match="not in the local hub cache") as refused:
        resolve_model("Qwen/Qwen3-0.6")
    assert "Did you mean" not in str(refused.value) and "bridle list" not in str(refused.value)
