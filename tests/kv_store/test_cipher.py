"""Tests of encrypted stores: files reveal nothing, only sealed data is read, and tokens stay the same."""

from __future__ import annotations

import builtins
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle import LLM
from bridle.errors import InvalidRequest
from bridle.kv_store import SegmentStore
from bridle.kv_store.cipher import BlockCipher, read_cipher
from bridle.kv_store.records import HEADER_BYTES, Header, block_digest, pack_header
from bridle.kv_store.settings import read_settings
from bridle.kv_store.store import list_scopes, list_segments
from tests.fakes.tiny_checkpoints import cached_checkpoint
from tests.kv_store.kit import BLOCK, DAMAGES, LIMIT, block_of, damage, fill, found_in, key_of, tag, total

ONE, OTHER = bytes(range(32)), bytes(32)


def opened(folder: Path, secret: bytes | None = ONE) -> SegmentStore:
    return SegmentStore(folder, "model", 2 * LIMIT, None if secret is None else BlockCipher(secret))


def test_blocks_come_back_and_files_hold_none_of_them(tmp_path: Path) -> None:
    first = opened(tmp_path)
    fill(first, range(5))
    assert found_in(first, range(6)) == set(range(5))
    first.close()
    assert found_in(opened(tmp_path), range(6)) == set(range(5))
    content = b"".join(path.read_bytes() for path, _, _ in list_segments(tmp_path))
    assert not any(block_of(number)[at : at + 16] in content for number in range(5) for at in (0, 64, BLOCK - 16))
    again = opened(tmp_path / "again")
    fill(again, range(5))
    assert content != b"".join(path.read_bytes() for path, _, _ in list_segments(tmp_path / "again"))  # other nonces


@pytest.mark.parametrize("secret", [OTHER, None])
def test_without_the_key_nothing_is_read(tmp_path: Path, secret: bytes | None) -> None:
    fill(opened(tmp_path), range(5))
    assert not found_in(opened(tmp_path, secret), range(5))


def test_what_was_written_without_a_key_is_not_read_with_one(tmp_path: Path) -> None:
    fill(opened(tmp_path, None), range(5))
    assert not found_in(opened(tmp_path), range(5))


def test_a_block_that_somebody_has_changed_or_renamed_is_not_read(tmp_path: Path) -> None:
    """A changed or renamed block is not read, even if its digest was recomputed, which needs no key."""
    target = opened(tmp_path)
    fill(target, range(3))
    sealed_bytes = BLOCK + BlockCipher.overhead
    with next(list_segments(tmp_path))[0].open("r+b") as file:
        for number, name in ((0, 0), (1, 2)):
            start = number * (HEADER_BYTES + sealed_bytes)
            file.seek(start + HEADER_BYTES)
            sealed = bytearray(file.read(sealed_bytes))
            sealed[100] ^= number == 0
            file.seek(start)
            file.write(pack_header(Header(sealed_bytes, key_of(name), tag(""), block_digest(sealed))) + sealed)
    assert found_in(opened(tmp_path), range(3)) == {2}


@given(data=st.data())
def test_damaged_files_cost_only_blocks(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("store")
    first = opened(folder)
    fill(first, range(8))
    first.close()
    for path, _, _ in list(list_segments(folder)):
        damage(path, data.draw(st.sampled_from(DAMAGES)), data.draw(st.integers(0, 1 << 30)))
    again = opened(folder)
    found_in(again, range(8))
    fill(again, range(8))
    assert found_in(again, range(8)) == set(range(8))
    assert total(folder) <= 2 * LIMIT
    again.close()


def test_names_depend_on_the_key() -> None:
    one, other = BlockCipher(ONE), BlockCipher(OTHER)
    assert one.derive("model") == BlockCipher(ONE).derive("model")
    assert len({one.derive("model"), other.derive("model"), one.derive("model 2"), "model"}) == 4


# -- the key ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"ab" * 31, b"ab" * 33, b"xy" * 32, bytes(range(200, 232))])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="a key is 64 hexadecimal digits") as refused:
        read_cipher(path)
    assert refused.value.param == "kv_store_key"
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read_cipher(tmp_path / "none")


def key_file(folder: Path, secret: bytes = ONE) -> str:
    path = folder / f"{secret[1]}.key"
    path.write_text(secret.hex() + "\n")
    return str(path)


def test_a_key_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="kv_store is off; set it to a folder, or to `auto`"):
        read_settings(None, None, key_file(tmp_path))
    assert read_settings(str(tmp_path), 5, key_file(tmp_path)) is not None


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *given: Any, **further: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *given, **further)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequest, match=r"pip install 'bridle-llm\[encryption\]'"):
        read_cipher(Path(key_file(tmp_path)))


def test_tokens_are_the_same_and_another_key_finds_nothing(tmp_path: Path) -> None:
    prompt, random = list(range(5, 105)), Random(1)
    random.shuffle(prompt)
    model = str(cached_checkpoint("llama"))
    store = {"kv_store": str(tmp_path / "kv"), "num_blocks": 64}
    keys = (ONE, ONE, OTHER, None)
    found = []
    for secret in keys:
        key = {} if secret is None else {"kv_store_key": key_file(tmp_path, secret)}
        with LLM(model, **store, **key) as llm:  # type: ignore[arg-type]
            (output,) = llm.generate([prompt], max_tokens=8, temperature=0)
        found.append((output.usage.cached_tokens, output.outputs[0].token_ids))
    assert [cached for cached, _ in found] == [0, 96, 0, 0]
    assert len({tuple(tokens) for _, tokens in found}) == 1
    assert len(list_scopes(tmp_path / "kv")) == 3
