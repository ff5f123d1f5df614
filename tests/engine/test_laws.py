"""The engine's laws: an output depends on its request alone, and on every byte of it.

Random requests with random programs, on both ways of keeping KV, with small pools, small budgets, late controllers
and neighbors that come, go and fail: each must give exactly what the naive oracle computes from the token list.
"""

from __future__ import annotations

from random import Random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.request import Request
from bridle.testing.controllers import FakeController
from bridle.testing.text import PieceDecoder
from tests.engine.programs import VOCAB, RandomProgram
from tests.engine.support import Lab, check_against_reference, make_request, replay

KV = st.sampled_from(["paged", "sequences"])
Keeping = Literal["paged", "sequences"]
# Pieces of several characters, of parts of characters, and none.
PIECES = ["a", "b", "ab", "ba", " ", "", b"\xc3", b"\xa9", "ccc", "d", "e", "abc", b"\xe2\x82", b"\xac", "x", "."]


def random_request(random: Random, delays: tuple[float, ...] = (0.0,)) -> Request:
    """A request with a prompt that others are likely to share, and most parameters off their defaults sometimes."""
    prompt = [(i * 7) % 5 for i in range(random.randint(1, 14))] + [random.randrange(VOCAB)]
    controller = None
    if random.random() < 0.7:
        controller = FakeController(RandomProgram(random.randrange(1 << 30), delays=delays))
    return make_request(
        prompt,
        controller=controller,
        adapter=random.choice([None, None, None, "a"]),
        tenant=random.choice(["", "", "t"]),
        priority=random.choice([0, 0, -1]),
        n=random.choice([1, 1, 1, 2, 3]),
        max_tokens=random.choice([1, 4, 9, 14]),
        min_tokens=random.choice([0, 0, 1]),
        temperature=random.choice([0.0, 1.0, 1.0]),
        top_p=random.choice([1.0, 0.8]),
        top_k=random.choice([0, 5]),
        repetition_penalty=random.choice([1.0, 1.0, 1.5]),
        frequency_penalty=random.choice([0.0, 0.0, 0.7]),
        logit_bias=random.choice([{}, {3: 2.0}]),
        seed=random.choice([0, 1, None, 12345]),
        stop=random.choice([(), (), ("abc",), ("ca", "d e", "é")]),
        include_stop_str_in_output=random.choice([False, True]),
        stop_token_ids=random.choice([(), (11,)]),
        ignore_eos=random.choice([False, True]),
        logprobs=random.choice([None, None, 0, 2]),
        logprobs_mode=random.choice(["raw", "processed"]),
        prompt_logprobs=random.choice([None, None, None, 1]),
    )


@given(st.randoms(use_true_random=False), KV)
def test_outputs_are_those_of_the_oracle(random: Random, kv: Keeping) -> None:
    delays = random.choice([(0.0,), (0.0, 0.01, 0.03), (0.0, 0.0, 0.2)])
    lab = Lab(
        kv=kv,
        vocab_size=VOCAB,
        num_blocks=random.randint(8, 60),
        block_size=4,
        eos_token_ids=(13,),
        decoder=PieceDecoder(PIECES),
        device_time=lambda plan: 0.01,
        max_num_batched_tokens=random.randint(1, 40),
        max_num_seqs=random.randint(1, 12),
        enable_prefix_caching=random.random() < 0.8,
        max_forks=100_000,
    )
    requests = [random_request(random, delays) for _ in range(random.randint(1, 6))]
    arriving = list(requests)
    while arriving:
        if random.random() < 0.4:
            lab.engine.add(arriving.pop(0))
        lab.step()
    replays = lab.drain()
    for request in requests:
        check_against_reference(lab, request, replays[request.id])
