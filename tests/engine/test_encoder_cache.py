"""The cache of image features is limited and evicts the least recently used images. No two requests wait for memory
that the other request holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bridle.engine.multimodal import encoder_cache
from bridle.engine.multimodal.encoder_cache import EncoderCache
from bridle.engine.multimodal.multimodal_inputs import MediaArray, MultiModalItem
from bridle.errors import InternalError, MediaRefused, Overloaded, ShardUnavailable

ROW = 4  # bytes


class Device:
    """A device that stores some bytes for each row of an image. It refuses or fails on chosen images."""

    def __init__(self, max_bytes: int) -> None:
        self.epoch = 0
        self.max_bytes = max_bytes
        self.faults: dict[bytes, Exception] = {}
        self.encoded: list[bytes] = []
        self.held: dict[bytes, int] = {}
        self.num_lost = 0  # calls that will not reach it

    def num_bytes(self, medium: MultiModalItem) -> int:
        return medium.num_rows * ROW

    def encode(self, medium: MultiModalItem) -> None:
        if self.num_lost:
            self.num_lost -= 1
            raise ShardUnavailable("away")
        self.encoded.append(medium.key)
        if medium.key in self.faults:
            raise self.faults[medium.key]
        self.held[medium.key] = self.num_bytes(medium)
        others = [size for key, size in self.held.items() if key != medium.key]
        assert not others or sum(self.held.values()) <= self.max_bytes

    def drop(self, key: bytes) -> None:
        del self.held[key]

    def clear(self) -> None:
        self.held.clear()


class Batching(Device):
    """A device that encodes up to three images of equal size at once, unless it is set to refuse an image."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.batches: list[str] = []

    def together(self, media: Sequence[MultiModalItem]) -> list[MultiModalItem]:
        return [each for each in media if each.num_rows == media[0].num_rows][:3]

    def encode_all(self, media: Sequence[MultiModalItem]) -> None:
        assert len(media) > 1
        self.batches.append("".join(each.key.decode() for each in media))
        if any(each.key in self.faults for each in media):
            raise RuntimeError("too many at once")
        for each in media:
            self.encode(each)


def medium(name: str, num_rows: int = 10) -> MultiModalItem:
    return MultiModalItem(name.encode(), (MediaArray("x", "float32", (1,), bytes(4)),), num_rows)


class Kept:
    """A media store, and a function that waits for it."""

    def __init__(self, max_rows: int, kind: type[Device] = Device) -> None:
        self.device = kind(max_rows * ROW)
        self.store = EncoderCache(self.device)
        self.changed = threading.Event()
        self.store.on_change = self.changed.set

    def open(self, *media: MultiModalItem) -> None:
        for each in media:
            self.store.open(each)

    def until(self, keys: str, wanted: str) -> None:
        """Take steps that request `keys` until exactly `wanted` are ready."""
        asked = [key.encode() for key in keys]
        while self.store.begin_step(asked) != {key.encode() for key in wanted}:
            assert self.changed.wait(120)
            self.changed.clear()


@pytest.fixture
def kept() -> Iterator[Any]:
    made: list[Kept] = []

    def make(max_rows: int, kind: type[Device] = Device) -> Kept:
        made.append(Kept(max_rows, kind))
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
    assert one.device.encoded == [b"a", b"b", b"c", b"d"]
    one.until("ac", "ac")  # b has left
    assert one.device.encoded == [b"a", b"b", b"c", b"d"]
    assert set(one.device.held) == {b"a", b"c", b"d"}
    assert one.store.counts()["media_bytes"] == 3 * 10 * ROW


def test_media_that_belong_together_are_encoded_so(kept: Any) -> None:
    one = kept(60, Batching)
    one.open(*map(medium, "abcde"), medium("z", 9))
    one.until("azbcd", "azbcd")
    assert one.device.batches == ["abc"] and one.device.encoded == [b"a", b"b", b"c", b"z", b"d"]
    assert one.store.counts()["num_media_encoded"] == 5


def test_as_many_are_encoded_together_as_have_room(kept: Any) -> None:
    one = kept(25, Batching)
    one.open(*map(medium, "abc"))
    one.until("abc", "ab")
    assert one.device.batches == ["ab"] and set(one.device.held) == {b"a", b"b"}


def test_one_at_fault_ends_its_own_request_alone(kept: Any) -> None:
    one = kept(60, Batching)
    one.device.faults[b"b"] = MediaRefused("odd")
    one.open(*map(medium, "abc"))
    one.until("abc", "ac")
    assert one.device.batches == ["abc"]
    assert {key: str(error) for key, error in one.store.take_failures().items()} == {b"b": "odd"}


def test_the_most_urgent_gets_room_from_those_behind(kept: Any) -> None:
    """Without this room, the most urgent request would wait for memory that waiting requests hold."""
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
    one.device.faults = {b"a": MediaRefused("odd"), b"b": RuntimeError("broken")}
    one.open(*map(medium, "abc"))
    one.until("abc", "c")
    found: dict[bytes, Exception] = {}
    while len(found) < 2:
        found |= one.store.take_failures()
    assert isinstance(found[b"a"], MediaRefused) and isinstance(found[b"b"], InternalError)
    assert not one.store.take_failures()
    one.device.faults.clear()
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
    assert one.device.encoded == [b"a"]
    assert one.store.counts()["num_media_found"] == 1


def test_pictures_that_requests_hold_have_a_limit(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_cache, "MAX_HELD_BYTES", 8)
    one = kept(20)
    one.store.check([medium("a"), medium("b"), medium("c")])  # alone, whatever it is
    one.open(*map(medium, "ab"))
    one.store.check([medium("a"), medium("b")])
    with pytest.raises(Overloaded, match="take 8 bytes; at most 8"):
        one.store.check([medium("a"), medium("c")])


def test_a_device_that_comes_back_holds_nothing(kept: Any) -> None:
    one = kept(30)
    one.open(*map(medium, "ab"))
    one.until("ab", "ab")
    one.device.clear()
    one.device.epoch += 1
    one.until("ab", "ab")
    assert one.device.encoded == [b"a", b"b", b"a", b"b"]
    assert set(one.device.held) == {b"a", b"b"}


def test_what_was_encoded_for_a_lost_device_is_not_there(kept: Any) -> None:
    """The device was lost while it encoded an image. Its answer belongs to the lost device and is ignored."""
    one = kept(30)
    one.open(medium("a"))
    encode = one.device.encode

    def lose(each: MultiModalItem) -> None:
        encode(each)
        if len(one.device.encoded) == 1:
            one.device.clear()
            one.device.epoch += 1

    one.device.encode = lose
    one.until("a", "a")
    assert one.device.encoded == [b"a", b"a"] and set(one.device.held) == {b"a"}


def test_an_absent_device_is_no_fault_of_a_picture(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_cache, "AWAY_SECONDS", 0.001)
    one = kept(30)
    one.device.num_lost = 3
    one.open(medium("a"))
    one.until("a", "a")
    assert one.device.encoded == [b"a"] and not one.store.take_failures()
