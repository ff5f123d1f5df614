"""Tests that the module store is atomic, crash-safe and limited, and never runs compiled code from an upload."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.aici.protocol import Auth
from bridle.aici.runtime.limits import DEFAULT_LIMITS
from bridle.aici.runtime.modules import ModuleStore
from bridle.aici.runtime.tags import GhReference, is_tag
from bridle.errors import InvalidRequest, Overloaded
from tests.waiting import PATIENCE

ADMIN = Auth("root", True)
EVA = Auth("eva", False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ModuleStore]:
    made = ModuleStore(tmp_path)
    yield made
    made.close()


def test_modules_are_known_by_their_hash(store: ModuleStore) -> None:
    module = store.add(b"some bytes", EVA)
    assert module == hashlib.sha256(b"some bytes").hexdigest()
    assert store.path(module).read_bytes() == b"some bytes"
    assert store.add(b"some bytes", ADMIN) == module
    assert store.resolve(module) == module


def test_tags_newest_first_and_all_or_none(store: ModuleStore) -> None:
    one, two = store.add(b"1", EVA), store.add(b"2", EVA)
    assert [i.tag for i in store.set_tags(one, ["b", "a"], ADMIN)] == ["b", "a"]
    store.set_tags(two, ["a"], ADMIN)
    with pytest.raises(InvalidRequest):
        store.set_tags(two, ["fine", "not fine"], ADMIN)
    assert [(i.tag, i.module_id, i.updated_by, i.wasm_size) for i in store.tags()] == [
        ("a", two, "root", 1),
        ("b", one, "root", 1),
    ]
    assert store.resolve("a") == two
    with pytest.raises(InvalidRequest, match=r"unknown controller 'nobody'; the standard .*jsctrl.*yesno"):
        store.resolve("nobody")


@pytest.mark.parametrize(
    ("tag", "valid"),
    [
        ("a", True),
        ("eva.x-1_2.3", True),
        ("a" * 20, True),
        ("a" * 21, False),
        ("g" * 50, True),
        ("g" * 51, False),
        ("1a", False),
        ("a/b", False),
        ("a\n", False),
        ("é", False),
        ("", False),
        ("ab" * 32, False),
    ],
)
def test_a_tag_has_letters_that_are_allowed(tag: str, valid: bool) -> None:
    assert is_tag(tag) is valid


@pytest.mark.parametrize(
    ("auth", "tag", "allowed"),
    [
        (EVA, "eva.x", True),
        (EVA, "x", False),
        (EVA, "adam.x", False),
        (EVA, "evax", False),
        (ADMIN, "x", True),
        (ADMIN, "eva.x", True),
    ],
)
def test_who_may_set_which_tag(store: ModuleStore, auth: Auth, tag: str, allowed: bool) -> None:
    module = store.add(b"1", EVA)
    if allowed:
        assert [i.updated_by for i in store.set_tags(module, [tag], auth)] == [auth.user]
    else:
        with pytest.raises(InvalidRequest, match="may only set tags"):
            store.set_tags(module, [tag], auth)
        assert store.tags() == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "ab", "f" * 64, "F" * 64, "x" * 1000, "0" * 63 + "/"])
def test_names_that_mean_nothing(store: ModuleStore, name: str) -> None:
    with pytest.raises(InvalidRequest, match="unknown"):
        store.resolve(name)
    with pytest.raises(InvalidRequest, match="unknown"):
        store.set_tags(name, ["a"], ADMIN)


def test_a_user_at_the_limit_loses_the_oldest_untagged_module(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path, replace(DEFAULT_LIMITS, max_modules_per_user=2))
    tagged, old = store.add(b"1", EVA), store.add(b"2", EVA)
    store.set_tags(tagged, ["eva.keep"], EVA)
    shared = store.add(b"2", ADMIN)
    new = store.add(b"3", EVA)
    assert store.has(tagged) and store.has(new)
    assert store.has(shared) and shared == old  # the other owner keeps it
    store.set_tags(new, ["eva.too"], EVA)
    with pytest.raises(Overloaded, match="2 of at most 2"):
        store.add(b"4", EVA)
    store.close()


def test_modules_and_the_store_have_a_size_limit(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, max_module_bytes=10, max_store_bytes=15)
    store = ModuleStore(tmp_path, limits)
    with pytest.raises(InvalidRequest, match="at most 10"):
        store.add(bytes(11), EVA)
    store.add(b"0123456789", ADMIN)
    with pytest.raises(Overloaded, match="of 15 bytes"):
        store.add(b"abcdefghij", EVA)
    assert len(list((tmp_path / "modules").iterdir())) == 1
    store.close()


def test_tag_count_is_limited(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path, replace(DEFAULT_LIMITS, max_tags_per_user=2))
    module = store.add(b"1", EVA)
    with pytest.raises(Overloaded, match="sets 3 more; at most 2"):
        store.set_tags(module, ["eva.a", "eva.b", "eva.c"], EVA)
    assert store.tags() == []
    store.close()


def test_compiled_code_survives_and_is_checked(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path)
    module = store.add(b"wasm", EVA)
    made = store.add_compiled(module, "settings1", b"machine code", '{"x":1}')
    store.close()
    store = ModuleStore(tmp_path)
    assert store.compiled(module, "settings1") == made
    assert store.compiled(module, "settings2") is None
    made.path.write_bytes(b"machine c0de")
    assert store.compiled(module, "settings1") is None
    assert not made.path.exists()
    store.close()


def test_an_upload_never_becomes_compiled_code(tmp_path: Path) -> None:
    """A client controls only the bytes of modules. No upload adds an entry to the cache of compiled code."""
    store = ModuleStore(tmp_path)
    module = store.add(b"wasm", EVA)
    store.add(b"looks like machine code", EVA)
    assert store.compiled(module, "settings1") is None
    (tmp_path / "compiled" / f"{module}-settings1.cwasm").write_bytes(b"put there behind the store's back")
    assert store.compiled(module, "settings1") is None
    store.close()
    store = ModuleStore(tmp_path)
    assert list((tmp_path / "compiled").iterdir()) == []
    store.close()


def test_the_compile_cache_drops_the_least_recently_used(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path, replace(DEFAULT_LIMITS, max_compiled_bytes=25))
    modules = [store.add(bytes([i]), EVA) for i in range(3)]
    store.add_compiled(modules[0], "s", bytes(10), "")
    store.add_compiled(modules[1], "s", bytes(10), "")
    assert store.compiled(modules[0], "s")
    store.add_compiled(modules[2], "s", bytes(10), "")
    assert [bool(store.compiled(module, "s")) for module in modules] == [True, False, True]
    store.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from bridle.aici.protocol import Auth
from bridle.aici.runtime.modules import ModuleStore
store = ModuleStore(Path(sys.argv[1]))
calls = 0
def trace(frame, event, argument):
    global calls
    if frame.f_code.co_filename.endswith(("modules.py", "files.py")):
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
    return trace
sys.settrace(trace)
store.add(b"the module", Auth("eva", False))
sys.settrace(None)
"""


