"""A controller pool with its processes, and helpers for its tests."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random

from bridle.aici.client import RuntimePool, WasmController
from bridle.aici.protocol import Auth
from bridle.config import EngineConfig
from bridle.controllers import PythonControllerPool
from bridle.engine import Engine, Request
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from tests.aici import programs
from tests.aici.conftest import EOS, VOCAB_SIZE
from tests.aici.guests import guest2, sample
from tests.aici.steering import SharedRuntime, Steered
from tests.engine.support import Replay, check_usage, replay
from tests.fakes.reference_engine import ReferenceOutput, run_reference

FOREVER = guest2([sample([65], VOCAB_SIZE)])
TENANTS = ("ada", "bob", "cy", "dee")


def _stat(pid: int) -> tuple[str, int, int]:
    """Return the state, the parent and the process group of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return fields[0], int(fields[1]), int(fields[2])


def members(group: int) -> dict[int, int]:
    """Return the ids of the running processes of a process group, with their parents."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent, leader = _stat(int(entry.name))
                if leader == group and state != "Z":
                    found[int(entry.name)] = parent
    return found


def workers(pool: RuntimePool) -> set[int]:
    """Return the ids of the processes that the runtime's fork server started."""
    assert pool.runtime_pid is not None
    group = members(pool.runtime_pid)
    nurseries = {pid for pid, parent in group.items() if parent == pool.runtime_pid}
    return {pid for pid, parent in group.items() if parent in nurseries}


def start_streams(pool: RuntimePool, num_streams: int) -> Steered:
    """Start controlled streams of four tenants and the same number of plain streams, and wait until all have output."""
    steered = Steered(pool, num_blocks=160 * num_streams, max_num_batched_tokens=4 * num_streams)
    module = steered.upload(FOREVER)
    for number in range(num_streams):
        steered.events[f"plain {number}"] = []
        sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        steered.engine.add(Request(f"plain {number}", (1, 2, 3), sampling))
        tenant = TENANTS[number % len(TENANTS)]
        name = f"{tenant} {number}"
        steered.events[name] = []
        controller = WasmController(module, auth=Auth(tenant, False))
        sampling = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)
        steered.engine.add(Request(name, (1, 2, 3), sampling, controller=controller))
    steered.run(until=lambda: all(steered.tokens(name) for name in steered.events))
    return steered


NUM_BLOCKS, BLOCK_SIZE = 40, 4


def make_engine(pool: RuntimePool, random: Random) -> Engine:
    """Return an engine with large or small limits, so that some runs have preemptions and prompt chunks."""
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
    """Return a request with a random program as a Wasm guest, and the program."""
    root = programs.make(random)
    prompt = tuple(random.randrange(200) for _ in range(programs.PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=random.randrange(1 << 30), ignore_eos=True)
    module = Steered(pool).upload(programs.compile_program(root))
    return Request(f"wasm {number}", prompt, sampling, controller=WasmController(module)), root


def reference(
    engine: Engine, request: Request, root: programs.Node
) -> dict[tuple[tuple[int, int], ...], ReferenceOutput]:
    """Return the outputs of a naive reference for a program, by path."""
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
