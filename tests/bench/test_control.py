"""The parts of `bridle bench control` that need no minutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridle.aici.client import RuntimePool
from bridle.bench import control_guests as guests
from bridle.bench.control_device import critical_path, runtime_pool, upload

VOCAB_SIZE = 32_000  # that of the device which computes nothing


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuntimePool]:
    folder = tmp_path_factory.mktemp("bench")
    tokenizer = guests.write_tokenizer(folder / "tokenizer", VOCAB_SIZE)
    with runtime_pool(tokenizer, folder / "store", VOCAB_SIZE, "--wasm-max-step-time", "2000") as pool:
        yield pool


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
