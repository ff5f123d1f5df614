"""A lab whose requests carry media."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.engine.multimodal.multimodal_inputs import (
    MediaArray,
    MultiModalItem,
    PlaceholderRange,
)
from bridle.engine.scheduling.step_plan import StepPlan
from bridle.errors import BridleError, MediaRefused
from tests.engine.support import Lab

PAD = 3


def make_medium(name: str, num_rows: int = 5) -> MultiModalItem:
    array = MediaArray("pixel_values", "float32", (1,), name.encode().ljust(4))
    return MultiModalItem(name.encode().ljust(16), (array,), num_rows)


class FakeMediaStore:
    """A store that encodes an image in some steps and holds a few images. Without `random`, every image is ready at
    once."""

    def __init__(self, random: Random | None = None, room: int = 2) -> None:
        self.random = random
        self.room = room
        self.users: dict[bytes, int] = {}
        self.ready: list[bytes] = []
        self.pinned: set[bytes] = set()
        self.failures: dict[bytes, BridleError] = {}
        self.refused: set[bytes] = set()
        self.num_encoded = 0
        self.is_closed = False

    def check(self, media: Sequence[MultiModalItem]) -> None:
        for medium in media:
            if medium.key in self.refused:
                raise MediaRefused("no")

    def open(self, medium: MultiModalItem) -> None:
        self.users[medium.key] = self.users.get(medium.key, 0) + 1

    def leave(self, key: bytes) -> None:
        self.users[key] -= 1
        if not self.users[key]:
            del self.users[key]

    def begin_step(self, keys: Sequence[bytes]) -> set[bytes]:
        assert len(set(keys)) == len(keys)
        assert set(keys) <= set(self.users)
        missing = [key for key in keys if key not in self.ready]
        if self.random is None:
            self.ready += missing
            self.num_encoded += len(missing)
        elif missing and self.random.random() < 0.5:
            others = [key for key in self.ready if key not in keys or keys.index(key) > keys.index(missing[0])]
            if len(self.ready) >= self.room and others:
                self.ready.remove(others[0])
            if len(self.ready) < self.room:
                self.ready.append(missing[0])
                self.num_encoded += 1
        self.pinned = {key for key in keys if key in self.ready}
        return set(self.pinned)

    def take_failures(self) -> dict[bytes, BridleError]:
        failures, self.failures = self.failures, {}
        return failures

    def counts(self) -> dict[str, int]:
        return {"num_media_encoded": self.num_encoded}

    def close(self) -> None:
        self.is_closed = True


class MediaLab(Lab):
    """A lab whose engine has a media store. Each step plan is checked against the store."""

    def __init__(self, store: FakeMediaStore | None, **options: object) -> None:
        self.store = store
        self.runs: dict[int, tuple[PlaceholderRange, ...]] = {}
        super().__init__(on_forward=self.check_plan, **options)

    def make_one(self, config: EngineConfig) -> Engine:
        return Engine(self.executor, config, pools=self.pools, media=self.store, clock=self.clock)

    def check_plan(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            self.runs[fork.child] = self.runs.get(fork.parent, ())
        for row in plan.rows:
            kept = tuple(run for run in self.runs.get(row.seq_id, ()) if run.end <= row.num_kept)
            runs = self.runs[row.seq_id] = kept + row.runs
            end = row.start + row.num_scheduled
            seen = {run.key for run in runs if run.position < end and run.end > row.start}
            assert self.store is None or seen <= self.store.pinned
            assert not any(run.is_mutual and run.position < end < run.end for run in runs), "a picture was cut"
