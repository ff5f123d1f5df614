"""Tests that each family gives the same logits in a packed, paged run as in the model's own eager attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bridle.model import support_checks
from bridle.model.check import check_model
from bridle.model.kv_cache import LayerCache
from bridle.model.parity import TRIAL_WINDOW
from tests.covering import slow_but
from tests.fakes import tiny_checkpoints

# Lengths of the trial run that make it longer than the narrowed window several times over.
LENGTH = 64


#: Each form of positions, of projections, of windows and of experts, and each kind of index.
KINDS = {"bloom", "cohere2", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss"}
KINDS |= {"gptj", "llama", "llama4_text", "mixtral", "mpt", "opt", "phi3", "qwen3_moe", "deepseek_v32"}
KINDS |= {"deepseek_v4", "dots3_note_text", "glm_moe_dsa"}


COMPARED = tiny_checkpoints.FAMILIES | tiny_checkpoints.INDEXED_FAMILIES | tiny_checkpoints.COMPRESSED_FAMILIES


@pytest.mark.parametrize("family", slow_but(KINDS, sorted(COMPARED)))
def test_family_equals_its_own_attention(family: str) -> None:
    report = check_model(tiny_checkpoints.cached_checkpoint(family), max_tokens=LENGTH)
    assert report.is_equal, str(report)
    assert report.num_same_greedy == report.num_positions == LENGTH + LENGTH // 2 + LENGTH // 5


def test_known_families_are_the_ones_compared_here() -> None:
    assert set(tiny_checkpoints.FAMILIES) == support_checks.KNOWN_FAMILIES
    assert set(tiny_checkpoints.HYBRID_FAMILIES) == support_checks.RECURRENT_FAMILIES
    assert set(tiny_checkpoints.COMPRESSED_FAMILIES) == support_checks.COMPRESSED_FAMILIES
    seeing = {"glm5_next_text", "mistral_large4_text"}  # which have no text class
    assert tiny_checkpoints.INDEXED_FAMILIES.keys() | seeing == support_checks.INDEXED_FAMILIES


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "opt", "phi"])
def test_reference_kernel_agrees_too(family: str) -> None:
    report = check_model(tiny_checkpoints.cached_checkpoint(family), kernel="reference", max_tokens=LENGTH)
    assert report.kernel == "reference"
    assert report.is_equal, str(report)


def test_sliding_windows_take_part() -> None:
    report = check_model(tiny_checkpoints.cached_checkpoint("gemma2"), max_tokens=LENGTH)
    assert report.windows == (16,)
    assert TRIAL_WINDOW < 16 < LENGTH


def test_report_reads_well() -> None:
    report = check_model(tiny_checkpoints.cached_checkpoint("mistral"), max_tokens=LENGTH)
    text = str(report)
    assert "mistral" in text and "equal" in text and "sliding windows       16" in text
    assert f"{report.num_positions} of {report.num_positions} positions" in text


def test_bfloat16_is_equal_within_its_rounding() -> None:
    report = check_model(tiny_checkpoints.cached_checkpoint("qwen3"), dtype="bfloat16", max_tokens=LENGTH)
    assert report.dtype == "bfloat16"
    assert report.is_equal, str(report)


def test_tied_embeddings_give_the_same_logits(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    assert check_model(folder, max_tokens=LENGTH).is_equal


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison must notice a kernel that ignores the oldest position of long contexts."""
    from bridle.model.kernels import cpu

    honest = cpu.VisibleRow.read

    def forgetful(row: cpu.VisibleRow, cache: LayerCache, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = honest(row, cache, dtype)
        if row.length > 1 or row.context < 40:
            return keys, values
        return keys[:, :, 1:], values[:, :, 1:]

    monkeypatch.setattr(cpu.VisibleRow, "read", forgetful)
    report = check_model(tiny_checkpoints.cached_checkpoint("llama"), kernel="cpu", max_tokens=LENGTH)
    assert not report.is_equal
    assert "DIFFERENT" in str(report)


def test_long_rotary_scaling_is_fixed_at_load() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    path = tiny_checkpoints.cached_checkpoint("phi3", rope_parameters=scaling, original_max_position_embeddings=64)
    report = check_model(path, max_tokens=LENGTH)
    assert report.is_equal, str(report)
    assert "for 512 positions" in report.notes[0]
