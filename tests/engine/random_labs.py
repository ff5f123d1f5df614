"""Random labs and random requests for property tests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.engine.request import Request
from bridle.engine.sequence import Sequence
from bridle.engine.spec_decode.draft_model import DraftModelProposer
from bridle.outputs import Event
from bridle.testing.async_executor import LateScriptedExecutor
from bridle.testing.scripted import ScriptedExecutor
from bridle.testing.text import PieceDecoder
from tests.engine.programs import VOCAB, RandomProgram
from tests.engine.support import Lab, Replay, make_request, scheduler_of
from tests.fakes.controller_runtime import FakeController


class LateLab(Lab):
    """A lab whose device answers late."""

    Scripted = LateScriptedExecutor

    @property
    def device(self) -> LateScriptedExecutor:
        assert isinstance(self.executor, LateScriptedExecutor)
        return self.executor


SEED = st.integers(0, 1 << 40)
KEEPINGS = pytest.mark.parametrize("kv", ["paged", "sequences"])
#: Devices that answer at once, and late: steps are then launched before the tokens of the one before are there.
LABS = pytest.mark.parametrize("kind", [Lab, LateLab], ids=["at once", "late"])
# Pieces of several characters, of parts of characters, and none.
PIECES = ["a", "b", "ab", "ba", " ", "", b"\xc3", b"\xa9", "ccc", "d", "e", "abc", b"\xe2\x82", b"\xac", "x", "."]
ON_TIME = (0.0,)
LATE = (0.0, 0.01, 0.03, 0.2)


def random_request(random: Random, delays: tuple[float, ...] = ON_TIME, **fields: object) -> Request:
    """Return a request whose prompt shares a beginning with others, and whose parameters are often not the defaults."""
    prompt = [(i * 7) % 5 for i in range(random.randint(1, 14))] + [random.randrange(VOCAB)]
    controller = None
    if random.random() < 0.7:
        controller = FakeController(RandomProgram(random.randrange(1 << 30), delays=delays))
    chosen: dict[str, object] = {
        "controller": controller,
        "adapter": random.choice([None, None, None, "a"]),
        "tenant": random.choice(["", "", "t"]),
        "priority": random.choice([0, 0, -1]),
        "n": random.choice([1, 1, 1, 2, 3]),
        "max_tokens": random.choice([1, 4, 9, 14]),
        "min_tokens": random.choice([0, 0, 1]),
        "temperature": random.choice([0.0, 1.0, 1.0]),
        "top_p": random.choice([1.0, 0.8]),
        "top_k": random.choice([0, 5]),
        "min_p": random.choice([0.0, 0.05]),
        "typical_p": random.choice([1.0, 1.0, 0.9]),
        "repetition_penalty": random.choice([1.0, 1.0, 1.5]),
        "presence_penalty": random.choice([0.0, 0.0, 0.5]),
        "frequency_penalty": random.choice([0.0, 0.0, 0.7]),
        "logit_bias": random.choice([{}, {3: 2.0}]),
        "top_n_sigma": random.choice([0.0, 0.0, 1.5]),
        "xtc_probability": random.choice([0.0, 0.0, 0.5]),
        "dynatemp_range": random.choice([0.0, 0.0, 0.5]),
        "mirostat": random.choice([0, 0, 0, 2]),
        "mirostat_tau": random.choice([1.0, 2.0]),
        "dry_multiplier": random.choice([0.0, 0.0, 3.0]),
        "dry_allowed_length": random.choice([1, 2]),
        "dry_breaker_ids": random.choice([(), (2,)]),
        "allowed_token_ids": random.choice([(), (), (0, 1, 2, 4, 5, 7)]),
        "bad_words_ids": random.choice([(), (), ((5,), (1, 4))]),
        "seed": random.choice([0, 1, None, 12345]),
        "stop": random.choice([(), (), ("abc",), ("ca", "d e", "é")]),
        "include_stop_str_in_output": random.choice([False, True]),
        "stop_token_ids": random.choice([(), (11,)]),
        "ignore_eos": random.choice([False, True]),
        "logprobs": random.choice([None, None, 0, 2]),
        "logprobs_mode": random.choice(["raw", "processed"]),
        "prompt_logprobs": random.choice([None, None, None, 1]),
        "speculate": random.choice([None, 0, -1, 1, 5]),
        "trace": len(prompt) % 3 > 0,
    }
    return make_request(prompt, **{**chosen, **fields})


#: Verbs of programs that mostly draw, so that many steps are launched ahead, and some of these in vain.
MOSTLY_DRAWS = "s" * 24 + "mmmbnnffkrxtw"


def calm_request(random: Random, delays: tuple[float, ...] = ON_TIME) -> Request:
    """Return a longer request without draft tokens and prompt scores, which would make steps wait."""
    controller = None
    if random.random() < 0.6:
        controller = FakeController(RandomProgram(random.randrange(1 << 30), MOSTLY_DRAWS, delays))
    return random_request(
        random,
        controller=controller,
        max_tokens=random.choice([4, 14, 18]),
        speculate=random.choice([None, 0]),
        logprobs=random.choice([None, None, 2]),
        prompt_logprobs=None,
        trace=random.random() < 0.3,
    )


def maker(random: Random, kind: type[Lab]) -> Callable[..., Request]:
    """Return a function that makes requests. For a device that answers late, it sometimes calls `calm_request`."""
    return random.choice([calm_request, random_request]) if kind is LateLab else random_request


def random_lab(random: Random, kv: object, make: Callable[..., Lab] = Lab, **options: object) -> Lab:
    """Return a lab whose engine has large limits, or some small ones."""
    chosen: dict[str, object] = {
        "kv": kv,
        "vocab_size": VOCAB,
        "num_blocks": random.choice([9, 14, 30, 90]),
        "block_size": 4,
        "eos_token_ids": (13,),
        "decoder": PieceDecoder(PIECES),
        "device_time": lambda plan: 0.01,
        "max_num_batched_tokens": random.choice([1, 3, 8, 40]),
        "max_num_seqs": random.choice([1, 2, 5, 50]),
        "enable_prefix_caching": random.random() < 0.8,
        "max_forks": 100_000,
    }
    return make(**{**chosen, **options})


def run_staggered(lab: Lab, requests: list[Request], random: Random) -> dict[str, Replay]:
    """Run requests, some of which arrive while others run."""
    arriving = list(requests)
    while arriving:
        if random.random() < 0.4:
            lab.engine.add(arriving.pop(0))
        lab.step()
    return lab.drain()


def essence(replays: dict[str, Replay], requests: list[Request]) -> list[object]:
    """Return the output that clients see, without the parts that caching may change."""
    return [
        sorted(
            (one.path, tuple(one.tokens), one.text, one.reason, tuple(one.logprobs))
            for one in replays[request.id].outputs.values()
        )
        for request in requests
    ]


class DraftedLab(Lab):
    """A lab with a draft model that predicts correctly after a `share` of all texts."""

    def __init__(self, *, share: float = 1.0, draft: dict[str, object] | None = None, **options: object) -> None:
        self.share, self.options = share, draft or {}
        super().__init__(**options)  # type: ignore[arg-type]

    def make_one(self, config: EngineConfig) -> Engine:
        chosen = {"num_blocks": 90, "block_size": 4, "max_num_batched_tokens": 64, **self.options}
        vocab_size = self.executor.info.vocab_size
        self.draft = ScriptedExecutor(vocab_size, next_token=self.guess, clock=self.clock, **chosen)  # type: ignore[arg-type]
        executor = self.connect(self.executor)
        return Engine(executor, config, pools=self.pools, decoder=self.decoder, clock=self.clock, draft=self.draft)

    def guess(self, prefix: tuple[int, ...]) -> Sequence[float]:
        random = Random(repr(prefix))
        is_right = random.random() < self.share
        tokens = prefix if is_right else (random.randrange(self.executor.info.vocab_size), *prefix)
        return [float(value) for value in self.executor.model.row_after(tokens)]

    @property
    def drafter(self) -> DraftModelProposer:
        drafter = scheduler_of(self.engine).speculation.guessing._model
        assert isinstance(drafter, DraftModelProposer)
        return drafter

    def step(self) -> list[Event]:
        events = super().step()
        assert not self.draft.violations, self.draft.violations[0]
        self.drafter.blocks.check_integrity(shadow.own for shadow in self.drafter.shadows.values())
        return events

    def check_empty(self) -> None:
        super().check_empty()
        assert not self.drafter.shadows
        assert self.drafter.blocks.num_free == self.drafter.blocks.num_blocks


def random_draft(random: Random) -> dict[str, object]:
    """Return the options for a draft model with large limits, or with some small ones."""
    return {
        "kv": random.choice(["paged", "sequences"]),
        "num_blocks": random.choice([2, 7, 90]),
        "block_size": random.choice([1, 4, 8]),
        "max_num_batched_tokens": random.choice([1, 5, 64]),
        "max_num_seqs": random.choice([1, 3, 64]),
    }


def guess(random: Random, truth: list[int]) -> tuple[int, ...]:
    """Return a prediction of the output that is fully correct, or has some tokens changed, removed or added."""
    told: list[int] = []
    error_rate = random.choice([0.0, 0.1, 0.5])
    for token in truth:
        if random.random() >= error_rate:
            told.append(token)
        elif random.random() < 0.5:
            told += [random.randrange(16), token]
    return tuple(told)
