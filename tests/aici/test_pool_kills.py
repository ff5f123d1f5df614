"""`kill -9` during running streams: of a worker, the compiler, the supervisor, and the engine's own process. Only the
streams of the killed process fail. The others continue, the service recovers, and no resource is leaked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool, WasmController
from bridle.aici.protocol import Auth
from bridle.engine import Request
from bridle.outputs import FinishReason
from bridle.sampling import SamplingParams
from tests.aici.conftest import VOCAB_SIZE
from tests.aici.guests import END, guest2, sample, say
from tests.aici.pool_kit import TENANTS, members, start_streams, workers
from tests.aici.steering import Steered
from tests.waiting import until

SHORT = guest2([sample([66], VOCAB_SIZE), END])

rounds = pytest.mark.parametrize("num_streams", [8, pytest.param(100, marks=pytest.mark.slow)])


@pytest.fixture
def pool(tokenizer: Path, store: Path) -> Iterator[RuntimePool]:
    args = ("--store", str(store), "--wasm-max-step-time", "2000")
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=args, json_size=16), VOCAB_SIZE)
    yield pool
    group = pool.runtime_pid
    pool.shutdown()
    until(lambda: group is None or not members(group))
    assert not [name for name in os.listdir("/dev/shm") if f"bridle-{os.getpid()}-" in name]


def names(steered: Steered, *tenants: str) -> list[str]:
    return [name for name in steered.events if name.split()[0] in tenants]


def check_plain(steered: Steered) -> None:
    for name in names(steered, "plain"):
        assert steered.end(name).reason is FinishReason.LENGTH and len(steered.tokens(name)) == 60


def check_service(steered: Steered) -> None:
    """Check that all users are served again."""
    module = steered.upload(SHORT)
    for tenant in TENANTS:
        steered.events[f"again {tenant}"] = []
        controller = WasmController(module, auth=Auth(tenant, False))
        steered.engine.add(Request(f"again {tenant}", (1,), SamplingParams(max_tokens=4), controller=controller))
    steered.run()
    assert [steered.tokens(f"again {tenant}") for tenant in TENANTS] == [[66]] * len(TENANTS)


@rounds
def test_a_killed_worker_takes_only_its_own_along(pool: RuntimePool, num_streams: int) -> None:
    steered = start_streams(pool, num_streams)
    victim = min(workers(pool))
    os.kill(victim, signal.SIGKILL)
    controlled = names(steered, *TENANTS)
    steered.run(until=lambda: any(map(steered.is_over, controlled)))
    num_tokens = {name: len(steered.tokens(name)) for name in controlled}
    steered.run(until=lambda: any(len(steered.tokens(n)) > num_tokens[n] + 20 for n in controlled))
    lost = [name for name in controlled if steered.is_over(name)]
    assert len({name.split()[0] for name in lost}) == 1  # no process serves two tenants
    for name in controlled:
        if name in lost:
            assert "Worker:" in str(steered.end(name).error)
        else:
            steered.engine.cancel(name)
    steered.run()
    assert all(steered.end(name).reason is FinishReason.CANCELLED for name in set(controlled) - set(lost))
    assert pool.num_restarts == 0
    check_plain(steered)
    check_service(steered)


@pytest.mark.slow  # `test_deaths.py` kills one, too
@rounds
def test_a_killed_compiler_disturbs_no_stream(pool: RuntimePool, num_streams: int) -> None:
    steered = start_streams(pool, num_streams)
    before = workers(pool)
    slow = b""
    with ThreadPoolExecutor(1) as thread:
        for attempt in range(20):  # on a busy machine a compiler may be gone before it was seen
            slow = guest2([[say(f"{num_streams} {attempt} {i}") for i in range(3)] for _ in range(1500)])
            upload = thread.submit(steered.upload, slow)
            until(lambda done=upload.done: done() or bool(workers(pool) - before))  # type: ignore[misc]
            for pid in workers(pool) - before:
                os.kill(pid, signal.SIGKILL)
            if upload.exception(60) is not None:
                break
        assert "compiler died" in str(upload.exception())
    num_tokens = {name: len(steered.tokens(name)) for name in names(steered, *TENANTS)}
    steered.run(until=lambda: all(len(steered.tokens(name)) > count + 5 for name, count in num_tokens.items()))
    for name in num_tokens:
        assert not steered.is_over(name)
        steered.engine.cancel(name)
    steered.run()
    check_plain(steered)
    assert steered.upload(slow)
    check_service(steered)


@pytest.mark.few(1)
@rounds
@pytest.mark.parametrize("victim", ["supervisor", "nursery"])
def test_a_killed_runtime_comes_back(pool: RuntimePool, num_streams: int, victim: str) -> None:
    steered = start_streams(pool, num_streams)
    group = pool.runtime_pid
    assert group is not None
    (nursery,) = (pid for pid, parent in members(group).items() if parent == group)
    os.kill(group if victim == "supervisor" else nursery, signal.SIGKILL)
    steered.run()
    for name in names(steered, *TENANTS):
        end = steered.end(name)
        assert end.reason is FinishReason.ERROR
        assert "the control runtime ended" in str(end.error) or "Worker: the process died" in str(end.error)
    check_plain(steered)
    if victim == "supervisor":
        until(lambda: not members(group) and pool.runtime_pid not in (None, group))
    check_service(steered)
    assert pool.num_restarts == (victim == "supervisor")  # a nursery is replaced within the runtime
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"bridle-{os.getpid()}")]


_ROUTER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from bridle.aici.client import RuntimeConfig, RuntimePool
from tests.aici.conftest import VOCAB_SIZE
from tests.aici.pool_kit import start_streams
from tests.waiting import PATIENCE, until
config = RuntimeConfig(sys.argv[1], extra_args=("--store", sys.argv[2]), json_size=16)
pool = RuntimePool(config, VOCAB_SIZE)
steered = start_streams(pool, int(sys.argv[4]))
print(pool.runtime_pid, flush=True)
while True:
    steered.step()
"""


@rounds
def test_a_killed_router_leaves_nothing(tokenizer: Path, store: Path, num_streams: int) -> None:
    root = str(Path(__file__).parents[2])
    arguments = [sys.executable, "-c", _ROUTER, str(tokenizer), str(store), root, str(num_streams)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        group = int(process.stdout.readline())
        assert len(members(group)) >= 3
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    until(lambda: not members(group))
    assert not [name for name in os.listdir("/dev/shm") if f"bridle-{process.pid}-" in name]
