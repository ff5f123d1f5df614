"""Tests that damaged and hostile GGUF files are refused with a message, and that no bytes outside the file are read."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bridle.errors import BridleError, UnsupportedModel
from bridle.gguf import open_gguf, open_model
from bridle.gguf.folder import unpack
from bridle.model import loader, support_checks
from bridle.model.checkpoint import inspect_checkpoint
from bridle.tokenizer import Tokenizer
from tests.conftest import IS_FULL
from tests.gguf.kit import pair

NUM_MUTANTS = 5_000 if IS_FULL else 300


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sides = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(name) + sides + struct.pack("<IQ", kind, offset)


def _file(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


NAME = _key("general.name", 8, _text("x"))
ROW = _tensor("t", (8,), 0, 0)


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    numbers = _key("n", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3))
    words = _key("w", 9, struct.pack("<IQ", 8, 2) + _text("a") + _text("\u00e9"))
    flags = _key("f", 9, struct.pack("<IQ2B", 7, 2, 1, 0))
    keys = (NAME, numbers, words, flags, _key("b", 7, b"\1"), _key("r", 6, struct.pack("<f", 0.5)))
    path = tmp_path / "a.gguf"
    path.write_bytes(_file(keys, (ROW, _tensor("u", (4, 2), 1, 32)), bytes(range(48))))
    file = open_gguf(path)
    assert file.metadata["general.name"] == "x" and file.metadata["w"] == ["a", "\u00e9"]
    assert file.metadata["n"].tolist() == [1, -2, 3] and file.metadata["f"] == [True, False]
    assert file.metadata["b"] is True and file.metadata["r"] == 0.5
    assert file.tensors["u"].shape == (2, 4) and file.read("u").tolist() == [list(range(32, 40)), list(range(40, 48))]
    assert bytes(file.header) == path.read_bytes()[: file.tensors["t"].start]


HUGE = 1 << 62
DAMAGED: dict[str, tuple[bytes, str]] = {
    "no file": (b"GG", "it has 2 bytes"),
    "another format": (b"PK\3\4" + bytes(40), "begins with b'PK"),
    "version 1": (_file(version=1), "of GGUF version 1"),
    "big-endian": (_file(version=3 << 24), "big-endian"),
    "too many keys": (_file(num_keys=HUGE), "claims 4611686018427387904 metadata keys"),
    "too many tensors": (_file(num_tensors=HUGE), "claims 4611686018427387904 tensors"),
    "keys that are not there": (_file(num_keys=9), "but the file has"),
    "tensors that are not there": (_file(num_tensors=9), "but the file has"),
    "a long key": (_file((_key("k" * 2000, 4, bytes(4)),)), "has 2000 bytes; at most 1024"),
    "a long string": (_file((_text("k") + struct.pack("<IQ", 8, HUGE),)), "at most 67108864"),
    "a string beyond the end": (_file((_text("k") + struct.pack("<IQ", 8, 5000),)), "needs 5000 bytes"),
    "a key twice": (_file((NAME, NAME)), "'general.name' occurs twice"),
    "an unknown type": (_file((_key("k", 99, bytes(8)),)), "unknown type 99"),
    "no flag": (_file((_key("k", 7, b"\2"),)), "is 2, which is neither true nor false"),
    "a long list": (_file((_key("k", 9, struct.pack("<IQ", 4, HUGE)),)), "items; at most"),
    "a list beyond the end": (_file((_key("k", 9, struct.pack("<IQ", 4, 5000)),)), "needs 20000 bytes"),
    "texts beyond the end": (_file((_key("k", 9, struct.pack("<IQ", 8, 5000)),)), "has 5000 items"),
    "a text in a list beyond the end": (
        _file((_key("k", 9, struct.pack("<IQQ", 8, 1, 1 << 40)),)),
        "has a string of 1099511627776 bytes",
    ),
    "a list of lists": (_file((_key("k", 9, struct.pack("<IQ", 9, 1) + bytes(40)),)), "list of type 9"),
    "an odd alignment": (_file((_key("general.alignment", 4, struct.pack("<I", 24)),), (ROW,), bytes(64)), "is 24"),
    "no alignment": (_file((_key("general.alignment", 4, bytes(4)),), (ROW,), bytes(64)), "is 0"),
    "alignment in words": (_file((_key("general.alignment", 8, _text("x")),), (ROW,), bytes(64)), "is 'x'"),
    "no sides": (_file((), (_text("t") + struct.pack("<IIQ", 0, 0, 0),), bytes(64)), "has 0 dimensions"),
    "many sides": (_file((), (_tensor("t", (1,) * 9, 0, 0),), bytes(64)), "has 9 dimensions"),
    "an empty side": (_file((), (_tensor("t", (0, 4), 0, 0),), bytes(64)), "has shape (0, 4)"),
    "a huge side": (_file((), (_tensor("t", (HUGE, HUGE), 0, 0),), bytes(64)), "each dimension must be 1 to"),
    "an overflow": (_file((), (_tensor("t", (1 << 40,) * 4, 0, 0),), bytes(64)), "but the file has"),
    "an unknown tensor type": (_file((), (_tensor("t", (32,), 77, 0),), bytes(64)), "the unknown type 77"),
    "half a block": (_file((), (_tensor("t", (33,), 8, 0),), bytes(64)), "Q8_0 needs a multiple of 32"),
    "an offset beyond the end": (_file((), (_tensor("t", (8,), 0, 1 << 50),), bytes(64)), "but the file has"),
    "an offset that wraps": (_file((), (_tensor("t", (8,), 0, (1 << 64) - 32),), bytes(64)), "but the file has"),
    "an odd offset": (_file((), (_tensor("t", (4,), 0, 4),), bytes(64)), "must be a multiple of 32"),
    "a tensor cut off": (_file((), (_tensor("t", (9,), 0, 0),), bytes(32)), "but the file has"),
    "a tensor twice": (_file((), (ROW, _tensor("t", (8,), 0, 32)), bytes(64)), "'t' occurs twice"),
    "tensors on each other": (_file((), (_tensor("t", (16,), 0, 0), _tensor("u", (8,), 0, 32)), bytes(64)), "overlap"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    content, reason = DAMAGED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel) as caught:
        open_gguf(path)
    assert reason in str(caught.value) and str(path) in str(caught.value)


def test_what_is_no_plain_file(tmp_path: Path) -> None:

    os.mkfifo(tmp_path / "pipe.gguf")
    for name, reason in (
        ("pipe.gguf", "not a regular file"),
        ("none.gguf", "cannot be read"),
        (".", "not a regular file"),
    ):
        with pytest.raises(UnsupportedModel, match=reason):
            open_gguf(tmp_path / name)


def _flip(rng: random.Random, data: bytearray, header: int) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(header)] = rng.randrange(256)


def _overwrite(rng: random.Random, data: bytearray, header: int) -> None:
    """Overwrite a random place of the header with an extreme number of 1, 4 or 8 bytes."""
    value = rng.choice([0, 1, 2, 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
    size = rng.choice([1, 4, 8])
    at = rng.randrange(header - size)
    data[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _cut(rng: random.Random, data: bytearray, header: int) -> None:
    del data[rng.randrange(header if rng.random() < 0.7 else len(data)) :]


def _insert(rng: random.Random, data: bytearray, header: int) -> None:
    at = rng.randrange(header)
    data[at:at] = rng.randbytes(rng.choice([1, 8, 64]))


def _remove(rng: random.Random, data: bytearray, header: int) -> None:
    at = rng.randrange(header)
    del data[at : at + rng.choice([1, 4, 8, 32])]


def _swap(rng: random.Random, data: bytearray, header: int) -> None:
    """Exchange two pieces of the header, so that valid numbers are in wrong places."""
    size = rng.choice([4, 8, 16])
    first, second = rng.randrange(header - size), rng.randrange(header - size)
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )


MUTATIONS: tuple[Callable[[random.Random, bytearray, int], None], ...] = (
    _flip,
    _overwrite,
    _overwrite,
    _cut,
    _insert,
    _remove,
    _swap,
)


@pytest.mark.timeout(1_200)
def test_mutants_load_or_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of mutated files is refused with bridle's own error, or loads with all tensors within the file.
    A file that loads is also read as a model and a tokenizer."""
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))
    _, file = pair("llama", num_hidden_layers=1, vocab_size=300)
    whole = file.read_bytes()
    header = min(entry.start for entry in open_gguf(file).tensors.values())
    path = tmp_path / "mutant.gguf"
    outcomes = {"refused": 0, "loaded": 0, "silent": 0}
    for number in range(NUM_MUTANTS):
        rng, data = random.Random(number), bytearray(whole)
        rng.choice(MUTATIONS)(rng, data, header)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            _load_all(path, len(data))
            outcomes["loaded"] += 1
        except BridleError as error:
            outcomes["refused" if str(error).strip() else "silent"] += 1
        except Exception as error:
            raise AssertionError(f"mutant {number} raised {type(error).__name__}: {error}") from error
    assert not outcomes["silent"]
    assert outcomes["refused"] > NUM_MUTANTS // 4, outcomes
    assert outcomes["loaded"] > NUM_MUTANTS // 50, outcomes


