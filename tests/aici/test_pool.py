"""Tests that Wasm controllers steer the engine, with a real control runtime and a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool, WasmController
from bridle.engine import Request
from bridle.outputs import FinishReason, Stored
from bridle.sampling import SamplingParams
from tests.aici.conftest import VOCAB_SIZE
from tests.aici.guests import END, NOOP, TRAP, by_branch, force, guest2, mask, result, sample, say, splice, store
from tests.aici.steering import Steered


@pytest.fixture(scope="module")
def pool(tokenizer: Path, store: Path) -> Iterator[RuntimePool]:
    config = RuntimeConfig(str(tokenizer), extra_args=("--store", str(store), "--wasm-max-step-time", "500"))
    pool = RuntimePool(config, VOCAB_SIZE)
    yield pool
    pool.shutdown()


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


def test_a_controller_is_not_called_after_it_said_stop(steered: Steered) -> None:
    steered.add("a", guest2([sample([65], VOCAB_SIZE), [say("bye\n"), *END]]))
    steered.run()
    assert steered.logs("a") == "bye\n"
