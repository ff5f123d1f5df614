"""Tests of blocks on disk: a read returns the written bytes, even if files are damaged, and disk use is bounded."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import InvalidRequest
from bridle.kv_store import SegmentStore, forget_tenant, settings, store
from bridle.kv_store.records import HEADER_BYTES, MAX_BLOCK_BYTES, Header, block_digest, pack_header, read_header
from bridle.kv_store.segment import SegmentWriter
from bridle.kv_store.store import list_segments
from tests.kv_store.kit import BLOCK, DAMAGES, LIMIT, block_of, damage, fill, found_in, key_of, tag, total

# -- records ---------------------------------------------------------------------------------------------------


@given(size=st.integers(0, 20_000), seed=st.integers(), bits=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=3))
def test_no_flipped_bits_leave_the_digest(size: int, seed: int, bits: list[int]) -> None:
    data = bytearray(Random(seed).randbytes(size))
    digest = block_digest(data)
    flipped = bytearray(data)
    for bit in {bit % (8 * size) for bit in bits} if size else ():
        flipped[bit // 8] ^= 1 << bit % 8
    assert (block_digest(flipped) == digest) == (flipped == data)
    assert block_digest(data + b"\0") != digest


def test_a_digest_sees_changed_words_and_misplaced_pages() -> None:
    data, page = Random(1).randbytes(5 * 4096 + 100), 4096

    def changed(*places: int) -> bytes:
        """Return the data with 1 added to the word at the first place, and subtracted from the word at the second."""
        words = bytearray(data)
        for place, by in zip(places, (1, -1), strict=False):
            word = words[place : place + 8]
            words[place : place + len(word)] = (int.from_bytes(word, "little") + by).to_bytes(len(word), "little")
        return bytes(words)

    damaged = [changed(place) for place in (0, page - 8, 3 * page, len(data) - 1)]
    damaged += [changed(8, 16), changed(8, page + 8)]
    damaged += [data[page : 2 * page] + data[:page] + data[2 * page :], data[:page] + data[:page] + data[2 * page :]]
    damaged += [data[:512] + bytes(512) + data[1024:], data[:-1], data[: 5 * page], data + bytes(1)]
    assert len({block_digest(each) for each in (data, *damaged)}) == len(damaged) + 1
    assert block_digest(bytearray(data)) == block_digest(memoryview(data)) == block_digest(data)


@given(bit=st.integers(0, 8 * HEADER_BYTES - 1), cut=st.integers(0, HEADER_BYTES - 1))
def test_a_damaged_header_is_none(bit: int, cut: int) -> None:
    header = Header(7, key_of(1), tag("t"), block_digest(b"seven!!"))
    packed = bytearray(pack_header(header))
    assert read_header(bytes(packed)) == header
    assert read_header(bytes(packed[:cut])) is None
    packed[bit // 8] ^= 1 << bit % 8
    assert read_header(bytes(packed)) is None
    assert read_header(pack_header(Header(MAX_BLOCK_BYTES + 1, key_of(1), tag("t"), bytes(16)))) is None


# -- files -----------------------------------------------------------------------------------------------------


def test_a_store_that_is_opened_again_has_all_blocks(tmp_path: Path) -> None:
    first = SegmentStore(tmp_path, "model", LIMIT)
    fill(first, range(10))
    assert found_in(first, range(12)) == set(range(10))
    first.close()
    again = SegmentStore(tmp_path, "model", LIMIT)
    assert found_in(again, range(12)) == set(range(10))
    assert not found_in(SegmentStore(tmp_path, "other", LIMIT), range(12))
    before = total(tmp_path)
    fill(again, range(10))
    assert total(tmp_path) == before  # nothing is written twice


def test_what_another_process_writes_is_found_and_its_segment_stays(tmp_path: Path) -> None:
    first, second = SegmentStore(tmp_path, "model", LIMIT), SegmentStore(tmp_path, "model", LIMIT)
    fill(first, range(3))
    second.refresh()
    assert found_in(second, range(3)) == {0, 1, 2}
    fill(first, range(3, 4))
    fill(second, range(4, 200))  # pushes out all but what is being written
    first.refresh()
    second.refresh()
    assert found_in(first, range(200)) == found_in(second, range(200)) >= {0, 1, 2, 3, 199}
    assert total(tmp_path) <= LIMIT


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 1 << 30))
def test_the_disk_is_bounded_and_what_is_used_stays_longest(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    stores = [SegmentStore(folder, f"model-{number % 2}", LIMIT) for number in range(len(sizes))]
    random, number = Random(seed), 0
    for _ in range(sum(sizes)):
        chosen = random.choice(stores)
        assert chosen.append(key_of(number), tag(""), block_of(number))
        number += 1
        assert total(folder) <= LIMIT
    for each in stores:
        each.refresh()
        found_in(each, range(number))
        each.close()


def test_the_least_recently_used_segment_goes_first(tmp_path: Path) -> None:
    target = SegmentStore(tmp_path, "model", LIMIT)
    fill(target, range(64))  # 16 segments
    for age, (path, _, _) in enumerate(sorted(list_segments(tmp_path))):
        os.utime(path, (1000 + age, 1000 + age))
    assert found_in(target, range(1)) == {0}  # which makes the first segment the last one used
    fill(target, range(64, 68))
    assert found_in(target, range(8)) == {0, 1, 2, 3}


def test_small_segments_are_few(tmp_path: Path) -> None:
    """Every process leaves a small segment, and the store limits the number of these segments."""
    for number in range(store.SMALL_FILES + store.NUM_SEGMENTS + 10):
        target = SegmentStore(tmp_path, "model", 100 * LIMIT)
        fill(target, range(number, number + 1))
        target.close()
    assert len(list(list_segments(tmp_path))) == store.SMALL_FILES + store.NUM_SEGMENTS
    assert target.read(key_of(number), memoryview(bytearray(BLOCK)))


def test_a_large_limit_is_filled_by_more_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MAX_SEGMENT_BYTES", 2 * BLOCK)  # of one block, so that the limit is many of them
    target = SegmentStore(tmp_path, "model", 200 * BLOCK)
    fill(target, range(90))
    assert found_in(target, range(90)) == set(range(90))


def test_a_folder_that_is_lost_costs_blocks_alone(tmp_path: Path) -> None:
    target = SegmentStore(tmp_path / "kv", "model", LIMIT)
    fill(target, range(2), "colleague")
    fill(target, range(100, 132), "greedy")  # its half
    shutil.rmtree(tmp_path / "kv")
    assert not target.append(key_of(140), tag("greedy"), block_of(140))


def test_a_user_takes_at_most_half_of_the_limit_beside_others(tmp_path: Path) -> None:
    target = SegmentStore(tmp_path, "model", LIMIT)  # 16 segments of four blocks
    fill(target, range(8), "colleague")
    for number in range(100, 200):  # more than the store holds
        target.append(key_of(number), tag("greedy"), block_of(number))
        assert found_in(target, range(8)) == set(range(8))
    kept = found_in(target, range(100, 200))
    assert 24 <= len(kept) <= 32 and 199 in kept and 100 not in kept
    alone = SegmentStore(tmp_path, "other", LIMIT)
    fill(alone, range(200, 260), "greedy")
    assert len(found_in(alone, range(200, 260))) > 32


def test_a_block_or_a_limit_that_does_not_fit_is_not_stored(tmp_path: Path) -> None:
    target = SegmentStore(tmp_path, "model", LIMIT)
    assert not target.append(key_of(1), tag(""), block_of(1, 5 * BLOCK))
    assert not SegmentStore(tmp_path, "model", 100).append(key_of(1), tag(""), block_of(1))
    assert total(tmp_path) == 0


def test_the_last_bytes_of_a_disk_are_left_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    free = [store.RESERVE_BYTES + LIMIT]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, free[0]))
    target = SegmentStore(tmp_path, "model", LIMIT)
    fill(target, range(4))
    free[0] = store.RESERVE_BYTES
    assert target.append(key_of(4), tag(""), block_of(4))  # in the place of the first segment
    assert found_in(target, range(5)) == {4}
    assert settings.default_limit(tmp_path / "not" / "there") == free[0] // 10


# -- damage ----------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_whatever_happens_to_the_files_a_block_is_right_or_missing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("store")
    first = SegmentStore(folder, "model", LIMIT)
    fill(first, range(10))
    first.close()
    paths = st.sampled_from([path for path, _, _ in list_segments(folder)])
    each = st.tuples(paths, st.sampled_from(DAMAGES), st.integers(0, 1 << 30))
    for path, kind, seed in data.draw(st.lists(each, min_size=1, max_size=4)):
        damage(path, kind, seed)
    for reader in (first, SegmentStore(folder, "model", LIMIT)):
        found_in(reader, range(10))
        fill(reader, range(10))  # what is missing can be written again
        assert found_in(reader, range(10)) == set(range(10))
        reader.close()


@pytest.mark.parametrize("after", [0, 1, 50, HEADER_BYTES, 2000])
def test_a_disk_that_fills_up_in_the_middle_of_a_record_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    target = SegmentStore(tmp_path, "model", LIMIT)
    fill(target, range(2))
    whole, rest = os.pwritev, os.pwrite

    def pwritev(file: int, parts: list[bytes], at: int) -> int:
        return rest(file, b"".join(parts)[:after], at)

    def pwrite(*given: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "pwrite", pwrite)
    size = total(tmp_path)
    assert not target.append(key_of(2), tag(""), block_of(2))
    assert total(tmp_path) == size
    monkeypatch.setattr(os, "pwritev", whole)
    monkeypatch.setattr(os, "pwrite", rest)
    fill(target, range(2, 4))
    assert found_in(target, range(4)) == {0, 1, 2, 3}
    assert found_in(SegmentStore(tmp_path, "model", LIMIT), range(4)) == {0, 1, 2, 3}
    assert len(list(list_segments(tmp_path))) == 1


def test_a_segment_that_somebody_deletes_costs_its_blocks_alone(tmp_path: Path) -> None:
    target = SegmentStore(tmp_path, "model", LIMIT)
    fill(target, range(2))
    for path, _, _ in list(list_segments(tmp_path)):
        path.unlink()
    target.refresh()
    for _ in range(2):  # the first finds that the file is gone
        target.append(key_of(2), tag(""), block_of(2))
    assert found_in(target, range(3)) == {2}
    assert found_in(SegmentStore(tmp_path, "model", LIMIT), range(3)) == {2}


_WRITER = """
import sys
from pathlib import Path
from tests.kv_store.kit import LIMIT, fill
from bridle.kv_store import SegmentStore
target = SegmentStore(Path(sys.argv[1]), "model", LIMIT)
print("ready", flush=True)
for start in range(int(sys.argv[2]), 1 << 30):
    fill(target, range(start, start + 1))
