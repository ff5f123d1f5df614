"""Tests of the load of `bridle bench lora`, and of its adapters. Times are never asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.lora import open_adapter
from bridle.lora.torch_ops import TorchKernel
from bridle.testing.scripted import ScriptedExecutor
from dev.bench.adapters import RANK, make_adapters
from dev.bench.lora import LoraScene, Size, _Feed, _scenes
from dev.bench.lora_products import MIXES, Mix, time_mix
from tests.lora.kit import LAYERS

SIZE = Size(batch=6, num_warm=20, num_tokens=200, num_rounds=1, num_peft_tokens=2, num_many=12)


def feed_of(scene: LoraScene) -> _Feed:
    executor = ScriptedExecutor(num_blocks=256, record=True)
    feed = _Feed(Engine(executor, EngineConfig(enable_prefix_caching=False, max_num_seqs=SIZE.batch)), scene, SIZE)
    feed.run(SIZE.num_warm)
    feed.run(SIZE.num_tokens)
    assert not executor.violations
    rows = [[row.adapter for row in plan.rows] for plan in executor.plans]
    assert max(map(len, rows[8:])) == SIZE.batch, "one that ends makes place for the next"
    return feed


@pytest.mark.parametrize(("num_adapters", "distinct"), [(0, 0.0), (1, 1.0), (3, 3.0), (12, 6.0)])
def test_adapters_go_round(num_adapters: int, distinct: float) -> None:
    feed = feed_of(LoraScene("x", num_adapters=num_adapters))
    assert distinct - 1 <= feed.num_distinct / feed.num_steps <= distinct
    assert feed.num_tokens >= SIZE.num_tokens
    assert feed.num_base_tokens == (0 if num_adapters else feed.num_tokens)


def test_half_of_the_rows_may_have_none() -> None:
    feed = feed_of(LoraScene("x", num_adapters=4, share=0.5))
    assert 0.4 < feed.num_base_tokens / feed.num_tokens < 0.6


def test_scenes_are_comparable_to_the_first() -> None:
    scenes = _scenes(SIZE)
    assert scenes[0].num_adapters == 0
    assert len(set(scenes)) == len(scenes)


def test_products_are_timed_both_ways() -> None:
    ways = {"torch": TorchKernel(), "other": TorchKernel()}
    mix = Mix("x", (1, 1, 3), (8, 16))
    figure = time_mix(mix, ways, torch.empty(0), sides=(8, (8, 4)), num_repeats=2)
    assert figure.name == "x"
    assert all(taken > 0 for taken in figure.microseconds.values()) and list(figure.microseconds) == ["torch", "other"]
    assert len({mix.name for mix in MIXES}) == len(MIXES)


def test_adapters_are_such_as_peft_saves(tmp_path: Path) -> None:
    for targets, num_layers in (("q and v", 6), ("all linear", 21)):
        one, other = (open_adapter(path) for path in make_adapters(tmp_path, LAYERS, targets, 2))
        assert one.rank == RANK and one.digest != other.digest
        assert len(one.shapes) == num_layers
