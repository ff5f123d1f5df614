"""The store of features: bounded, least recently used first out, and nobody waits for room that another waits with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bridle.engine.media import MediaArray, Medium
from bridle.errors import InternalError, MediaRefused, Overloaded
from bridle.model import media_store
from bridle.model.media_encoder import Features
from bridle.model.media_store import LocalMediaStore

ROW = 4  # bytes


class Encoder:
    """Makes as many numbers as a medium has rows; what it is told to refuse or to break on, it does."""

    def __init__(self) -> None:
        self.faults: dict[bytes, Exception] = {}
        self.encoded: list[bytes] = []

    def num_bytes(self, medium: Medium) -> int:
        return medium.num_rows * ROW

    def encode(self, medium: Medium) -> Features:
        self.encoded.append(medium.key)
        if medium.key in self.faults:
            raise self.faults[medium.key]
        return Features(torch.zeros(medium.num_rows, 1))


def medium(name: str, num_rows: int = 10) -> Medium:
    return Medium(name.encode(), (MediaArray("x", "float32", (1,), bytes(4)),), num_rows)


class Kept:
    """A store, and how to wait for it."""

    def __init__(self, max_rows: int) -> None:
        self.encoder = Encoder()
        self.store = LocalMediaStore(self.encoder, max_rows * ROW)  # type: ignore[arg-type]
        self.changed = threading.Event()
        self.store.on_change = self.changed.set

    def open(self, *media: Medium) -> None:
        for each in media:
            self.store.open(each)

    def until(self, keys: str, wanted: str) -> None:
        """Take steps that ask for `keys` until `wanted` are ready, and nothing else."""
        asked = [key.encode() for key in keys]
        while self.store.begin_step(asked) != {key.encode() for key in wanted}:
            assert self.changed.wait(120)
            self.changed.clear()


@pytest.fixture
def kept() -> Iterator[Any]:
    made: list[Kept] = []

    def make(max_rows: int) -> Kept:
        made.append(Kept(max_rows))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


def test_the_least_recently_used_leaves(kept: Any) -> None:
    one = kept(30)
    one.open(*map(medium, "abcd"))
    for key in "abc":
        one.until(key, key)
    one.until("a", "a")
    one.until("d", "d")
    assert one.encoder.encoded == [b"a", b"b", b"c", b"d"]
    one.until("ac", "ac")  # b has left
    assert one.encoder.encoded == [b"a", b"b", b"c", b"d"]
    with pytest.raises(InternalError):
        one.store.features(b"b")
    assert one.store.features(b"a").rows.shape == (10, 1)


def test_the_most_urgent_gets_room_from_those_behind(kept: Any) -> None:
    """Else it would wait for what the others wait with."""
    one = kept(20)
    one.open(*map(medium, "abc"))
    one.until("bc", "bc")
    one.until("abc", "ab")
    one.until("abc", "ab")  # c waits until a or b is not asked for
    one.until("bc", "bc")


def test_what_fits_nowhere_is_taken_in_alone(kept: Any) -> None:
    one = kept(20)
    one.open(medium("a"), medium("z", 50))
    one.until("a", "a")
    one.until("z", "z")
    one.until("za", "z")
    one.until("a", "a")


def test_failures_are_told_once_and_tried_again_by_the_next(kept: Any) -> None:
    one = kept(20)
    one.encoder.faults = {b"a": MediaRefused("odd"), b"b": RuntimeError("broken")}
    one.open(*map(medium, "abc"))
    one.until("abc", "c")
    found: dict[bytes, Exception] = {}
    while len(found) < 2:
        found |= one.store.take_failures()
    assert isinstance(found[b"a"], MediaRefused) and isinstance(found[b"b"], InternalError)
    assert not one.store.take_failures()
    one.encoder.faults.clear()
    one.until("abc", "c")  # not again for those who use it now
    one.store.leave(b"a")
    one.open(medium("a"))
    one.until("a", "a")
    assert one.store.counts()["num_media_encoded"] == 2


def test_features_outlive_their_requests(kept: Any) -> None:
    one = kept(20)
    one.open(medium("a"))
    one.until("a", "a")
    one.store.leave(b"a")
    one.open(medium("a"))
    one.until("a", "a")
    assert one.encoder.encoded == [b"a"]
    assert one.store.counts()["num_media_found"] == 1


def test_pictures_that_requests_hold_have_a_limit(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_store, "MAX_HELD_BYTES", 8)
    one = kept(20)
    one.store.check([medium("a"), medium("b"), medium("c")])  # alone, whatever it is
    one.open(*map(medium, "ab"))
    one.store.check([medium("a"), medium("b")])
    with pytest.raises(Overloaded, match="take 8 bytes; at most 8"):
        one.store.check([medium("a"), medium("c")])
