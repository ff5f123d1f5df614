"""The fast parts of `bridle bench control` and `verbs`: guests, a fork, a program in three ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.aici.client import RuntimePool
from bridle.bench import control_guests as guests
from bridle.bench.control_device import critical_path, group_cpu, runtime_pool, upload
from bridle.bench.control_programs import load
from dev.bench.control_costs import group_memory, long_fork
from dev.bench.control_guests import heavy, padded
from dev.bench.verbs import steering_each_token, verbs
from tests.fakes.tiny_checkpoints import make_checkpoint

VOCAB_SIZE = 32_000  # that of the device which computes nothing


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimePool]:
    folder = tmp_path_factory.mktemp("bench")
    tokenizer = guests.write_tokenizer(folder / "tokenizer", VOCAB_SIZE)
    with runtime_pool(tokenizer, folder / "store", VOCAB_SIZE, "--wasm-max-step-time", "2000") as pool:
        yield pool


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["none", "trivial", "walk"])
@pytest.mark.parametrize("blocks", [True, False])
def test_every_sequence_draws_beside_the_device(pool: RuntimePool, kind: str, blocks: bool) -> None:
    wasm = {"none": None, "trivial": guests.trivial(), "walk": guests.walk()}[kind]
    path = critical_path(pool, None if wasm is None else upload(pool, wasm), 3, 8, 0.005, blocks=blocks)
    assert 0 <= path.gap <= path.gap_p99 and path.step >= 0.004
    assert 0 < path.rows <= 3


def test_neutral_controllers_steer_beside_a_module(pool: RuntimePool) -> None:
    path = critical_path(pool, upload(pool, guests.trivial()), 3, 8, 0.005, blocks=True, num_neutral=2)
    assert path.rows > 0 and path.cpu > 0


def test_padding_and_heavy_modules_are_modules(pool: RuntimePool) -> None:
    small = guests.trivial()
    large = padded(small, 10_000)
    assert len(large) > len(small) + 10_000
    ids = {upload(pool, wasm) for wasm in (small, large, heavy(3))}
    assert len(ids) == 3
    assert group_memory(pool.runtime_pid) > 1 << 20 and group_cpu(pool.runtime_pid) > 0


def test_a_long_fork_copies_at_most_a_block_for_each_output() -> None:
    at_end, within = long_fork(quick=True)
    assert (at_end["blocks_copied"], within["blocks_copied"]) == (0, 15)
    assert at_end["blocks_taken"] <= 16 and within["blocks_taken"] <= 16


def test_verbs_and_requests_give_the_same_answers(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, vocab_size=8_192, max_position_embeddings=4_096)
    executor = load(path, 1)
    try:
        by_verbs, cached, uncached = verbs(executor, quick=True)
        assert by_verbs["same_answers"] and cached["same_answers"] and uncached["same_answers"]
        assert by_verbs["computed_tokens"] < cached["computed_tokens"] < uncached["computed_tokens"]
        one, many = steering_each_token(executor, quick=True)
        assert (one["requests"], many["requests"]) == (1, one["tokens"])
        assert one["computed_tokens"] < many["computed_tokens"]
    finally:
        executor.close()
