"""Blocks of bytes that are derived from their number, stores that hold these blocks, and damage to files."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from random import Random

from bridle.kv_store import BlockStore, LoadedBlock, SegmentStore
from bridle.kv_store.records import HEADER_BYTES
from bridle.kv_store.records import tenant_tag as tag
from bridle.kv_store.store import list_segments
from tests.waiting import until

BLOCK = 5000
LIMIT = 16 * 4 * (BLOCK + HEADER_BYTES)  # 16 segments of four blocks


def block_of(number: int, size: int = BLOCK) -> bytes:
    return Random(number).randbytes(size)


def key_of(number: int) -> bytes:
    return (number + 1).to_bytes(16, "little")


def fill(target: SegmentStore, numbers: range, tenant: str = "") -> None:
    for number in numbers:
        assert target.append(key_of(number), tag(tenant), block_of(number))


def found_in(target: SegmentStore, numbers: Iterable[int]) -> set[int]:
    """Return the numbers of the blocks that can be read. Each read block must have the right bytes."""
    found = set()
    for number in numbers:
        memory = bytearray(BLOCK)
        if target.read(key_of(number), memoryview(memory)):
            assert bytes(memory) == block_of(number)
            found.add(number)
    return found


def total(folder: Path) -> int:
    return sum(size for _, size, _ in list_segments(folder))


DAMAGES = ("flip", "cut", "zeros", "garbage", "remove", "swap")


def damage(path: Path, kind: str, seed: int) -> None:
    if not path.exists() or not path.stat().st_size:
        return
    content, random = bytearray(path.read_bytes()), Random(seed)
    at = random.randrange(len(content))
    if kind == "flip":
        content[at] ^= 1 << random.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "zeros":
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    elif kind == "garbage":
        content += random.randbytes(200)
    elif kind == "swap":  # two records change places, half of each
        middle = (HEADER_BYTES + BLOCK) // 2
        content[:middle], content[middle : 2 * middle] = content[middle : 2 * middle], content[:middle]
    if kind == "remove":
        path.unlink()
    else:
        path.write_bytes(content)


def offer(target: BlockStore, number: int) -> bool:
    return target.offer(key_of(number), tag(""), BLOCK, lambda: block_of(number))


def loaded(target: BlockStore, numbers: range, is_beside: bool = False) -> dict[int, bytes]:
    """Load blocks, and return the blocks that the load reports as present."""
    put: dict[int, bytes] = {}

    def putter(number: int, data: memoryview) -> None:
        put[number] = bytes(data)

    blocks = [LoadedBlock(key_of(number), BLOCK, partial(putter, number)) for number in numbers]
    load = target.load(blocks, is_beside)
    until(lambda: load.is_done, "the load")
    return {number: put[number] for number in numbers[: load.num_loaded]}
