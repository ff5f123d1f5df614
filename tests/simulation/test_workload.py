"""The simulated workload follows from its seed, and matches its description."""

from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean

import pytest

from bridle.engine.sequence import root_key
from dev.simulation.workload import SimulatedChat, Workload, drawn_token, first_of_answer


def talk(chat: SimulatedChat) -> list[tuple[int, ...]]:
    """Return the prompts of a chat."""
    prompts = []
    while (turn := chat.next_turn()) is not None:
        prompts.append(turn.prompt)
        assert len(turn.prompt) == turn.num_prompt
        assert turn.num_prompt + turn.num_output <= chat.workload.max_model_len
        chat.note_answer(first_of_answer(root_key(turn.seed)), turn.num_output)
    return prompts


def test_a_seed_says_it_all() -> None:
    def all_of(seed: int) -> object:
        workload = Workload(100, 5.0, seed=seed)
        return [talk(chat) for chat in islice(workload.chats(), 30)], list(islice(workload.arrivals(), 30))

    assert all_of(1) == all_of(1)
    assert all_of(1) != all_of(2)


def test_a_turn_goes_on_from_all_that_was_said() -> None:
    chats = [talk(chat) for chat in islice(Workload(100, 5.0).chats(), 200)]
    assert fmean(map(len, chats)) == pytest.approx(3.0, rel=0.25)
    for prompts in chats:
        for one, following in pairwise(prompts):
            assert following[: len(one)] == one
            assert len(following) > len(one)


def test_answers_are_what_is_drawn() -> None:
    chat = next(Workload(100, 5.0).chats())
    turn = chat.next_turn()
    assert turn is not None
    key = root_key(turn.seed)
    chat.said.append((first_of_answer(key), 5))
    following = chat.next_turn()
    assert following is None or following.prompt[turn.num_prompt :][:5] == tuple(drawn_token(key, i) for i in range(5))


def test_system_prompts_are_shared_and_some_are_popular() -> None:
    workload = Workload(100, 5.0, num_systems=50)
    first: dict[int, tuple[int, ...]] = {}
    counts = [0] * 50
    for chat in islice(workload.chats(), 2_000):
        counts[chat.system] += 1
        if (turn := chat.next_turn()) is None:
            continue  # too long from its beginning
        system = turn.prompt[: chat.num_system_tokens]
        assert first.setdefault(chat.system, system) == system
    assert len(set(first.values())) == len(first)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.5)  # 1 / k


@pytest.mark.parametrize("burst", [1.0, 5.0])
def test_chats_come_at_their_rate_in_bursts_if_wanted(burst: float) -> None:
    workload = Workload(100, 30.0, burst=burst, burst_seconds=2.0)
    moments = list(islice(workload.arrivals(), 20_000))
    assert moments == sorted(moments)
    assert len(moments) / moments[-1] == pytest.approx(10.0, rel=0.15)
    per_second = [0] * (int(moments[-1]) + 1)
    for moment in moments:
        per_second[int(moment)] += 1
    mean = fmean(per_second)
    dispersion = fmean((count - mean) ** 2 for count in per_second) / mean  # 1 for a Poisson process
    assert dispersion == pytest.approx(1.0, abs=0.15) if burst == 1.0 else dispersion > 3
