"""Workload of simulated clients: chats of several turns under shared system prompts, of mixed lengths, in bursts.

A chat begins with one of the system prompts, some far more popular than others. Each turn adds a user message. The
prompt of each later turn contains all messages and answers before it. Everything follows from the seed, except the
times of later turns, which depend on the replicas' answers.

A text is a list of runs of consecutive token numbers, so that a chat of thousands of tokens is stored as a few pairs.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

#: Token ids are below this number.
VOCAB_SIZE = 1 << 20
_MAX_RUN = 1 << 13
_STARTS = VOCAB_SIZE - _MAX_RUN
_IDS = tuple(range(VOCAB_SIZE))  # slices of it share their int objects, so that making a prompt only copies pointers

Run = tuple[int, int]  # first token, number of tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution with limits: half of all lengths are below `median`, 68 % within a factor `spread`."""

    median: float
    spread: float
    least: int
    most: int

    def draw(self, random: Random) -> int:
        length = random.lognormvariate(math.log(self.median), math.log(self.spread))
        return min(max(round(length), self.least), self.most)


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of `num_requests` requests at `rate` per second, in chats of `mean_turns` turns.

    System prompt number k of `num_systems` is chosen with a probability proportional to 1 / k ** `zipf`. For the share
    `burst_share` of the time, chats begin `burst` times as often as on average (with `burst` 1, chats are a Poisson
    process). Each burst lasts `burst_seconds` on average. A share `long_share` of the messages are long documents.
    Users are distributed like system prompts, and the service treats users fairly.
    """

    num_requests: int
    rate: float
    seed: int = 0
    mean_turns: float = 3.0
    think_seconds: float = 15.0
    num_systems: int = 1_000
    zipf: float = 1.0
    burst: float = 1.0
    burst_share: float = 0.1
    burst_seconds: float = 20.0
    num_users: int = 64
    system_tokens: Lengths = Lengths(400, 2.0, 32, 2_048)
    message_tokens: Lengths = Lengths(50, 2.5, 4, 1_024)
    document_tokens: Lengths = Lengths(1_200, 1.5, 256, 2_048)
    long_share: float = 0.1
    output_tokens: Lengths = Lengths(80, 2.0, 2, 400)
    max_model_len: int = 4_096

    def arrivals(self) -> Iterator[float]:
        """Yield the times at which chats begin, without end."""
        random = Random(f"{self.seed} arrivals")
        mean = self.rate / self.mean_turns
        calm = max(mean * (1 - self.burst_share * self.burst) / (1 - self.burst_share), 1e-9)
        pauses = self.burst_seconds * (1 - self.burst_share) / self.burst_share
        now, is_burst, turns_at = 0.0, False, random.expovariate(1 / pauses)
        while True:
            following = now + random.expovariate(mean * self.burst if is_burst else calm)
            if following < turns_at:
                now = following
                yield now
            else:  # the other rate applies from here; a new sample is right, because the distribution has no memory
                now, is_burst = turns_at, not is_burst
                turns_at = now + random.expovariate(1 / (self.burst_seconds if is_burst else pauses))

    def chats(self) -> Iterator[SimulatedChat]:
        """Yield chats in the order in which they begin, without end."""
        systems = _make_systems(self)
        popularity = list(accumulate(1 / (k + 1) ** self.zipf for k in range(self.num_systems)))
        users = list(accumulate(1 / (k + 1) for k in range(self.num_users)))
        number = 0
        while True:
            random = Random(f"{self.seed} chat {number}")
            system = _pick(popularity, random)
            user = f"user-{_pick(users, random)}"
            yield SimulatedChat(self, number, user, system, systems[system][1], random, [systems[system]])
            number += 1


def _make_systems(workload: Workload) -> list[Run]:
    random = Random(f"{workload.seed} systems")
    return [(random.randrange(_STARTS), workload.system_tokens.draw(random)) for _ in range(workload.num_systems)]


def _pick(cumulated: list[float], random: Random) -> int:
    return bisect(cumulated, random.random() * cumulated[-1], hi=len(cumulated) - 1)


@dataclass(slots=True)
class SimulatedChat:
    """One growing conversation: `said` holds all messages and answers so far."""

    workload: Workload
    number: int
    user: str
    system: int
    num_system_tokens: int
    random: Random
    said: list[Run]
    num_turns: int = 0

    def next_turn(self) -> SimulatedTurn | None:
        """Return the turn with the user's next message and the conversation before it; None if the chat has ended or is
        too long."""
        w, random = self.workload, self.random
        if self.num_turns and random.random() < 1 / w.mean_turns:
            return None
        lengths = w.document_tokens if random.random() < w.long_share else w.message_tokens
        self.said.append((random.randrange(_STARTS), lengths.draw(random)))
        num_output, seed = w.output_tokens.draw(random), random.getrandbits(48)
        turn = SimulatedTurn(f"{self.number}-{self.num_turns}", self, tuple(self.said), num_output, seed)
        if turn.num_prompt + num_output > w.max_model_len:
            return None
        self.num_turns += 1
        return turn

    def note_answer(self, first: int, num_tokens: int) -> float:
        """Add an answer to the conversation; return the seconds until the user sends the next message."""
        self.said.append((first, num_tokens))
        return self.random.expovariate(1 / self.workload.think_seconds)


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """One future request. `seed` determines the text of the answer."""

    id: str
    chat: SimulatedChat
    said: tuple[Run, ...]
    num_output: int
    seed: int

    @property
    def num_prompt(self) -> int:
        return sum(length for _, length in self.said)

    @property
    def prompt(self) -> tuple[int, ...]:
        tokens: list[int] = []
        for first, length in self.said:
            tokens += _IDS[first : first + length]
        return tuple(tokens)


def first_of_answer(key: int) -> int:
    """Return the first token of an answer, which its random key determines; the next tokens count up from it."""
    return key % _STARTS


def drawn_token(key: int, draw: int) -> int:
    """Return the token that is sampled at number `draw` with a random key."""
    return _IDS[key % _STARTS + draw]
