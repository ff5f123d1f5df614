"""Wasm controllers steer the engine: the pool over a real runtime process, the model scripted."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.aici import protocol
from bridle.aici.client import RuntimeConfig, RuntimePool, WasmController
from bridle.engine import Engine, Request
from bridle.outputs import Event, Finished, FinishReason, Forked, Log, Rewind, Stored, TokenEvent
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from tests.aici.conftest import EOS, VOCAB_SIZE
from tests.aici.guests import END, NOOP, TRAP, by_branch, force, guest2, mask, result, sample, say, splice, store

MAX_STEPS = 2_000


@pytest.fixture(scope="module")
def pool(tokenizer: Path, store: Path) -> Iterator[RuntimePool]:
    config = RuntimeConfig(str(tokenizer), extra_args=("--store", str(store), "--wasm-max-step-time", "500"))
    pool = RuntimePool(config, VOCAB_SIZE)
    yield pool
    pool.shutdown()


class Steered:
    """An engine with the pool, and what happened to each request."""

    def __init__(self, pool: RuntimePool) -> None:
        self.pool = pool
        executor = ScriptedExecutor(VOCAB_SIZE, 64, 4, eos_token_ids=(EOS,))
        self.engine = Engine(executor, pools=[_Shared(pool)])
        self.engine.config = self.engine.config.__class__(step_timeout=2.0)
        self.events: dict[str, list[Event]] = {}

    def upload(self, wasm: bytes) -> str:
        message = protocol.MkModule(binary=base64.b64encode(wasm).decode())
        module: str = self.pool.call(message, protocol.ModuleData).module_id
        return module

    def add(self, name: str, wasm: bytes | None, argument: str = "", **sampling: object) -> None:
        controller = None if wasm is None else WasmController(self.upload(wasm), argument)
        params = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        self.engine.add(Request(name, (1, 2, 3), params, controller=controller))
        self.events[name] = []

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                self.engine.check_integrity()
                return
            for event in self.engine.step():
                self.events[event.request_id].append(event)
            self.engine.check_integrity()
        raise AssertionError(f"not finished after {MAX_STEPS} steps")

    def tokens(self, name: str, index: int = 0) -> list[int]:
        """The tokens of an output, rewinds and forks applied."""
        outputs: dict[int, list[int]] = {0: []}
        for event in self.events[name]:
            if isinstance(event, TokenEvent):
                outputs[event.index].append(event.token)
            elif isinstance(event, Rewind):
                del outputs[event.index][len(outputs[event.index]) - event.num_tokens :]
            elif isinstance(event, Forked):
                outputs[event.index] = outputs[event.parent][: event.num_tokens]
        return outputs[index]

    def end(self, name: str, index: int = 0) -> Finished:
        return next(e for e in self.events[name] if isinstance(e, Finished) and e.index == index)

    def logs(self, name: str, index: int = 0) -> str:
        return "".join(e.text for e in self.events[name] if isinstance(e, Log) and e.index == index)


class _Shared:
    """The module's pool, which outlives each test's engine."""

    def __init__(self, pool: RuntimePool) -> None:
        self._pool = pool
        for name in ("accepts", "open", "ask", "collect", "close"):
            setattr(self, name, getattr(pool, name))

    def shutdown(self) -> None:
        pass


@pytest.fixture
def steered(pool: RuntimePool) -> Steered:
    return Steered(pool)


def test_a_mask_rules_each_draw(steered: Steered) -> None:
    steered.add("a", guest2([sample([65], VOCAB_SIZE), sample([66, 67], VOCAB_SIZE), END]))
    steered.run()
    first, second = steered.tokens("a")
    assert first == 65 and second in (66, 67)
    assert steered.end("a").reason is FinishReason.CONTROLLER


def test_forced_tokens_rewinds_logs_and_variables(steered: Steered) -> None:
    wasm = guest2(
        [
            [say("hello\n"), *force([70, 71, 72])],
            force([80], backtrack=2),
            [store("v", "6869"), *sample([90], VOCAB_SIZE)],
            END,
        ]
    )
    steered.add("a", wasm)
    steered.run()
    assert steered.tokens("a") == [70, 80, 90]
    assert steered.logs("a").startswith("hello\n")
    assert [(e.name, e.value) for e in steered.events["a"] if isinstance(e, Stored)] == [("v", b"hi")]
    usage = steered.end("a").usage
    assert (usage.sampled_tokens, usage.forced_tokens, usage.rewound_tokens) == (1, 4, 2)


def test_a_fork_shares_the_past_and_goes_two_ways(steered: Steered) -> None:
    branches = result({"branches": [splice([100]), splice([101, 102])]})
    wasm = guest2(
        [sample([65], VOCAB_SIZE), [branches], [by_branch(sample([110], VOCAB_SIZE), sample([111], VOCAB_SIZE))], END]
    )
    steered.add("a", wasm)
    steered.run()
    assert steered.tokens("a", 0) == [65, 100, 110]
    assert steered.tokens("a", 1) == [65, 101, 102, 111]


def test_waiting_costs_no_forward(steered: Steered) -> None:
    steered.add("a", guest2([sample([65], VOCAB_SIZE), NOOP, NOOP, NOOP, sample([66], VOCAB_SIZE), END]))
    steered.run()
    assert steered.tokens("a") == [65, 66]
    assert steered.engine.statistics().num_computed_tokens <= 3 + 2 + 3


def test_the_prompt_may_be_rewritten(steered: Steered) -> None:
    steered.add("a", guest2([sample([65], VOCAB_SIZE), END], prompt=[7, 8, 9, 10]))
    steered.run()
    assert steered.end("a").usage.prompt_tokens == 4


def test_a_trap_ends_its_own_request_only(steered: Steered) -> None:
    steered.add("bad", guest2([[say("so far so good\n"), *sample([65], VOCAB_SIZE)], [TRAP]]))
    steered.add("plain", None)
    steered.add("good", guest2([sample([65], VOCAB_SIZE), sample([66], VOCAB_SIZE), END]))
    steered.run()
    end = steered.end("bad")
    assert end.reason is FinishReason.ERROR and "unreachable" in str(end.error)
    assert steered.logs("bad").startswith("so far so good\n")
    assert steered.end("plain").reason is FinishReason.LENGTH and len(steered.tokens("plain")) == 12
    assert steered.tokens("good") == [65, 66]


def test_a_temperature_for_one_draw(steered: Steered) -> None:
    hot = [
        mask(range(200), VOCAB_SIZE),
        result({"branches": [{"sample_mask": "#", "splices": [], "temperature": 50.0}]}),
    ]
    steered.add("a", guest2([hot, sample([65], VOCAB_SIZE), END]), seed=3)
    steered.run()
    assert steered.end("a").reason is FinishReason.CONTROLLER and steered.tokens("a")[1] == 65


def test_an_unknown_module_is_the_users_fault(steered: Steered) -> None:
    params = SamplingParams(max_tokens=2)
    steered.engine.add(Request("a", (1,), params, controller=WasmController("f" * 64)))
    steered.events["a"] = []
    steered.run()
    assert "f" * 64 in str(steered.end("a").error)


def test_a_killed_runtime_ends_its_requests_and_comes_back(tokenizer: Path, store: Path) -> None:
    config = RuntimeConfig(str(tokenizer), extra_args=("--store", str(store)))
    opened = threading.Event()
    pool = RuntimePool(config, VOCAB_SIZE)
    try:
        steered = Steered(pool)
        forever = guest2([sample([65], VOCAB_SIZE)])
        steered.add("a", forever, max_tokens=200)
        steered.add("plain", None, max_tokens=30)
        while not steered.tokens("a"):
            for event in steered.engine.step():
                steered.events[event.request_id].append(event)
        assert pool.runtime_pid is not None
        os.killpg(pool.runtime_pid, 9)
        steered.run()
        end = steered.end("a")
        assert end.reason is FinishReason.ERROR and "runtime" in str(end.error)
        assert steered.end("plain").reason is FinishReason.LENGTH
        steered.pool.wake = opened.set
        steered.add("b", guest2([sample([65], VOCAB_SIZE), END]))  # uploading waits for the new runtime
        assert opened.wait(30)
        steered.run()
        assert steered.tokens("b") == [65] and pool.num_restarts == 1
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"bridle-{os.getpid()}")]
    finally:
        pool.shutdown()
