"""Tests that cache entries are complete or absent, with concurrent writers and readers, damage and killed processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bridle import file_cache
from bridle.errors import InvalidRequest
from bridle.file_cache import Bytes, FileCache, cache_limit, entries, remove_oldest
from tests.sources import ROOT
from tests.waiting import until

PIECE = file_cache.PIECE_BYTES


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))


def _allocate(size: int) -> Bytes:
    return np.empty(size, np.uint8)


def _bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def _put(text: bytes = b"what it is", sizes: tuple[int, ...] = (5, 0, 70_000), key: bytes = b"key") -> Path:
    files = FileCache("things")
    place = files.path("some name/..", key)
    assert files.write(place, text, [_bytes(size, seed) for seed, size in enumerate(sizes)])
    return place


@pytest.mark.parametrize(
    "sizes", [(), (0,), (1,), (5, 0, 70_000), (PIECE,), (PIECE - 3, 7), (PIECE + 1, PIECE, 9), (3, 2 * PIECE + 5)]
)
def test_what_was_written_is_read(sizes: tuple[int, ...]) -> None:
    place = _put(sizes=sizes)
    files = FileCache("things")
    want = np.concatenate([np.empty(0, np.uint8), *(_bytes(size, seed) for seed, size in enumerate(sizes))])
    found = files.read(place, _allocate)
    assert found is not None and found[0] == b"what it is" == files.read_text(place)
    assert np.array_equal(found[1], want)
    assert place.parent.stat().st_mode & 0o077 == 0 and place.stat().st_mode & 0o077 == 0
    assert os.listdir(place.parent) == [place.name]


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _lengthen(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 1)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _shorten(file: Path) -> None:
    os.truncate(file, 30)


def _replace(file: Path) -> None:
    file.write_bytes(b"something else" * 9999)


def _flip(at: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        file.write_bytes(data)

    return damage


@pytest.mark.parametrize("damage", [_cut, _lengthen, _empty, _shorten, _replace, _flip(0), _flip(9), _flip(60)])
def test_damage_is_not_read(damage: Callable[[Path], None]) -> None:
    place, files = _put(), FileCache("things")
    damage(place)
    assert files.read_text(place) is None
    assert files.read(place, _allocate) is None
    assert not place.exists(), "and the next writer has room"


@pytest.mark.parametrize("at", [-1, -8, -69_000])
def test_damaged_data_are_not_read(at: int) -> None:
    place, files = _put(), FileCache("things")
    _flip(at)(place)
    assert files.read_text(place) == b"what it is", "the text is whole"
    assert files.read(place, _allocate) is None and not place.exists()


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    files = FileCache("things")
    assert files.read(files.path("name", b"key"), _allocate) is None
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert not files.write(files.path("name", b"key"), b"text", [])
    assert entries() == [] and remove_oldest(0) == 0


def test_the_oldest_use_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FileCache("things")
    places = [_put(sizes=(50_000,), key=bytes([number])) for number in range(4)]
    for age, place in enumerate(places):
        os.utime(place, (0, 1000 + age))
    assert files.read(places[0], _allocate) is not None, "it was just used"
    assert [entry.path for entry in entries()] == [*places[1:], places[0]]
    monkeypatch.setenv("BRIDLE_CACHE_LIMIT", "170000")
    newest = _put(sizes=(50_000,), key=b"new")
    assert {entry.path for entry in entries()} == {places[0], places[3], newest}
    assert not files.write(places[1], b"text", [_bytes(170_001)]), "larger than all may be"
    monkeypatch.setenv("BRIDLE_CACHE_LIMIT", "0")
    assert not files.write(places[1], b"text", [])


def test_a_limit_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_CACHE_LIMIT", "20GB")
    with pytest.raises(InvalidRequest, match="BRIDLE_CACHE_LIMIT is '20GB'; must be a number of bytes"):
        cache_limit()


def test_many_read_and_write_one_entry() -> None:
    files, wrong = FileCache("things"), []
    place = files.path("name", b"key")

    def work(seed: int) -> None:
        for _ in range(20):
            files.write(place, bytes([seed]), [_bytes(100_000, seed)])
            found = files.read(place, _allocate)
            if found is None or not np.array_equal(found[1], _bytes(100_000, found[0][0])):
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_ENDLESS = """
import sys
import numpy as np
from bridle import file_cache

class Endless(np.ndarray):
    pass

def write_all(file, data, at, whole=file_cache.write_all_bytes):
    done = whole(file, data, at)
    print("begun", flush=True)
    sys.stdin.read()
    return done

file_cache.write_all_bytes = write_all
files = file_cache.FileCache("things")
files.write(files.path("name", b"key"), b"text", [np.ones(1000, np.uint8)])
"""


def test_a_writer_that_is_killed_leaves_nothing() -> None:
    files = FileCache("things")
    writer = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert writer.stdin is not None and writer.stdout is not None
    assert writer.stdout.readline() == b"begun\n"
    assert files.read(files.path("name", b"key"), _allocate) is None and entries() == []
    assert remove_oldest(0) == 0 and len(os.listdir(files.folder)) == 1, "somebody writes it"
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    until(lambda: remove_oldest(0) > 0 or not os.listdir(files.folder))
    assert os.listdir(files.folder) == []
