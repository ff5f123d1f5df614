"""Properties of steering through the sandbox: a program gives the same tokens as a Wasm guest, as plain Python, and in
a naive reference that recomputes everything; forced tokens ride along without pausing anybody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.aici.client import RuntimeConfig, RuntimePool, WasmController
from bridle.config import EngineConfig
from bridle.controllers import PythonControllerPool
from bridle.engine import Engine, Request
from bridle.outputs import FinishReason, Rewind, TokenEvent
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from tests.aici import programs
from tests.aici.conftest import EOS, VOCAB_SIZE
from tests.aici.guests import force, guest2, sample
from tests.aici.steering import SharedRuntime, Steered
from tests.engine.support import Replay, check_usage, replay
from tests.fakes.reference_engine import ReferenceOutput, run_reference

NUM_BLOCKS, BLOCK_SIZE = 40, 4


@pytest.fixture(scope="module")
def pool(tokenizer: Path, store: Path) -> Iterator[RuntimePool]:
    config = RuntimeConfig(str(tokenizer), extra_args=("--store", str(store), "--wasm-max-step-time", "2000"))
    pool = RuntimePool(config, VOCAB_SIZE)
    yield pool
    pool.shutdown()


def make_engine(pool: RuntimePool, random: Random) -> Engine:
    """Ample or cramped, so that there are preemptions and chunks among it."""
    executor = ScriptedExecutor(VOCAB_SIZE, NUM_BLOCKS, BLOCK_SIZE, eos_token_ids=(EOS,))
    config = EngineConfig(
        max_num_batched_tokens=random.choice([3, 8, 100]),
        max_num_seqs=random.choice([2, 50]),
        enable_prefix_caching=random.random() < 0.7,
        step_timeout=2.0,
    )
    return Engine(executor, config, pools=[SharedRuntime(pool), PythonControllerPool(VOCAB_SIZE)])


def run(engine: Engine, requests: list[Request], random: Random) -> dict[str, Replay]:
    events, arriving = [], list(requests)
    while arriving or engine.has_work:
        if arriving and (random.random() < 0.5 or not engine.has_work):
            engine.add(arriving.pop(0))
        events += engine.step()
        engine.check_integrity()
    return replay(events)


def guest_request(pool: RuntimePool, random: Random, number: int) -> tuple[Request, programs.Node]:
    """A request with a random program as a Wasm guest, and the program."""
    root = programs.make(random)
    prompt = tuple(random.randrange(200) for _ in range(programs.PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=random.randrange(1 << 30), ignore_eos=True)
    module = Steered(pool).upload(programs.compile_program(root))
    return Request(f"wasm {number}", prompt, sampling, controller=WasmController(module)), root


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


def reference(
    engine: Engine, request: Request, root: programs.Node
) -> dict[tuple[tuple[int, int], ...], ReferenceOutput]:
    """What a naive reference makes of a program, by path."""
    model = engine._executor.model  # type: ignore[attr-defined]
    return run_reference(
        model,
        request,
        lambda view: programs.decide(programs.lookup(root, view), request.sampling),
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        eos_token_ids=(EOS,),
    )


def check(engine: Engine, request: Request, root: programs.Node, got: Replay) -> None:
    expected = reference(engine, request, root)
    assert set(got.by_path) == set(expected)
    for path, output in got.by_path.items():
        wanted: ReferenceOutput = expected[path]
        assert (output.tokens, output.reason) == (wanted.tokens, wanted.reason), (request.id, path, output.finished)
        check_usage(output.usage, wanted.usage)


def test_forced_tokens_ride_along_without_pausing_anybody(pool: RuntimePool) -> None:
    """One sequence forces five tokens in every step, then fifty at once; each neighbour has a token in each step."""
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
