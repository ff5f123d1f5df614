"""Tests that a separately started shard runs no steps that are too large for its memory."""

from __future__ import annotations

import pytest

from bridle.config import EngineConfig, ModelConfig
from bridle.errors import InvalidRequest
from bridle.launch.launcher import connect_shard
from bridle.testing.scripted import ScriptedExecutor
from tests.distributed.kit import hosted


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"max_batch_prefill_tokens": 41},
            "needs 41 prompt tokens, .* memory for 40: start the shard with --step-tokens 41",
        ),
        ({"max_num_seqs": 8}, "needs 8 sequences, .* memory for 7: start the shard with --step-seqs 8"),
    ],
)
def test_larger_steps_than_a_shard_has_room_for_are_refused(knobs: dict[str, int], message: str) -> None:
    config = ModelConfig().sized_for(EngineConfig(**knobs))  # type: ignore[arg-type]
    with hosted(ScriptedExecutor(max_num_batched_tokens=40, max_num_seqs=7)) as host:
        with pytest.raises(InvalidRequest, match=message):
            connect_shard(host.address)(config, None, None)
        host.wait_free()
        connect_shard(host.address)(ModelConfig(step_tokens=40, step_seqs=7), None, None).close()
