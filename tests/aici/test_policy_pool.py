"""Tests of Wasm modules of an operator's policies: they are chosen by hash and run in a separate runtime, isolated from
users' controllers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from bridle.aici.client import PolicyPool, RuntimeConfig, RuntimePool, WasmController
from bridle.config import EngineConfig
from bridle.controllers.composite_pool import with_composed
from bridle.engine import Engine, Request
from bridle.errors import Overloaded
from bridle.outputs import FinishReason
from bridle.sampling import SamplingParams
from bridle.serving.controller_runtime import ControlSettings, demanded_pool
from bridle.serving.policies import PolicyContext, read_policies
from bridle.serving.policies.kinds import ForModel
from bridle.testing.scripted import ScriptedExecutor
from tests.aici.conftest import EOS, VOCAB_SIZE
from tests.aici.guests import END, TRAP, force, guest2, result, sample, splice
from tests.aici.steering import SharedRuntime, Steered
from tests.waiting import PATIENCE, until

ALLOWED = (65, 66)


class Demanding(Steered):
    """An engine with one control runtime for users' controllers, and one for the operator's policies."""

    def __init__(self, users: RuntimePool, demanded: PolicyPool, **limits: object) -> None:
        super().__init__(users, **limits)
        executor = ScriptedExecutor(VOCAB_SIZE, 256, 4, eos_token_ids=(EOS,))
        pools = with_composed([SharedRuntime(users), demanded], VOCAB_SIZE)
        config = EngineConfig(**{"step_timeout": 2.0, **limits})  # type: ignore[arg-type]
        self.engine = Engine(executor, config, pools=pools)
        self.demanded = demanded

    def ask(self, name: str, policy: str, own: str | None = None, *, on_failure: str = "end", **sampling: Any) -> None:
        """Start a request to which a policy module applies, and which a user's module may steer."""
        table = {"name": "mine", "kind": "wasm", "module": policy, "on_failure": on_failure}
        applied = read_policies({"policy": [table]}).select(PolicyContext("scripted"), cast("ForModel", None))
        controller = applied.steer(None if own is None else WasmController(own))
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **sampling})
        self.engine.add(Request(name, (1, 2, 3), params, controller=controller))
        self.events[name] = []

    def begin(self) -> None:
        """Wait until all controllers have started, without a step."""
        waiting = self.engine._openings.waiting
        until(lambda: all(opened.done() for _, opened in waiting.values()))

    def outputs(self, name: str) -> dict[int, list[int]]:
        return {index: self.tokens(name, index) for index in {event.index for event in self.events[name]}}

    def error(self, name: str) -> str:
        return str(self.end(name).error)


@dataclass
class Modules:
    only: str
    traps: str
    forces: str
    forks: str


@pytest.fixture(scope="module")
def users(tokenizer: Path, store: Path) -> Iterator[RuntimePool]:
    args = ("--store", str(store), "--wasm-max-step-time", "500", "--limit", "max_instances=1", "--wasm-max-forks=64")
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=args), VOCAB_SIZE)
    yield pool
    pool.shutdown()


@pytest.fixture(scope="module")
def demand(tokenizer: Path, store: Path) -> Iterator[Callable[..., PolicyPool]]:
    made: dict[tuple[str, ...], PolicyPool] = {}

    def make(*args: str) -> PolicyPool:
        if args not in made:
            settings = ControlSettings("off", store=store, policy_args=("--wasm-max-step-time=500", *args))
            pool = demanded_pool(settings, tokenizer, VOCAB_SIZE)
            assert pool is not None and pool.runtime is None
            made[args] = pool
        return made[args]

    yield make
    for pool in made.values():
        pool.shutdown()


@pytest.fixture(scope="module")
def modules(users: RuntimePool) -> Modules:
    upload = Steered(users).upload
    splices = result({"branches": [splice([65 + number % 2]) for number in range(20)]})
    return Modules(
        upload(guest2([sample(ALLOWED, VOCAB_SIZE)])),
        upload(guest2([sample(ALLOWED, VOCAB_SIZE), [TRAP]])),
        upload(guest2([force([65]), force([67]), END])),
        upload(guest2([[splices], sample(range(100), VOCAB_SIZE)])),
    )


