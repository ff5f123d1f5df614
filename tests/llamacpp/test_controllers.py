"""Tests that controllers and constraints give the same tokens on torch in float32, on the CPU kernels and on llama.cpp.

A difference counts only if the logits of the two tokens are clearly apart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("llama_cpp")

from bridle import LLM, SamplingParams, WasmController
from bridle.controllers import Controller, SequenceView
from bridle.engine import Branch, Decision
from bridle.serving import ControlSettings
from tests.aici.guests import END, force, guest2, sample
from tests.gguf.kit import load, logits, pair

#: Logits that are closer may be told apart either way: each backend adds in an order of its own.
GAP = 0.01
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
PROMPTS = ["the one in an", "x"]
VOCAB_SIZE = 300
ENDS = (2, 5)
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "(in|an|on) [0-9]{4}[a-c]+"},
    {"choice": ["the one", "the other one", "another"]},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"grammar": 'start: "(" start ")" | /[a-z]+/'},
]


class Program(Controller):
    """A controller that forces, forks, masks, rewinds and waits as a seed decides, in the same order on every
    backend."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_forks = 0

    def next(self, view: SequenceView) -> Decision:
        verb = self.random.choice(["sample", "sample", "mask", "force", "rewind", "fork", "wait"])
        tokens = [self.random.randrange(10, VOCAB_SIZE) for _ in range(self.random.randint(1, 4))]
        if verb == "mask":
            return Decision.fork([Branch(mask=view.mask_of([*tokens, *range(60, 80)]))])
        if verb == "force":
            return Decision.splice(0, tokens)
        if verb == "rewind":
            return Decision.splice(min(2, len(view.generated)), tokens)
        if verb == "fork" and self.num_forks < 2:
            self.num_forks += 1
            return Decision.fork([Branch(), Branch(mask=view.mask_of([*tokens, *range(90, 99)]))])
        return Decision.wait() if verb == "wait" else Decision.sample()


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LLM]]:
    """Yield the same model on three backends, each with a Wasm runtime; the first is plain torch."""
    original, file = pair("llama")
    settings: list[tuple[Path, dict[str, Any]]] = [
        (original, {"kernel": "reference"}),
        (file, {}),
        (file, {"backend": "llamacpp", "dtype": "float32"}),
    ]
    patient = ("--wasm-max-step-time", "5000", "--wasm-max-init-time", "60000")
    made = []
    for number, (model, more) in enumerate(settings):
        store = tmp_path_factory.mktemp(f"store{number}")
        control = ControlSettings("on", args=patient, store=store)
        made.append(LLM(str(model), num_blocks=640, num_threads=1, control=control, **more))
    yield made
    for llm in made:
        llm.close()


@cache
def _original() -> nn.Module:
    return load(pair("llama")[0])


def _tokens(llm: LLM, **steering: Any) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, **steering)
    assert all(one.error is None for output in outputs for one in output.outputs)
    return [[_without_end(list(one.token_ids)) for one in output.outputs] for output in outputs]


def _without_end(tokens: list[int]) -> list[int]:
    """Return the tokens without an end token, since a file may name more end tokens than its checkpoint."""
    return tokens[:-1] if tokens[-1:] and tokens[-1] in ENDS else tokens


def check_same(backends: list[LLM], found: list[list[list[list[int]]]]) -> None:
    """Check that each backend's outputs equal the first one's, up to a token whose logit was nearly equal."""
    for other in found[1:]:
        for prompt, want, have in zip(PROMPTS, found[0], other, strict=True):
            before = backends[0].tokenizer.encode(prompt)
            differing = [(a, b) for a, b in zip(want, have, strict=False) if a != b]
            assert len(want) == len(have) or differing
            for ours, theirs in differing:
                at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
                assert at is not None, (ours, theirs)
                row = logits(_original(), [*before, *ours[:at]])[-1]
                assert abs(float(row[ours[at]] - row[theirs[at]])) < GAP, (ours, theirs, at)


@pytest.mark.parametrize("seed", range(12))
def test_python_controllers_run_on_llama_cpp(seed: int, backends: list[LLM]) -> None:
    found = [_tokens(llm, controller=[Program(seed), Program(seed + 100)]) for llm in backends]
    assert all(output for outputs in found[0] for output in outputs)
    check_same(backends, found)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda each: next(iter(each)))
def test_constraints_hold_on_llama_cpp(constraint: dict[str, Any], backends: list[LLM]) -> None:
    found = [_tokens(llm, constraint=constraint) for llm in backends]
    free = _tokens(backends[0])
    assert found[0] != free
    check_same(backends, found)


def test_wasm_controllers_run_on_llama_cpp(backends: list[LLM]) -> None:
    allowed = list(range(40, 120))
    steps: list[Any] = [
        sample(allowed, VOCAB_SIZE),
        force([70, 71, 72]),
        sample(allowed, VOCAB_SIZE),
        force([80], backtrack=2),
        sample(range(50, 60), VOCAB_SIZE),
        sample(allowed, VOCAB_SIZE),
        END,
    ]
    wasm = guest2(steps)
    found = []
    for llm in backends:
        module = llm.upload(wasm)
        found.append(_tokens(llm, controller=[WasmController(module), WasmController(module)]))
    assert all(80 in output for outputs in found[0] for output in outputs)
    check_same(backends, found)


def test_more_options_than_llama_cpp_has_sequences_are_scored(backends: list[LLM]) -> None:
    letters = "abcdefghijklmnopqrs"
    options = [f"{one}{two}{three}" for one in letters for two in letters for three in "tu"]  # 361 forks
    decided = [llm.decide(PROMPTS[0], options) for llm in backends]
    for other in decided[1:]:
        assert other.probabilities == pytest.approx(decided[0].probabilities, abs=1e-3)
