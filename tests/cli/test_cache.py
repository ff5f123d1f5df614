"""`bridle cache` lists and clears cached data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bridle.cli import main
from bridle.file_cache import FileCache, entries
from bridle.kv_store import SegmentStore, default_folder
from bridle.kv_store.records import tenant_tag
from bridle.kv_store.store import list_scopes


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))
    for kind, name in (("models", "first"), ("models", "second"), ("tries", "trie-2")):
        files = FileCache(kind)
        assert files.write(files.path(name, b"key"), b"text", [np.zeros(1 << 20, np.uint8)])


def test_what_is_kept_is_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["cache", "list"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert sorted(row.split()[0] for row in rows) == ["models", "models", "tries"]
    assert last == f"3 entries, 3.2 MB of at most 21474.8 MB, in {tmp_path / 'cache'}"
    assert main(["cache", "list", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {Path(record["path"]) for record in records} == {entry.path for entry in entries()}
    assert all(record["num_bytes"] > 1 << 20 and record["kind"] in ("models", "tries") for record in records)


def test_what_is_kept_is_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", "first"]) == 0
    assert capsys.readouterr().out == "removed 1 entries, 1.1 MB\n" and len(entries()) == 2
    assert main(["cache", "clear", "nothing"]) == 0
    assert capsys.readouterr().out == "removed 0 entries, 0.0 MB\n"
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "removed 2 entries, 2.1 MB\n" and entries() == []


def test_kv_blocks_are_listed_and_cleared_by_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = default_folder()
    folder.mkdir(parents=True)
    stores = [SegmentStore(folder, scope, 1 << 20) for scope in ("qwen-1", "demo-2")]
    for store in stores:
        assert store.append(bytes(range(16)), tenant_tag("ann"), bytes(10_000))
        store.close()
    assert main(["cache", "list"]) == 0
    *_, first, second, total, kv = capsys.readouterr().out.splitlines()
    assert {line.split()[-1] for line in (first, second)} == {"qwen-1", "demo-2"}
    assert total.startswith("3 entries, ")
    assert kv == "KV of 2 models, 0.0 MB"
    assert main(["cache", "list", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["path"] for record in records if record["kind"] == "kv"] == [
        str(scope.folder) for scope in list_scopes(folder)
    ]
    assert main(["cache", "clear", "qwen"]) == 0
    assert capsys.readouterr().out == "removed 0 entries, 0.0 MB\nremoved KV of 1 model, 0.0 MB\n"
    assert [scope.folder.name for scope in list_scopes(folder)] == ["demo-2"]
    assert main(["cache", "clear"]) == 0
    assert list_scopes(folder) == []


def test_a_user_is_forgotten_in_the_default_folder_and_in_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for folder in (default_folder(), tmp_path / "other"):
        folder.mkdir(parents=True)
        store = SegmentStore(folder, "model", 1 << 20)
        for number, user in enumerate(("ann", "ben", "ann")):
            assert store.append(bytes([number + 1] * 16), tenant_tag(user), b"block")
        store.close()
    assert main(["cache", "forget", "ann"]) == 0
    assert capsys.readouterr().out == "erased 2 blocks\n"
    assert main(["cache", "forget", "ben", "--kv-store", str(tmp_path / "other")]) == 0
    assert capsys.readouterr().out == "erased 1 blocks\n"
    assert len(SegmentStore(default_folder(), "model", 1 << 20)) == 1
    assert len(SegmentStore(tmp_path / "other", "model", 1 << 20)) == 2


def test_a_wrong_limit_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_CACHE_LIMIT", "much")
    assert main(["cache", "list"]) == 2
    assert "BRIDLE_CACHE_LIMIT is 'much'; must be a number of bytes" in capsys.readouterr().err
