"""Runs an engine over real checkpoints, and compares its tokens with transformers' choices."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM

from bridle.config import EngineConfig, ModelConfig
from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.engine import Branch, Decision, Engine, Request, Splice
from bridle.engine.interfaces import Executor
from bridle.model.loading import load_executor
from bridle.outputs import Event, Finished, FinishReason, Forked, Rewind, TokenEvent
from bridle.sampling import SamplingParams

GAP = 1e-4
MAX_STEPS = 3_000
Draw = tuple[tuple[int, ...], int, "frozenset[int] | None"]  # tokens before it, the token, what was allowed


class Wanderer(Controller):
    """A controller that masks, forces, rewinds, forks and waits at random. All copies share `draws`: each sampled token
    with the tokens before it."""

    draws: ClassVar[list[Draw]] = []

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.allowed: frozenset[int] | None = None
        self.before: tuple[int, ...] = ()
        self.branch_sets: list[frozenset[int] | None] = []

    def fork(self, branch: int) -> Controller:
        twin = Wanderer(self.random.randrange(1 << 30) + branch)
        twin.before = self.before
        sets = self.branch_sets or [self.allowed]  # a request for n outputs repeats the branches n times
        twin.allowed = sets[branch % len(sets)]
        return twin

    def next(self, view: SequenceView) -> Decision:
        if view.sampled is not None:
            self.draws.append((self.before, view.sampled, self.allowed))
        self.allowed, self.branch_sets = None, []
        self.before = tuple(view.tokens)
        return self._choose(view)

    def _choose(self, view: SequenceView) -> Decision:
        some = self._some_tokens(view)
        match self.random.randrange(10):
            case 0:
                return Decision.splice(0, some)
            case 1:
                return Decision.splice(self.random.randrange(min(len(view.generated), 9) + 1), some)
            case 2:
                return Decision.wait()
            case 3:
                self.allowed = frozenset(some)
                return Decision.sample(view.mask_of(some))
            case 4:
                splice = Splice(self.random.randrange(min(len(view.generated), 5) + 1), tuple(some))
                return Decision.sample(splices=[splice])
            case 5:
                self.branch_sets = [None, frozenset(some), frozenset(self._some_tokens(view))]
                masks = [None if each is None else view.mask_of(each) for each in self.branch_sets]
                return Decision.fork([Branch(mask=mask) for mask in masks])
        return Decision.sample()

    def _some_tokens(self, view: SequenceView) -> list[int]:
        return [self.random.randrange(3, view.vocab_size) for _ in range(self.random.randint(1, 7))]


class Oracle:
    """transformers' own model with eager attention in float32. Two logits whose difference is below `gap` count as
    equal."""

    def __init__(self, path: Path, gap: float = GAP) -> None:
        self._gap = gap
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits [L, V] of all tokens in one pass."""
        return self._model(torch.tensor([tokens]), use_cache=False).logits[0]  # type: ignore[no-any-return]

    def check(self, logits: torch.Tensor, token: int, allowed: frozenset[int] | None = None) -> None:
        """Check that `token` has the largest logit of a row [V]. Logits that are nearly equal to the largest count as
        equal."""
        if allowed is not None:
            kept = torch.full_like(logits, float("-inf"))
            ids = list(allowed)
            kept[ids] = logits[ids]
            logits = kept
        best = logits.max().item()
        assert best - logits[token].item() <= self._gap, f"drew {token}, the oracle prefers {int(logits.argmax())}"


def outputs_of(events: list[Event]) -> dict[int, list[int]]:
    """Return the tokens of each output after rollbacks and forks."""
    outputs: dict[int, list[int]] = {0: []}
    for event in events:
        match event:
            case TokenEvent():
                outputs[event.index].append(event.token)
            case Rewind(num_tokens=n):
                del outputs[event.index][len(outputs[event.index]) - n :]
            case Forked():
                outputs[event.index] = outputs[event.parent][: event.num_tokens]
    return outputs


def run(
    path: Path,
    rng: random.Random,
    vocab_size: int,
    load: Callable[[ModelConfig], Executor] = load_executor,
) -> tuple[list[Request], dict[str, list[Event]]]:
    """Run a random mix of requests with a KV pool that is too small for all of them."""
    block_size = rng.choice([2, 4, 16])
    num_blocks = -(-rng.choice([96, 160]) // block_size)
    Wanderer.draws = []
    executor = load(ModelConfig(str(path), dtype="float32", num_blocks=num_blocks, block_size=block_size))
    config = EngineConfig(
        max_num_batched_tokens=rng.choice([3, 7, 64]),
        max_num_seqs=rng.choice([2, 5, 32]),
        enable_prefix_caching=rng.random() < 0.8,
    )
    engine = Engine(executor, config, pools=[PythonControllerPool(vocab_size)])
    common = [rng.randrange(3, vocab_size) for _ in range(30)]
    requests = []
    for number in range(5):
        prompt = (*common[: rng.randrange(31)], *(rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 12))))
        controller = Wanderer(rng.randrange(1 << 30)) if number % 2 else None
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 20), temperature=0, ignore_eos=True, n=rng.choice([1, 1, 2])
        )
        requests.append(Request(str(number), prompt, sampling, controller=controller))
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    pending = requests.copy()
    for _ in range(MAX_STEPS):
        if pending and rng.random() < 0.5:
            engine.add(pending.pop(0))
        if not (pending or engine.has_work):
            break
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check_integrity()
    assert not engine.has_work
    engine.close()
    return requests, events


def check_run(oracle: Oracle, requests: list[Request], events: dict[str, list[Event]]) -> None:
    """Check that transformers' model prefers every token that the engine sampled."""
    for request in requests:
        ends = [event for event in events[request.id] if isinstance(event, Finished)]
        for end in ends:  # the only error a program can run into is one fork too many
            assert end.reason is FinishReason.LENGTH or "the fork makes" in str(end.error)
        if request.controller is None:
            for generated in outputs_of(events[request.id]).values():
                rows = oracle.logits([*request.prompt, *generated])
                for i, token in enumerate(generated, len(request.prompt)):
                    oracle.check(rows[i - 1], token)
    assert any(request.controller for request in requests)
    for before, token, allowed in Wanderer.draws:
        oracle.check(oracle.logits(list(before))[-1], token, allowed)


_oracles: dict[str, Oracle] = {}


def _oracle(family: str, path: Path) -> Oracle:
    if family not in _oracles:
        _oracles[family] = Oracle(path)
    return _oracles[family]
