"""Property tests of steering through the sandbox. A program gives the same tokens as a Wasm guest, as plain Python, and
in a naive reference that recomputes everything. Forced tokens pause no other sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.outputs import FinishReason, Rewind, TokenEvent
from tests.aici import programs
from tests.aici.conftest import VOCAB_SIZE
from tests.aici.guests import force, guest2, sample
from tests.aici.pool_kit import check, guest_request, make_engine, run
from tests.aici.steering import Steered


@pytest.fixture(scope="module")
def pool(tokenizer: Path, store: Path) -> Iterator[RuntimePool]:
    config = RuntimeConfig(str(tokenizer), extra_args=("--store", str(store), "--wasm-max-step-time", "2000"))
    pool = RuntimePool(config, VOCAB_SIZE)
    yield pool
    pool.shutdown()


@settings(max_examples=max(settings().max_examples // 4, 5))
@given(seed=st.integers(0, 1 << 40))
def test_a_program_gives_the_same_tokens_everywhere(pool: RuntimePool, seed: int) -> None:
    random = Random(seed)
    engine = make_engine(pool, random)
    requests, roots = [], {}
    for number in range(random.randint(1, 3)):
        request, root = guest_request(pool, random, number)
        python = programs.TreeController(root, request.sampling)
        requests += [request, replace(request, id=f"python {number}", controller=python)]
        roots[f"wasm {number}"] = roots[f"python {number}"] = root
    replays = run(engine, requests, random)
    pool.settle()
    for request in requests:
        check(engine, request, roots[request.id], replays[request.id])


def test_forced_tokens_ride_along_without_pausing_anybody(pool: RuntimePool) -> None:
    """One sequence forces five tokens in every step, and then fifty at once. Each other sequence gets a token in each
    step."""
    steered = Steered(pool)
    neighbours = {f"n{number}" for number in range(6)}
    for name in sorted(neighbours):
        steered.add(name, None, max_tokens=30)
    steered.step()
    program = [sample([65], VOCAB_SIZE), *[force([70, 71, 72, 73, 74])] * 5, force([75] * 50), sample([65], VOCAB_SIZE)]
    steered.add("one", guest2(program), max_tokens=150)
    while not any(map(steered.is_over, neighbours)):
        before = {name: len(steered.tokens(name)) for name in neighbours}
        steered.step()
        assert all(len(steered.tokens(name)) == before[name] + 1 for name in neighbours)
    steered.run()
    assert steered.tokens("one")[:76] == [65, *[70, 71, 72, 73, 74] * 5, *[75] * 50]
    assert not any(isinstance(event, Rewind) for name in neighbours for event in steered.events[name])
    drawn = [event for event in steered.events["one"] if isinstance(event, TokenEvent) and not event.forced]
    assert len(drawn) + 75 == 150 and steered.end("one").reason is FinishReason.LENGTH