@pytest.fixture
def lab(users: RuntimePool, demand: Callable[..., PolicyPool]) -> Iterator[Demanding]:
    lab = Demanding(users, demand())
    yield lab
    if lab.demanded.runtime is not None:
        lab.demanded.runtime.settle()


def test_a_module_holds_for_what_is_drawn_and_what_users_modules_force(lab: Demanding, modules: Modules) -> None:
    lab.ask("plain", modules.only)
    lab.run()
    assert len(lab.tokens("plain")) == 6 and set(lab.tokens("plain")) <= set(ALLOWED)
    lab.ask("forced", modules.only, modules.forces)
    lab.run()
    assert lab.tokens("forced") == [65] and "policy mine and controller 1" in lab.error("forced")
    assert lab.demanded.runtime is not None and lab.demanded.runtime.runtime_pid != lab.pool.runtime_pid


def test_a_module_that_fails_ends_the_output_or_is_left_out(lab: Demanding, modules: Modules) -> None:
    lab.ask("end", modules.traps)
    lab.ask("skip", modules.traps, on_failure="skip")
    lab.ask("none", "f" * 64)
    lab.run()
    assert lab.error("end") == "policy mine failed" and len(lab.tokens("end")) == 1
    assert lab.end("skip").reason is FinishReason.LENGTH and len(lab.tokens("skip")) == 6
    assert not set(lab.tokens("skip")) <= set(ALLOWED)
    assert lab.error("none") == "policy mine failed" and lab.tokens("none") == []


def test_users_can_use_up_and_break_their_runtime_alone(lab: Demanding, modules: Modules) -> None:
    lab.add_module("flood", modules.only, max_tokens=700)
    lab.ask("held", modules.only, max_tokens=700)
    lab.begin()
    full = lab.pool.open(Request("more", (1,), SamplingParams(), controller=WasmController(modules.only)))
    assert isinstance(full.exception(PATIENCE), Overloaded)
    lab.ask("another", modules.only)
    lab.begin()
    lab.run(lambda: all(lab.tokens(name) for name in ("flood", "held", "another")))
    assert lab.pool.runtime_pid is not None and not lab.is_over("flood")
    os.killpg(lab.pool.runtime_pid, 9)
    lab.run()
    assert "runtime" in lab.error("flood")
    assert len(lab.tokens("held")) == 700 and set(lab.tokens("held")) <= set(ALLOWED)
    assert len(lab.tokens("another")) == 6 and set(lab.tokens("another")) <= set(ALLOWED)


def test_more_forks_than_users_may_have_leave_no_policy_out(lab: Demanding, modules: Modules) -> None:
    lab.ask("forks", modules.only, modules.forks, on_failure="skip", max_tokens=3)
    lab.run()
    assert len(lab.outputs("forks")) == 20
    assert all(len(tokens) == 3 and set(tokens) <= set(ALLOWED) for tokens in lab.outputs("forks").values())


def test_no_room_is_no_failure(users: RuntimePool, demand: Callable[..., PolicyPool], modules: Modules) -> None:
    """If the runtime is full, the request is refused and the policy not skipped, even with `skip`."""
    lab = Demanding(users, demand("--limit=max_instances=1"))
    lab.ask("first", modules.only, max_tokens=700)
    lab.begin()
    lab.ask("second", modules.only, on_failure="skip")
    lab.begin()
    lab.run(lambda: lab.is_over("second"))
    assert isinstance(lab.end("second").error, Overloaded) and lab.tokens("second") == []
    lab.engine.cancel("first")
    lab.run()


def test_a_runtime_that_does_not_start_fails_the_policy(users: RuntimePool) -> None:
    def start() -> RuntimePool:
        raise OSError("no memory")

    pool = PolicyPool(start)
    lab = Demanding(users, pool)
    lab.ask("end", "f" * 64)
    lab.ask("skip", "f" * 64, on_failure="skip")
    lab.run()
    assert lab.error("end") == "policy mine failed" and len(lab.tokens("skip")) == 6
    pool.shutdown()
