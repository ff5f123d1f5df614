"""Tests that a continued conversation goes to the replica with its retained KV."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bridle.config import EngineConfig
from bridle.distributed.session_affinity import SessionAffinity
from bridle.engine import Request
from bridle.outputs import Event, Finished, FinishReason, TokenEvent
from tests.distributed.replica_kit import replicated
from tests.engine.support import make_request
from tests.waiting import until

BLOCK = 4


def homes(seconds: float = 10.0, max_homes: int = 100) -> SessionAffinity:
    return SessionAffinity(BLOCK, seconds, max_homes)


def test_the_longest_conversation_that_a_prompt_goes_on_from_counts() -> None:
    known = homes()
    known.keep("short", range(10), "salt", 1, 0.0)
    known.keep("long", range(21), "salt", 2, 0.0)
    assert known.find(range(30), "salt", 0.0) == (2, 20)
    assert known.find([*range(12), 99, 99, 99, 99], "salt", 0.0) == (1, 8)
    assert known.find(range(30), "other", 0.0) is None
    assert known.find(range(8), "salt", 0.0) is None


def test_time_losses_and_clients_end_it() -> None:
    known = homes()
    for number in range(4):
        known.keep(str(number), [number] * 9, "", number % 2, float(number))
    assert known.release("0") == 0
    assert known.release("0") is None
    known.forget(1)
    assert known.find([1] * 20, "", 3.0) is None
    assert known.find([2] * 20, "", 11.9) == (0, 8)
    assert known.find([2] * 20, "", 12.0) is None
    assert len(known) == 0
    assert len(homes(seconds=0.0)) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 3)), max_size=40))
def test_it_is_bounded_and_its_two_maps_agree(kept: list[tuple[int, int, int]]) -> None:
    known = homes(max_homes=5)
    for now, (request, length, replica) in enumerate(kept):
        known.keep(str(request), range(length), "", replica, float(now))
        assert len(known) <= 5
        assert {end: name for name, (_, end, _, _) in known.homes.items()} == known.ends


def test_a_continuation_finds_its_replica_also_when_that_is_the_busiest() -> None:
    """Conversations with the same beginning continue on their own replicas, even if one replica has all the load."""
    random = {"temperature": 2.0, "min_tokens": 6, "max_tokens": 200, "stop_token_ids": range(16), "parks": True}
    with replicated(2, config=EngineConfig(park_memory=1 << 20)) as made:
        said: list[tuple[str, list[int]]] = []
        for i in range(12):
            made.client.loads[i % 2] += 1 << 20  # so that both have some
            request = make_request([1] * 40, seed=i, **random)
            events = read(made.client, request)
            assert isinstance(events[-1], Finished) and events[-1].reason is FinishReason.STOP
            said.append((request.id, [*request.prompt, *tokens_of(events)]))
            made.client.loads[i % 2] -= 1 << 20
        homes = {request_id: home.replica for request_id, home in made.client.homes.homes.items()}  # type: ignore
        assert sorted(homes.values()) == [0] * 6 + [1] * 6
        for request_id, tokens in said:
            made.client.loads[homes[request_id]] += 1 << 20
            end = read(made.client, make_request([*tokens, 2, 3], max_tokens=1))[-1]
            assert isinstance(end, Finished)
            assert len(tokens) - end.usage.cached_tokens <= BLOCK
            made.client.loads[homes[request_id]] -= 1 << 20


def test_letting_go_reaches_the_replica() -> None:
    with replicated(2) as made:
        request = make_request([1] * 40, min_tokens=6, max_tokens=200, stop_token_ids=range(16), parks=True)
        read(made.client, request)
        assert sum(replica.engine.statistics().num_parked for replica in made.replicas) == 1
        made.client.release_retained_kv("unknown")
        made.client.release_retained_kv(request.id)
        until(lambda: not any(replica.engine.statistics().num_parked for replica in made.replicas))


def read(client: object, request: Request) -> list[Event]:
    return [event for events in client.submit(request) for event in events]  # type: ignore[attr-defined]


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent)]