"""


@pytest.mark.parametrize("rounds", [3, pytest.param(500, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_at_any_moment_leaves_only_right_blocks(tmp_path: Path, rounds: int) -> None:
    random, most = Random(1), 1 << 20
    for number in range(rounds):
        command = [sys.executable, "-c", _WRITER, tmp_path, str(number * 40)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(random.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)
        target = SegmentStore(tmp_path, "model", LIMIT)
        found = found_in(target, [*range(number * 40 + 5000), most])
        assert len(found) == len(target)  # all that is in the index is whole
        assert total(tmp_path) <= LIMIT
        fill(target, range(most, most + 1))  # the segments of dead processes can be removed
        target.close()


# -- users -----------------------------------------------------------------------------------------------------


def test_a_user_who_is_forgotten_has_no_block_and_others_keep_theirs(tmp_path: Path) -> None:
    live, other = SegmentStore(tmp_path, "model", LIMIT), SegmentStore(tmp_path, "other", LIMIT)
    for number in range(20):
        fill(live, range(number, number + 1), f"user-{number % 2}")
    fill(other, range(20, 22), "user-1")
    fill(live, range(22, 23), "user-0")
    assert forget_tenant(tmp_path, "user-1") == 12
    assert forget_tenant(tmp_path, "user-1") == 0
    assert not found_in(other, range(30))
    kept = {number for number in range(20) if not number % 2} | {22}
    assert found_in(live, range(30)) == kept  # also in the process that has them in its index
    assert found_in(SegmentStore(tmp_path, "model", LIMIT), range(30)) == kept
    erased = [block_of(number)[:64] for number in range(22) if number % 2 or number == 20]
    content = b"".join(path.read_bytes() for path, _, _ in list_segments(tmp_path))
    assert not any(part in content for part in erased)


def test_a_segment_belongs_to_the_process_that_writes_it(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    with writer.path.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert writer.path.stat().st_mode & 0o077 == 0
    writer.close()
    assert not writer.path.exists()  # it was empty


def test_a_folder_that_cannot_be_written_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="name a folder that can be written, or `off`"):
        settings.read_settings(str(tmp_path / "file" / "kv"), None)
    (tmp_path / "full" / ".lock").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="cannot be written"):
        settings.read_settings(str(tmp_path / "full"), None)
    assert settings.read_settings("off", None) is None
    assert settings.read_settings(str(tmp_path / "new"), 5) == settings.StoreSettings(tmp_path / "new", 5)
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
