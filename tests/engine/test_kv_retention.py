"""Tests of retained KV: a continued conversation computes only its new tokens, even with a full KV cache. Running
requests have priority."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.engine import AsyncEngine
from bridle.engine.engine import Engine
from bridle.engine.kv.kv_retention import MAX_OF_USER, KVRetention
from bridle.engine.request import Request, Retention
from bridle.errors import InvalidRequest, ShardUnavailable
from bridle.outputs import FinishReason
from bridle.testing.scripted import ScriptedExecutor
from tests.engine.random_labs import SEED, random_lab, random_request
from tests.engine.support import Lab, Replay, check_against_reference, make_request

BLOCK = 4


def a_lab(num_blocks: int = 64, **options: Any) -> Lab:
    return Lab(num_blocks=num_blocks, block_size=BLOCK, vocab_size=50, **options)


def said(lab: Lab, prompt: list[int], num_tokens: int = 5, **fields: object) -> tuple[list[int], Request]:
    """Return all tokens of a conversation after an answer that ends with an end token."""

    def enough(tokens: Sequence[int], num_prompt: int) -> str | None:
        return "enough" if len(tokens) - num_prompt >= num_tokens else None

    request = make_request(prompt, **{"max_tokens": 99, "parks": True, "stopping": (enough,), **fields})
    (got,) = lab.run(request)
    assert got.first.reason is FinishReason.STOP, got.first.reason
    return [*prompt, *got.first.tokens], request


def flood(lab: Lab, num_tokens: int, tenant: str = "others") -> None:
    """Fill the KV cache with the prompts of another user."""
    length = 10 * BLOCK
    for i in range(-(-num_tokens // length)):
        lab.run(make_request([i % 50, i // 50 % 50, *range(2, length)], tenant=tenant, max_tokens=1))


def go_on(lab: Lab, tokens: list[int], **fields: object) -> Replay:
    return lab.run(make_request([*tokens, 1, 2, 3], max_tokens=2, **fields))[0]


def computed_again(replay: Replay, tokens: list[int]) -> int:
    """Return the number of earlier tokens that the next prompt had to compute again."""
    return len(tokens) - replay.first.usage.cached_tokens


@pytest.mark.parametrize("parks", [False, True])
def test_a_full_cache_costs_a_parked_conversation_no_more_than_a_block(parks: bool) -> None:
    lab = a_lab()
    tokens, _ = said(lab, list(range(30)), parks=parks)
    flood(lab, 4 * 64 * BLOCK)
    again = computed_again(go_on(lab, tokens), tokens)
    assert again <= BLOCK if parks else again == len(tokens)


@given(length=st.integers(1, 60), answer=st.integers(1, 9), filling=st.integers(0, 600))
def test_what_goes_on_computes_at_most_one_block_again(length: int, answer: int, filling: int) -> None:
    lab = a_lab(park_memory=64 * BLOCK)
    tokens, _ = said(lab, [i * i % 50 for i in range(length)], answer)
    flood(lab, filling)
    replay = go_on(lab, tokens)
    assert computed_again(replay, tokens) <= BLOCK
    statistics = lab.engine.statistics()
    assert statistics.num_park_hits == (len(tokens) > BLOCK)
    assert statistics.num_parked == statistics.num_parked_blocks == 0  # it was gone on from


def test_time_ends_it_and_an_engine_without_work_notices() -> None:
    lab = a_lab(park_seconds=5.0)
    said(lab, list(range(30)))
    lab.clock.advance(4.0)
    assert lab.engine.expire_retained_kv() is not None
    assert lab.engine.statistics().num_parked == 1
    lab.clock.advance(4.0)
    assert lab.engine.expire_retained_kv() is None
    statistics = lab.engine.statistics()
    assert (statistics.num_parked, statistics.num_parked_blocks, statistics.num_parks_expired) == (0, 0, 1)
    lab.engine.check_integrity()


def test_a_continuation_that_waits_for_its_turn_is_waited_for() -> None:
    lab = a_lab(park_seconds=5.0, max_num_seqs=1)
    tokens, _ = said(lab, list(range(30)))
    lab.clock.advance(4.0)
    lab.engine.add(make_request([7] * 20, max_tokens=4, ignore_eos=True, tenant="other"))
    lab.step()
    late = make_request([*tokens, 1, 2], max_tokens=1)
    lab.engine.add(late)
    lab.clock.advance(4.0)
    lab.step()
    assert lab.engine.statistics().num_parked == 1
    assert computed_again(lab.drain()[late.id], tokens) <= BLOCK


def test_only_outputs_that_end_by_themselves_park() -> None:
    lab = a_lab()
    cut, stays = make_request([5] * 20, parks=True, max_tokens=3, ignore_eos=True), make_request([6] * 20, parks=True)
    lab.engine.add(cut)
    lab.engine.add(stays)
    lab.step()
    lab.engine.cancel(stays.id)
    lab.drain()
    assert lab.engine.statistics().num_parked == 0


def test_the_front_end_can_let_go_of_it() -> None:
    lab = a_lab()
    tokens, request = said(lab, list(range(30)))
    other, _ = said(lab, list(range(20, 50)))
    lab.engine.release_retained_kv(request.id)
    lab.engine.release_retained_kv("unknown")
    assert lab.engine.statistics().num_parked == 1
    flood(lab, 4 * 64 * BLOCK)
    assert computed_again(go_on(lab, tokens), tokens) == len(tokens)
    assert computed_again(go_on(lab, other), other) <= BLOCK


def test_other_tenants_neither_find_nor_end_it() -> None:
    lab = a_lab()
    tokens, _ = said(lab, list(range(30)), tenant="alice")
    assert go_on(lab, tokens, tenant="bob").first.usage.cached_tokens == 0
    assert go_on(lab, tokens, tenant="alice", adapter="a").first.usage.cached_tokens == 0
    assert lab.engine.statistics().num_parked == 1


def test_the_device_takes_it_along_and_it_is_computed_again() -> None:
    lab = a_lab(faults={8: ShardUnavailable("lost")})
    tokens, _ = said(lab, list(range(30)))
    while lab.engine.statistics().num_failed_steps == 0:
        go_on(lab, [9] * 9, tenant="other")
    assert lab.engine.statistics().num_parked == 0
    assert go_on(lab, tokens).first.usage.cached_tokens == 0


def test_running_requests_take_parked_blocks_from_whoever_has_most() -> None:
    lab = a_lab(num_blocks=40, park_memory=40 * BLOCK)
    kept, _ = said(lab, list(range(20)), tenant="small")
    first, _ = said(lab, list(range(40)), tenant="big")
    second, _ = said(lab, list(range(10, 50)), tenant="big")
    (long,) = lab.run(make_request([3] * (18 * BLOCK), max_tokens=4, ignore_eos=True, tenant="third"))
    assert long.first.reason is FinishReason.LENGTH
    assert lab.engine.statistics().num_preemptions == 0
    assert lab.engine.statistics().num_parks_given_way == 1  # the oldest one of the biggest
    assert computed_again(go_on(lab, kept, tenant="small"), kept) <= BLOCK
    assert computed_again(go_on(lab, second, tenant="big"), second) <= BLOCK
    again = computed_again(go_on(lab, first, tenant="big"), first)
    assert BLOCK < again < len(first)  # from the end, so that what is left is of use


def test_one_request_as_large_as_the_cache_runs() -> None:
    lab = a_lab(num_blocks=32, park_memory=1 << 20)
    for user in range(6):
        said(lab, [user] * 20, tenant=str(user))
    (all_of_it,) = lab.run(make_request([3] * (31 * BLOCK), max_tokens=4, ignore_eos=True))
    assert len(all_of_it.first.tokens) == 4
    assert lab.engine.statistics().num_parked == 0


@pytest.mark.parametrize("options", [{"park_memory": 0}, {"park_seconds": 0.0}, {"enable_prefix_caching": False}])
def test_it_can_be_switched_off(options: dict[str, Any]) -> None:
    lab = a_lab(**options)
    said(lab, list(range(30)))
    assert lab.engine.statistics().num_parked == 0


def test_the_budget_holds_and_is_a_quarter_by_default() -> None:
    for memory, most in ((None, 16), (7 * BLOCK, 7), (7 * BLOCK + 1, 7), (1 << 40, 63)):
        lab = a_lab(park_memory=memory)
        for i in range(9):
            said(lab, [i] * 38, tenant=str(i % 3))
            assert 0 < lab.engine.statistics().num_parked_blocks <= most
        assert lab.engine.statistics().num_parked_blocks == most


def test_bad_settings_are_refused() -> None:
    for setting in ({"park_memory": -1}, {"park_seconds": -0.1}, {"park_seconds": float("nan")}):
        with pytest.raises(InvalidRequest, match=next(iter(setting))):
            EngineConfig(**setting)


def test_removed_adapters_leave_nothing_parked() -> None:
    parking, held = a_parking(8)
    parking.park("u", ("r", 0), "adapter", [b"1", b"2"], 0.0)
    parking.park("u", ("s", 0), None, [b"3"], 0.0)
    assert parking.expire(1.0, lambda adapter: adapter != "adapter") == 10.0
    assert held == {b"3"}


# -- properties ------------------------------------------------------------------------------------------------------


@given(seed=SEED)
def test_parking_changes_no_output_and_refuses_nothing(seed: int) -> None:
    """Random conversations are retained, continued, released and expire, in small block pools. Each output equals that
    of the reference."""
    random = Random(seed)
    lab = random_lab(random, "paged", park_memory=random.choice([None, 8, 40, 1 << 20]), park_seconds=0.3)
    requests: list[Request] = []
    for _ in range(random.randint(2, 8)):
        begun = random.choice(requests) if requests and random.random() < 0.6 else None
        fields: dict[str, Any] = {"parks": random.random() < 0.8}
        request = random_request(random, **fields)
        if begun is not None:
            longer = (*begun.prompt, *(random.randrange(10) for _ in range(random.randint(1, 5))))
            request = make_request(longer[:30], tenant=begun.tenant, max_tokens=5, **fields)
        requests.append(request)
        lab.engine.add(request)
        for _ in range(random.choice([0, 1, 5, 30])):
            if lab.engine.has_work:
                lab.step()
        if random.random() < 0.3:
            lab.engine.release_retained_kv(random.choice(requests).id)
            lab.engine.check_integrity()
        if random.random() < 0.2:
            lab.clock.advance(0.2)
    replays = lab.drain()
    for request in requests:
        check_against_reference(lab, request, replays[request.id])
    lab.engine.end_parking()
    lab.engine.check_integrity()
    assert lab.engine.statistics().num_parked_blocks == 0


def a_parking(max_blocks: int) -> tuple[KVRetention, set[bytes]]:
    held: set[bytes] = set()
    return KVRetention(max_blocks, 10.0, held.add, held.remove), held


@given(st.data())
def test_nobody_parks_more_than_others_while_there_is_too_little(data: st.DataObject) -> None:
    parking, held = a_parking(data.draw(st.integers(1, 20)))
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=25))
    wanted: Counter[int] = Counter()
    for number, (user, length) in enumerate(lengths):
        digests = [f"{user} {number} {i}".encode() for i in range(length)]
        parking.park(str(user), (str(number), 0), None, digests, float(number) / 10)
        wanted[user] += length
        parking.check_integrity()
        assert len(held) == parking.num_blocks <= parking.max_blocks
    have = Counter(int(digest.split()[0]) for digest in held)
    assert sum(have.values()) == min(sum(wanted.values()), parking.max_blocks)
    most = max(have.values(), default=0)
    for user, count in wanted.items():
        assert have[user] >= min(count, most - 1)


def test_one_user_parks_a_bounded_number() -> None:
    parking, held = a_parking(1 << 20)
    for number in range(MAX_OF_USER + 5):
        parking.park("u", (str(number), 0), None, [str(number).encode()], 0.0)
    assert len(parking) == len(held) == MAX_OF_USER
    assert b"4" not in held and b"5" in held


def test_draining_lets_go_and_parks_nothing_more() -> None:
    executor = ScriptedExecutor(num_blocks=64, block_size=BLOCK, vocab_size=50)
    engine = Engine(executor, EngineConfig())

    async def run() -> None:
        client = AsyncEngine(engine).start()
        stops = range(50)
        async for _ in client.submit(make_request(range(30), parks=True, stop_token_ids=stops, max_tokens=4)):
            pass
        assert client.statistics().num_parked == 1
        await asyncio.to_thread(client.close, 1.0)
        assert client.statistics().num_parked == 0

    asyncio.run(run())


# -- what clients ask for --------------------------------------------------------------------------------------------


def retained(lab: Lab, prompt: list[int], *wishes: Retention, **fields: object) -> int:
    """Return the number of tokens that a request with these settings retains."""
    (got,) = lab.run(make_request(prompt, retains=wishes, max_tokens=2, ignore_eos=True, **fields))
    return got.first.usage.retained_tokens


def test_a_retained_prefix_outlives_its_use_and_ends_with_its_time() -> None:
    lab = a_lab()
    prompt = list(range(30))
    assert retained(lab, prompt, Retention(22, 60.0)) == 20
    for _ in range(2):
        flood(lab, 4 * 64 * BLOCK)
        lab.clock.advance(40.0)  # each use begins its time anew
        assert go_on(lab, prompt).first.usage.cached_tokens == 20
    lab.clock.advance(61.0)
    assert lab.engine.expire_retained_kv() is None
    assert lab.engine.statistics().num_parked_blocks == 0


def test_no_use_prolongs_a_named_prefix_and_its_name_releases_it() -> None:
    lab = a_lab()
    prompt, wish = list(range(30)), Retention(99, 60.0, "cache")
    assert retained(lab, prompt, wish) == 28
    assert retained(lab, list(range(10, 40)), wish) == 28  # in place of the first
    assert lab.engine.statistics().num_parked == lab.engine.statistics().num_retained == 1
    lab.clock.advance(40.0)
    go_on(lab, list(range(10, 40)))
    lab.clock.advance(21.0)
    assert lab.engine.expire_retained_kv() is None
    retained(lab, prompt, wish)
    lab.engine.release_retained_kv("cache")
    assert lab.engine.statistics().num_retained == 0


def test_a_cancelled_request_retains_what_it_has_computed() -> None:
    lab = a_lab()
    request = make_request(list(range(30)), retains=(Retention(30, 60.0),), max_tokens=20, ignore_eos=True)
    lab.engine.add(request)
    lab.step()
    lab.step()
    lab.engine.cancel(request.id)
    lab.drain()
    assert lab.engine.statistics().num_retained == 1


def test_who_retains_too_much_loses_their_own_first() -> None:
    lab = a_lab(num_blocks=64, park_memory=64 * BLOCK, max_retained=2, max_retained_tokens=10 * BLOCK)
    assert retained(lab, [1] * 20, Retention(99, 60.0), tenant="small") == 20
    for number in range(4):
        assert retained(lab, [number + 2] * 24, Retention(99, 60.0 + number), tenant="big") == 24
    statistics = lab.engine.statistics()
    assert (statistics.num_retained, statistics.num_parked_blocks) == (3, 5 + 10)
    assert retained(lab, [9] * 60, Retention(99, 99.0), tenant="big") == 10 * BLOCK
    flood(lab, 4 * 64 * BLOCK)
    assert go_on(lab, [1] * 20, tenant="small").first.usage.cached_tokens == 20


@given(st.data())
def test_budgets_and_counts_hold_whatever_is_asked(data: st.DataObject) -> None:
    held: set[bytes] = set()
    most, most_blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    parking = KVRetention(20, 10.0, held.add, held.remove, most, most_blocks)
    draw, now = data.draw, 0.0
    for number in range(draw(st.integers(0, 30))):
        user, chain = draw(st.sampled_from("ab")), draw(st.integers(0, 3))
        digests = [f"{user} {chain} {i}".encode() for i in range(draw(st.integers(1, 8)))]
        now += draw(st.floats(0, 5))
        name = draw(st.sampled_from(["", "", "x"])) and f"x {user}"
        wish = Retention(99, draw(st.floats(1, 20)), name)
        match draw(st.integers(0, 5)):
            case 0:
                parking.park(user, (str(number), 0), None, digests, now)
            case 1 | 2:
                kept = parking.retain(user, None, digests, wish, now)
                assert set(digests[:kept]) <= held
            case 3:
                parking.renew(user, digests, now)
            case 4:
                parking.claim(user, digests)
            case _:
                until = parking.expire(now)
                assert until is None or until > now
        parking.check_integrity()
        assert held == parking.digests()
        for each in parking.users.values():
            stays = [entry for entry in each.parked.values() if entry.stays]
            assert len(stays) <= most
            assert len({digest for entry in stays for digest in entry.digests}) <= most_blocks
