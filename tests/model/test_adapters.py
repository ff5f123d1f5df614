"""Tests of adapters that PEFT saved, many in one batch: each row gets what PEFT computes with its adapter alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle.config import EngineConfig
from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.engine import Decision, Engine, Request
from bridle.errors import InternalError
from bridle.outputs import Finished, TokenEvent
from bridle.sampling import SamplingParams
from tests.covering import slow_but
from tests.model.loaded_adapters import RECURRENT_TARGETS, TARGETS, Loaded, all_logits

FAST = ("llama", "phi", "gpt_neox", "gpt2")
FAMILIES = slow_but(FAST, TARGETS)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    made = Loaded(request.param, tmp_path_factory.mktemp("adapters"), num_blocks=64)
    made.place_all()
    yield made
    made.close()


@pytest.mark.few(4)
@pytest.mark.parametrize("lengths", [(5, 30, 1, 2, 20, 3, 7, 9), (1, 2, 1, 1, 2, 1, 1, 1)])
def test_logits_are_those_of_peft(loaded: Loaded, lengths: tuple[int, ...]) -> None:
    """One step has long and short rows, rows of several adapters, and rows without an adapter."""
    adapters = (None, None, "0", "0", "1", "1", "2", None)
    prompts = [[(7 * i + 3 * number) % 250 + 10 for i in range(size)] for number, size in enumerate(lengths)]
    for prompt, adapter, have in zip(prompts, adapters, all_logits(loaded.executor, prompts, adapters), strict=True):
        want = loaded.oracle.logits(prompt, adapter)
        assert float((want - have).abs().max()) < 1e-3
    plain = all_logits(loaded.executor, prompts[:2], (None, None))
    adapted = all_logits(loaded.executor, prompts[:2], ("1", "0"))
    assert float((plain[0] - adapted[0]).abs().max()) > 0.1, "the adapters are too weak to test anything"


def test_rows_without_an_adapter_do_not_change_by_a_bit(loaded: Loaded) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12], [5, 6, 7, 8]]
    mixed = all_logits(loaded.executor, prompts, (None, "1", "2"))
    plain = all_logits(loaded.executor, prompts, (None, None, None))
    assert torch.equal(mixed[0], plain[0])


def test_a_plan_with_an_adapter_that_is_not_there_changes_nothing(loaded: Loaded) -> None:
    with pytest.raises(InternalError, match="wants adapter '9', which is not on the device"):
        all_logits(loaded.executor, [[5, 6]], ("9",))
    assert all_logits(loaded.executor, [[5, 6]], (None,))


class Forcing(Controller):
    """A controller that forces two tokens after every third token."""

    def next(self, view: SequenceView) -> Decision:
        return Decision.splice(0, (11, 12)) if len(view.tokens) % 5 == 3 else Decision.sample()


def run(loaded: Loaded, requests: Sequence[Request], **limits: Any) -> tuple[dict[tuple[str, int], list[int]], Engine]:
    """Run the requests; return the tokens by request and output, and the engine."""
    pools = [PythonControllerPool(loaded.executor.info.vocab_size)]
    engine = Engine(loaded.executor, EngineConfig(**limits), pools=pools, adapters=loaded.pool)
    for request in requests:
        engine.add(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens.setdefault((event.request_id, event.index), []).append(event.token)
            elif isinstance(event, Finished):
                assert event.error is None, event.error
    engine.check_integrity()
    loaded.executor.reset()
    return tokens, engine


def test_greedy_tokens_are_those_of_peft(tmp_path: Path) -> None:
    check_engine("llama", tmp_path, num_blocks=24)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*(family for family in TARGETS if family != "llama"), *RECURRENT_TARGETS])
def test_greedy_tokens_are_those_of_peft_in_other_families(family: str, tmp_path: Path) -> None:
    check_engine(family, tmp_path, num_blocks=24)


def check_engine(family: str, folder: Path, **settings: Any) -> None:
    """Check that PEFT would sample every token. Requests run in chunks next to decodes, and their outputs fork.
    Sequences are preempted because the pool is small, and a step cannot take all adapters."""
    loaded = Loaded(family, folder, **settings)
    loaded.await_all()
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    adapters = (None, "0", "1", "2")
    shared = [(11 * i) % 240 + 12 for i in range(14)]
    requests = [
        Request(
            f"r{number}",
            (*shared[: 14 - number % 3], number + 20),
            greedy.with_(n=2) if number == 5 else greedy,
            adapter=adapters[number % 4],
            controller=Forcing() if number in (2, 7) else None,
        )
        for number in range(10)
    ]
    for cap in (64, 2):
        tokens, engine = run(loaded, requests, max_num_batched_tokens=9, max_step_adapters=cap)
        assert engine.statistics().num_preemptions > 0
        for request in requests:
            for index in range(request.sampling.n):
                said = tokens[request.id, index]
                assert len(said) == 12
                if request.controller is None:
                    loaded.oracle.check_greedy(request.prompt, said, request.adapter)
    loaded.close()


def test_scores_of_prompts_and_outputs_are_those_of_peft(tmp_path: Path) -> None:
    """Log-probabilities of prompts and outputs equal PEFT's, with and without the prefix cache."""
    loaded = Loaded("llama", tmp_path, num_blocks=64)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    prompt = tuple(range(30, 50))
    engine = Engine(loaded.executor, adapters=loaded.pool)
    for number, adapter in enumerate((None, "0", "1", "1", "0", None)):
        engine.add(Request(f"r{number}", prompt, sampling, adapter=adapter))
        found: list[float] = []
        tokens: list[int] = []
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    assert event.logprob is not None
                    tokens.append(event.token)
                    found.append(event.logprob.logprob)
                elif hasattr(event, "logprobs"):
                    found += [one.logprob for one in event.logprobs if one is not None]
        want = loaded.oracle.logits([*prompt, *tokens], adapter).log_softmax(-1)
        known = [*prompt[1:], *tokens]
        for position, (token, have) in enumerate(zip(known, found, strict=True)):
            assert abs(float(want[position, token]) - have) < 1e-3
    engine.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_adapters_go_with_other_weights(quantization: str, tmp_path: Path) -> None:
    """With 8-bit weights the logits change, but an adapter changes them by nearly the same amounts as with exact
    weights."""
    loaded = Loaded("llama", tmp_path, num_blocks=64, quantization=quantization)
    loaded.place_all()
    prompt = [(13 * i) % 240 + 12 for i in range(12)]
    plain, adapted = all_logits(loaded.executor, [prompt, prompt], (None, "0"))
    want = loaded.oracle.logits(prompt, "0") - loaded.oracle.logits(prompt, None)
    assert float((adapted - plain - want).abs().mean()) < (1e-4 if quantization == "none" else 0.5)
    assert float(want.abs().mean()) > 1.0
    loaded.close()