def test_a_crash_at_any_line_leaves_all_or_nothing(tmp_path: Path) -> None:
    """The process is killed at successive lines of `add`. Afterwards, the store is intact and accepts the module."""
    module = hashlib.sha256(b"the module").hexdigest()
    for line in (3, 20, 40, 55, 62, 70, 75, 80, 84, 88, 92, 100, 120):
        folder = tmp_path / str(line)
        done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(line)], timeout=PATIENCE)
        assert done.returncode in (0, -signal.SIGKILL)
        store = ModuleStore(folder)
        files = [path.name for path in (folder / "modules").iterdir()]
        assert files == ([f"{module}.wasm"] if store.has(module) else [])
        assert store.add(b"the module", EVA) == module
        assert store.path(module).read_bytes() == b"the module"
        store.close()


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    one, two = ModuleStore(tmp_path), ModuleStore(tmp_path)
    module = one.add(b"1", EVA)
    two.set_tags(module, ["t"], ADMIN)
    assert one.resolve("t") == module
    one.close()
    two.close()


def test_files_are_private(store: ModuleStore, tmp_path: Path) -> None:
    module = store.add(b"1", EVA)
    assert os.stat(store.path(module)).st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("gh:o/r", GhReference("o", "r")),
        ("gh:o/r/sel", GhReference("o", "r", "sel")),
        ("gh:o/r/latest", GhReference("o", "r", "", "latest")),
        ("gh:o/r/v1.2", GhReference("o", "r", "", "v1.2")),
        ("gh:o/r/sel/v1.2.3-rc", GhReference("o", "r", "sel", "v1.2.3-rc")),
        ("gh:o/r/v1", GhReference("o", "r", "v1")),
    ],
)
def test_a_reference_to_github_is_parsed(text: str, reference: GhReference) -> None:
    assert GhReference.parse(text) == reference


@pytest.mark.parametrize("text", ["gh:o", "gh:", "gh:o/r/a/b", "gh:o//r", "gh:o/r/a/b/c", "gh:o/r?x", "gh:../x"])
def test_a_wrong_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="reference"):
        GhReference.parse(text)


def test_a_reference_resolves_once_it_is_linked(store: ModuleStore) -> None:
    module = store.add(b"1", EVA)
    with pytest.raises(InvalidRequest, match="not installed"):
        store.resolve("gh:o/r")
    store.link("gh:o/r", module)
    assert store.resolve("gh:o/r") == module
