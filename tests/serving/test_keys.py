"""Tests that API keys are found by their text, stored as a hash, and shared by processes."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bridle.errors import InvalidRequest
from bridle.serving.tenancy.keys import Identity, KeyStore
from bridle.serving.tenancy.rate_limit import UserLimits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "keys.db"


@pytest.fixture
def keys(path: Path) -> Iterator[KeyStore]:
    store = KeyStore(path)
    yield store
    store.close()


def test_a_key_finds_its_owner(keys: KeyStore) -> None:
    assert keys.is_empty
    ann, root = keys.add("ann"), keys.add("root", is_admin=True)
    assert not keys.is_empty
    assert keys.find(ann) == Identity("ann", False)
    assert keys.find(root) == Identity("root", True)
    for wrong in ("", "brd-", ann[:-1], ann + "x", ann.upper(), "\ud800", "' OR 1=1 --"):
        assert keys.find(wrong) is None


def test_a_key_may_be_in_a_group(keys: KeyStore) -> None:
    first, second = keys.add("ann", group="red"), keys.add("ann")
    assert [keys.find(key) for key in (first, second)] == [Identity("ann", False, group="red"), Identity("ann", False)]
    assert keys.of_user("ann") == Identity("ann", False)  # what all keys of the user have
    assert [info.group for info in keys.list()] == ["red", ""]
    with pytest.raises(InvalidRequest, match="group is 'a b'; must be 1 to 40 letters"):
        keys.add("ann", group="a b")


def test_a_file_of_an_older_version_gets_groups(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE keys (hash BLOB PRIMARY KEY, prefix TEXT, user TEXT, is_admin INTEGER, created REAL)")
        db.execute("INSERT INTO keys VALUES (x'00', 'brd-x', 'old', 0, 1.0)")
        db.commit()
    with closing(KeyStore(path)) as keys:
        assert keys.find(keys.add("ann", group="red")) == Identity("ann", False, group="red")
        assert [(info.user, info.group) for info in keys.list()] == [("old", ""), ("ann", "red")]


def test_the_file_does_not_tell_keys(keys: KeyStore, path: Path) -> None:
    key = keys.add("ann")
    keys.close()
    for file in path.parent.iterdir():
        assert key.encode() not in file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0


def test_removing_by_beginning_or_by_user(keys: KeyStore) -> None:
    first, second, other = keys.add("ann"), keys.add("ann"), keys.add("bob")
    assert keys.remove(first[:10]) == 1
    assert keys.find(first) is None and keys.find(second) is not None
    assert keys.remove("ann") == 1 and keys.remove("ann") == 0
    assert keys.find(other) == Identity("bob", False)


def test_a_list_has_beginnings_only(keys: KeyStore) -> None:
    made = [keys.add("ann"), keys.add("root", is_admin=True)]
    listed = keys.list()
    assert [(info.user, info.is_admin) for info in listed] == [("ann", False), ("root", True)]
    assert all(key.startswith(info.prefix) and len(info.prefix) < 12 for key, info in zip(made, listed, strict=True))


def test_processes_share_the_file(keys: KeyStore, path: Path) -> None:
    other = KeyStore(path)
    key = other.add("ann")
    assert keys.find(key) is not None
    other.remove("ann")
    assert keys.find(key) is None
    other.close()


@pytest.mark.parametrize("user", ["", "1a", "a b", "a.b", "é", "a" * 41, "a\n", "-a"])
def test_a_wrong_user_name_is_refused(keys: KeyStore, user: str) -> None:
    with pytest.raises(InvalidRequest, match="must be 1 to 40 letters"):
        keys.add(user)


def test_a_file_that_cannot_hold_keys_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, whatever SQLite may think of it" * 50)
    for path in (text, tmp_path, text / "keys.db"):
        with pytest.raises(InvalidRequest, match="cannot be used as a file of API keys"):
            KeyStore(path)


def test_what_was_found_counts_until_anybody_changes_the_file(tmp_path: Path) -> None:
    """A cached lookup is valid until any process changes the file."""
    with closing(KeyStore(tmp_path / "k.db")) as here, closing(KeyStore(tmp_path / "k.db")) as elsewhere:
        key = here.add("ann")
        looked: list[bytes] = []
        look_up = here.look_up
        here.look_up = lambda hashed: looked.append(hashed) or look_up(hashed)  # type: ignore[func-returns-value, method-assign]
        for store in (here, elsewhere):
            store.set_limits("ann", UserLimits(requests_per_minute=7 if store is here else 8))
            for _ in range(3):
                found = here.find(key)
                assert found is not None and found.limits.requests_per_minute == (7 if store is here else 8)
        assert len(looked) == 2
        elsewhere.remove("ann")
        assert here.find(key) is None
        assert all(here.find(str(number)) is None for number in range(5_000)) and len(here._found) <= 4_096
