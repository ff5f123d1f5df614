"""Tests of prefixes that a group of users shares: each user reads the shared blocks and their own blocks, but no other
user's blocks."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given

from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.request import Request, Retention, SharedPrefix
from bridle.engine.sequence import Sequence
from bridle.kv_store import forget_tenant
from tests.engine.random_labs import SEED
from tests.engine.store_lab import BLOCK, StoreLab, num_cached, prompt_of
from tests.engine.support import Replay, make_request, make_sequence

USERS = {"ann": "red", "bob": "red", "eve": "blue", "sue": ""}


def shared(group: str, num_blocks: int) -> SharedPrefix:
    return SharedPrefix(group, "ann" if group == "red" else "eve", num_blocks * BLOCK)


def check_tokens(lab: StoreLab, request: Request, replay: Replay) -> None:
    assert replay.first.tokens == lab.reference(request)[()].tokens


def num_readable(request: Request, earlier: list[tuple[Request, list[int]]]) -> int:
    """Return the number of prompt tokens that a request may read from the cache, after these requests with these
    tokens."""
    found = 0
    for other, tokens in earlier:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(request.prompt, tokens, strict=False)))
        one, two = request.shared, other.shared
        own = common // BLOCK if (request.tenant, request.salt) == (other.tenant, other.salt) else 0
        if one is not None and two is not None and one.num_tokens != two.num_tokens:
            own = 0  # their own blocks follow others
        both = min(one.num_tokens, two.num_tokens, common) // BLOCK if one and two and one.group == two.group else 0
        found = max(found, own, both)
    return min(found, (len(request.prompt) - 1) // BLOCK) * BLOCK


def compute_all(blocks: BlockManager, seq: Sequence) -> None:
    blocks.allocate(seq, len(seq.tokens))
    seq.kv.num_computed = len(seq.tokens)
    blocks.publish(seq)


def a_request(random: Random) -> Request:
    user = random.choice(list(USERS))
    prompt = [*prompt_of(random.randrange(2), random.choice([9, 16, 22])), *random.choices(range(3), k=8)]
    prefix = shared(USERS[user], random.randint(0, 4)) if USERS[user] else None
    retains = (Retention(random.randint(4, 20), 60.0),) if random.random() < 0.5 else ()
    parks = random.random() < 0.5
    return make_request(prompt, tenant=user, shared=prefix, retains=retains, parks=parks, max_tokens=6, temperature=0.0)


@given(seed=SEED)
def test_users_read_what_they_share_and_their_own_alone(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    random, lab = Random(seed), StoreLab(tmp_path_factory.mktemp("kv"), num_blocks=500)
    earlier: list[tuple[Request, list[int]]] = []
    for _ in range(10):
        request = a_request(random)
        (replay,) = lab.run(request)
        check_tokens(lab, request, replay)
        assert num_cached(replay) == num_readable(request, earlier)
        earlier.append((request, [*request.prompt, *replay.first.tokens[:-1]]))
        if random.random() < 0.3:
            lab.engine.close()
            lab = StoreLab(lab.folder, num_blocks=500)
    lab.engine.close()


@given(seed=SEED)
def test_a_cramped_or_recurrent_model_reads_nothing_else_either(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    random = Random(seed)
    options = {"num_states": random.choice([0, 6]), "park_memory": random.choice([0, 8, 40])}
    lab = StoreLab(tmp_path_factory.mktemp("kv"), **options)
    earlier: list[tuple[Request, list[int]]] = []
    for _ in range(5):
        requests = [a_request(random) for _ in range(3)]
        replays = lab.run(*requests)
        earlier += [
            (request, [*request.prompt, *replay.first.tokens[:-1]])
            for request, replay in zip(requests, replays, strict=True)
        ]
        for request, replay in zip(requests, replays, strict=True):
            check_tokens(lab, request, replay)
            others = [each for each in earlier if each[0] is not request]
            assert num_cached(replay) <= num_readable(request, others)
    lab.engine.close()


def test_tokens_that_were_rewound_to_are_not_shared() -> None:
    """A user rolls back into the shared blocks, and writes other tokens there."""
    blocks = BlockManager(32, BLOCK)
    prompt, prefix = [*prompt_of(1, 12), 1], shared("red", 3)
    seq = make_sequence(1, prompt, tenant="ann", shared=prefix)
    compute_all(blocks, seq)
    assert blocks.match_prefix(make_sequence(2, prompt, tenant="bob", shared=prefix)) == 12
    seq.truncate(6)
    blocks.truncate(seq)
    secret = [*prompt[:6], 9, 9, *prompt[8:], 1]
    seq.tokens.extend(secret[6:])
    compute_all(blocks, seq)
    guess = make_sequence(3, secret, tenant="bob", shared=prefix)
    assert blocks.match_prefix(guess) == 4  # up to where the tokens are the shared ones
    assert blocks.match_prefix(make_sequence(4, secret, tenant="eve")) == 0
    blocks.check_integrity([seq])


def test_a_fork_continues_the_chains_of_its_parent() -> None:
    blocks, prefix = BlockManager(32, BLOCK), shared("red", 2)
    parent = make_sequence(1, prompt_of(1, 8), tenant="ann", shared=prefix)
    compute_all(blocks, parent)
    child = parent.fork(2, 1, 0)
    blocks.fork(parent, child)
    child.tokens.extend([7] * BLOCK)
    compute_all(blocks, child)
    prompt = [*prompt_of(1, 8), *[7] * BLOCK, 1]
    assert blocks.match_prefix(make_sequence(3, prompt, tenant="ann", shared=prefix)) == 12
    assert blocks.match_prefix(make_sequence(4, prompt, tenant="bob", shared=prefix)) == 8
    blocks.check_integrity([parent, child])


def test_blocks_stay_until_the_last_user_gives_them_up() -> None:
    blocks = BlockManager(8, BLOCK, max_parked=8, park_seconds=10.0)
    prefix = shared("red", 2)
    for number, user in enumerate(("ann", "bob")):
        seq = make_sequence(number, [*prompt_of(1, 8), number], tenant=user, shared=prefix, id=user)
        if blocks.admit(seq):
            compute_all(blocks, seq)
        blocks.park(seq, 0.0)
        blocks.free(seq)
        blocks.check_integrity([])
    assert blocks.parking.num_blocks == 2
    blocks.parking.release("ann")
    blocks.check_integrity([])
    assert blocks.parking.num_blocks == 2
    blocks.parking.release("bob")
    assert blocks.parking.num_blocks == 0


@pytest.mark.parametrize("num_states", [0, 8])
def test_shared_blocks_are_forgotten_with_their_owner(tmp_path: Path, num_states: int) -> None:
    prefix = shared("red", 5)
    lab = StoreLab(tmp_path, num_blocks=64, num_states=num_states)
    prompt = prompt_of(1, 21)
    lab.run_one(prompt, tenant="bob", shared=prefix, max_tokens=1)
    lab = lab.restart()
    assert num_cached(lab.run_one(prompt, tenant="bob", shared=prefix, max_tokens=1)) == 20
    lab = lab.restart()
    lab.engine.close()
    assert forget_tenant(tmp_path, "bob") == 0
    assert forget_tenant(tmp_path, "ann") == 5 + (num_states > 0)