def _load_all(path: Path, size: int) -> None:
    model = open_model(path)
    for name, entry in model.tensors.items():
        assert entry.start > 0 and entry.start + entry.num_bytes <= size
        assert model.read(name).nbytes == entry.num_bytes
    folder = unpack(path)
    checkpoint = inspect_checkpoint(folder)
    settings = support_checks.read_config(checkpoint)
    loader.read_model(checkpoint, settings, torch.float32, torch.device("cpu"))
    Tokenizer.load(folder)


def test_a_file_that_is_cut_off_is_an_error_and_no_end(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(_file((NAME,), (ROW,), bytes(64)))
    file = open_gguf(path)
    os.truncate(path, file.tensors["t"].start + 1)
    with pytest.raises(UnsupportedModel, match="was cut off while it was read: tensor 't' is not whole"):
        file.read("t")


def test_long_headers_are_read_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"token {number}" * (number % 7) for number in range(200)]
    packed = b"".join(_text(text) for text in texts)
    keys = (_key("w", 9, struct.pack("<IQ", 8, len(texts)) + packed), NAME)
    path = tmp_path / "a.gguf"
    path.write_bytes(_file(keys, (ROW,), bytes(range(64))))
    whole = open_gguf(path)
    for ahead in (1, 7, 30, 1000):
        monkeypatch.setattr("bridle.gguf.byte_reader.READ_AHEAD_BYTES", ahead)
        file = open_gguf(path)
        assert file.metadata["w"] == texts == whole.metadata["w"] and file.metadata["general.name"] == "x"
        assert file.header == whole.header and file.read("t").tolist() == whole.read("t").tolist()


_SERVED = """
import os, sys
from bridle import LLM, SamplingParams
sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
path, settings = sys.argv[1], {} if sys.argv[2] == "torch" else {"backend": "llamacpp"}
with LLM(path, num_blocks=32, num_threads=1, **settings) as llm:
    before = llm.generate("the one", sampling)[0].outputs[0].token_ids
    os.truncate(path, 100)
    after = llm.generate("the one", sampling)[0].outputs[0].token_ids
print("survived" if before == after else f"{before} became {after}")
"""


@pytest.mark.parametrize("backend", ["torch", "llamacpp"])
def test_a_file_that_is_cut_off_while_it_is_served_is_served_on(backend: str, tmp_path: Path) -> None:
    if backend == "llamacpp":
        pytest.importorskip("llama_cpp")
    file = shutil.copy(pair("llama", "Q8_0")[1], tmp_path / "m.gguf")
    child = [sys.executable, "-c", _SERVED, str(file), backend]
    done = subprocess.run(child, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "survived"), done.stderr[-2000:]
