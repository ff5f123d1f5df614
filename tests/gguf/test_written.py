"""Tests that the `gguf` package reads each tensor that `bridle quantize` writes, with its type and its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bridle.gguf import open_model
from bridle.gguf.dequantize import decode_blocks
from bridle.gguf.writer import FILE_TYPES
from tests.gguf.kit import EXPERT_SIZES, pair

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", FILE_TYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_package_reads_the_same_numbers(family: str, kind: str) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    _, file = pair(family, kind, **(SIZES if family == "llama" else EXPERT_SIZES))
    theirs, ours = GGUFReader(file), open_model(file)
    assert int(theirs.get_field("general.file_type").contents()) == FILE_TYPES[kind][0]  # type: ignore[union-attr]
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist()))) == (entry.kind.name, entry.shape)
        want = dequantize(np.ascontiguousarray(tensor.data), tensor.tensor_type).reshape(entry.shape)
        have = decode_blocks(entry.kind.name, torch.from_numpy(ours.read(tensor.name))).view(entry.shape)
        assert np.abs(want - have.numpy()).max() <= 1e-6 * max(np.abs(want).max(), 1e-6)
