"""Tests that tables of RoPE angles equal transformers' values for each position bit for bit, or that no table is
made."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from bridle.model import rope
from bridle.model.dense_layer import rotation
from bridle.model.dense_model import DenseModel
from bridle.model.fused_step import FusedStep
from bridle.model.rope import angles_of, make_tables
from tests.model.rank_threads import CPU, part_of

NUM_POSITIONS = 40


def short_of(family: str) -> DenseModel:
    return DenseModel(part_of(family, torch.bfloat16, is_lean=True)[0])


@pytest.mark.parametrize(("family", "num_tables"), [("llama", 1), ("qwen3", 1), ("gemma3_text", 2)])
def test_a_token_finds_the_angles_of_its_position(family: str, num_tables: int) -> None:
    """Each kind of angles that the family's layers use has a table with the angles of each position."""
    short = short_of(family)
    step = FusedStep(short.layers, short.norm, CPU)
    with patch.object(rope, "POSITIONS", 16):  # the last part is a shorter one
        step.keep_angles(short.rotations, NUM_POSITIONS)
    positions = torch.tensor([[7, 0, NUM_POSITIONS - 1, 7, 17]])
    kept, computed = step.angles(positions, short.rotations), angles_of(short.rotations(positions))
    assert len(kept.tables) == len(computed.tables) == num_tables
    for table, made in zip(kept.tables, computed.tables, strict=True):
        assert table.shape[0] == NUM_POSITIONS
        assert torch.equal(table[kept.places], made[computed.places])
    for index, (cos, sin) in enumerate(short.rotations(positions)):
        found = computed.tables[index][computed.places]
        assert torch.equal(torch.cat([found[:, 0]] * 2, -1), cos[:, 0])
        assert torch.equal(torch.cat([-found[:, 1], found[:, 1]], -1), sin[:, 0])
    assert {layer.table for layer in short.layers} == set(range(num_tables))


def test_tables_ask_nothing_of_a_step_but_its_positions() -> None:
    short = short_of("llama")
    step = FusedStep(short.layers, short.norm, CPU)
    step.keep_angles(short.rotations, NUM_POSITIONS)

    def refuse(positions: Tensor) -> Any:
        raise AssertionError(positions)

    positions = torch.tensor([[3, 4]])
    assert step.angles(positions, refuse).places.data_ptr() == positions.data_ptr(), "a graph finds the next ones there"
    with pytest.raises(AssertionError):
        step.angles(positions.expand(3, 1, 2), refuse)  # places in a picture have no table


def turning(by: float) -> Any:
    """Return a function of RoPE angles whose second half is the first half times `by`."""

    def compute(positions: Tensor) -> Any:
        angles = positions[..., None] * torch.tensor([1.0, 0.1, by, by * 0.1])
        return [rotation(angles.cos(), angles.sin())]

    return compute


def test_no_tables_are_made_of_what_they_cannot_hold() -> None:
    assert make_tables(turning(1.0), 8, CPU) is not None
    assert make_tables(turning(0.5), 8, CPU) is None
    with patch.object(rope, "MAX_TABLE_BYTES", 4 * 4 * 8 - 1):
        assert make_tables(turning(1.0), 8, CPU) is None
