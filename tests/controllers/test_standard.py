"""Tests that each shipped module equals its manifest and the build of its sources, and tests of the small modules."""

from __future__ import annotations

import hashlib
import lzma
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from bridle.aici.runtime.compiler import compile_module
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.controllers import standard
from bridle.controllers.standard import StandardModule, load, load_code, manifest, names
from bridle.errors import ControllerUnavailable, InvalidRequest
from dev.controllers import rebuild
from tests.http.controlled import Client, controlled_model, ids, last_fork, lent, text_of
from tests.http.harness import served, tokenizer
from tests.sources import ROOT

SMALL = ("uppercase", "yesno")


@pytest.mark.parametrize("name", names())
def test_each_is_what_the_manifest_says(name: str) -> None:
    wasm, shipped = load(name), manifest()[name]
    assert hashlib.sha256(wasm).hexdigest() == shipped.sha256 and len(wasm) == shipped.bytes
    assert wasm.startswith(b"\0asm")
    assert set(shipped.tools) and name in rebuild.buildable()


@pytest.mark.parametrize(("name", "settings"), [(name, key) for name in names() for key in manifest()[name].code])
def test_machine_code_is_what_the_manifest_says(name: str, settings: str) -> None:
    loaded, shipped = load_code(name, settings), manifest()[name].code[settings]
    assert loaded is not None and loaded[1] == shipped.facts
    assert hashlib.sha256(loaded[0]).hexdigest() == shipped.sha256 and len(loaded[0]) == shipped.bytes
    assert load_code(name, settings + "0") is None


@pytest.mark.parametrize("name", SMALL)
def test_the_small_ones_are_controllers_that_fork_by_copy(name: str) -> None:
    _, facts = compile_module(load(name), RuntimeLimits())
    assert not facts.problem and facts.is_copyable and facts.dialect == 2


@pytest.mark.parametrize("name", SMALL)
def test_the_sources_give_the_same_bytes(name: str) -> None:
    pytest.importorskip("ziglang", reason="the C compiler is not installed")
    built = rebuild.build(name)
    assert built.verdict == "same", built.sha256


@pytest.mark.slow
@pytest.mark.timeout(900)  # an interpreter is built three times
def test_all_sources_give_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebuild.main([]) == 0, capsys.readouterr().out


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an empty folder that replaces the folder of shipped modules."""
    monkeypatch.setattr(standard, "FOLDER", tmp_path)
    monkeypatch.setattr(standard, "MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setattr(rebuild, "FOLDER", tmp_path)
    monkeypatch.setattr(rebuild, "MANIFEST", tmp_path / "manifest.json")
    (tmp_path / "manifest.json").write_text("{}")
    manifest.cache_clear()
    yield tmp_path
    manifest.cache_clear()


def _recipe(monkeypatch: pytest.MonkeyPatch, wasm: bytes, tools: dict[str, str]) -> None:
    recipe = ModuleType("recipe")
    vars(recipe).update(SOURCES={}, TOOLS=tools, build=lambda out: out.write_bytes(wasm))
    monkeypatch.setattr(rebuild, "recipe_of", lambda name: recipe)
    monkeypatch.setattr(rebuild, "buildable", lambda: ("mine",))


def test_rebuild_compares_and_writes(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _recipe(monkeypatch, b"one", {})
    assert rebuild.main([]) == 1 and "new" in capsys.readouterr().out
    assert not (shelf / "mine.wasm.xz").exists()
    assert rebuild.main(["--write"]) == 0
    assert load("mine") == b"one" and names() == ("mine",)
    assert rebuild.main(["mine"]) == 0 and "same" in capsys.readouterr().out
    _recipe(monkeypatch, b"two", {})
    assert rebuild.main([]) == 1 and "differs" in capsys.readouterr().out
    assert load("mine") == b"one"


def test_rebuild_ships_machine_code_beside(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def recipe(code: bytes) -> None:
        _recipe(monkeypatch, b"one", {})
        made = rebuild.recipe_of("mine")
        made.precompile = lambda wasm: {"key": rebuild.MachineCode("here", code + wasm, "{}")}
        monkeypatch.setattr(rebuild, "recipe_of", lambda name: made)

    recipe(b"code of ")
    assert rebuild.main(["--write"]) == 0 and load_code("mine", "key") == (b"code of one", "{}")
    assert rebuild.main([]) == 0 and "same" in capsys.readouterr().out
    recipe(b"other code of ")
    assert rebuild.main([]) == 1 and "differs" in capsys.readouterr().out
    (shelf / "mine.here.code.xz").write_bytes(b"no code")
    with pytest.raises(ControllerUnavailable, match="damaged: the file's SHA-256"):
        load_code("mine", "key")


def test_rebuild_names_what_is_missing(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _recipe(monkeypatch, b"one", {"no-such-tool": "1.0", "pytest": "0.0.1"})
    assert rebuild.main([]) == 2
    assert "built with no-such-tool 1.0, here it is not installed" in capsys.readouterr().err
    assert rebuild.main(["other"]) == 2
    assert "there are mine" in capsys.readouterr().err


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(InvalidRequest, match=r"no standard controller 'rusty'; known are .*yesno"):
        load("rusty")


def _put(shelf: Path, data: bytes, **changes: str) -> None:
    wasm = b"\0asm and so on"
    entry = StandardModule(
        file="mine.wasm.xz",
        sha256=changes.get("sha256", hashlib.sha256(wasm).hexdigest()),
        xz_sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(wasm),
    )
    (shelf / "mine.wasm.xz").write_bytes(data)
    (shelf / "manifest.json").write_bytes(msgspec.json.encode({"mine": entry}))
    manifest.cache_clear()


def test_damage_is_told(shelf: Path) -> None:
    packed = lzma.compress(b"\0asm and so on")
    _put(shelf, packed)
    assert load("mine") == b"\0asm and so on"
    _put(shelf, packed, sha256="0" * 64)
    with pytest.raises(ControllerUnavailable, match=r"damaged: the file's SHA-256 is .* manifest says 0000"):
        load("mine")
    _put(shelf, packed[:-9])
    with pytest.raises(ControllerUnavailable, match="is cut off"):
        load("mine")
    _put(shelf, b"no xz at all")
    with pytest.raises(ControllerUnavailable, match="damaged"):
        load("mine")
    _put(shelf, packed)
    (shelf / "mine.wasm.xz").write_bytes(packed + b"x")
    with pytest.raises(ControllerUnavailable, match="damaged"):
        load("mine")
    (shelf / "mine.wasm.xz").unlink()
    with pytest.raises(ControllerUnavailable, match="No such file"):
        load("mine")
    (shelf / "manifest.json").write_text("[]")
    manifest.cache_clear()
    with pytest.raises(ControllerUnavailable, match="install bridle again"):
        names()


def test_what_unpacks_to_too_much_is_refused(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "MAX_BYTES", 8)
    _put(shelf, lzma.compress(b"\0asm and so on"))
    with pytest.raises(ControllerUnavailable, match="more than 8 bytes"):
        load("mine")


@pytest.mark.slow
def test_a_wheel_carries_everything(tmp_path: Path) -> None:
    build = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    (path,) = build.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    inside = set(zipfile.ZipFile(path).namelist())
    folder = "bridle/controllers/standard"
    wanted = {f"{folder}/{shipped.file}" for shipped in manifest().values()}
    wanted |= {f"{folder}/{code.file}" for shipped in manifest().values() for code in shipped.code.values()}
    wanted |= {f"{folder}/manifest.json", f"{folder}/include/bridle_controller.h", f"{folder}/include/bridle_steps.h"}
    wanted |= {"bridle/aici/runtime/wit/controller.wit"}
    assert wanted <= inside
    assert not [name for name in inside if name.startswith("dev/")]


# -- what the small ones do --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    def prefers(prefix: list[int]) -> list[float]:
        row = [0.0] * tokenizer().vocab_size
        for rank, token in enumerate(ids("zNaBc")):
            row[token] = 9.0 - rank
        return row

    with controlled_model(tmp_path_factory.mktemp("store"), next_token=prefers) as model, served(lent(model)) as url:
        client = Client(url)
        yield client
        client.close()


def test_yesno_says_one_word(client: Client) -> None:
    items = client.run("yesno", "not read", prompt="Is a whale a fish?")
    assert text_of(items) == "No"  # N is likelier than Y, though z is likelier than both
    assert last_fork(items)["finish_reason"] == "aici-stop" and not last_fork(items)["error"]


def test_uppercase_forces_every_fourth_byte(client: Client) -> None:
    items = client.run("uppercase", prompt="Some words")
    assert text_of(items) == ("NzzzNzzz" * 7)[:50]
    assert last_fork(items)["finish_reason"] == "aici-stop"


def test_uppercase_has_a_prompt_of_its_own(client: Client) -> None:
    given, own = (client.run("uppercase", prompt=prompt) for prompt in ("longer", ""))
    assert text_of(given) == text_of(own)
    assert own[-2]["usage"]["ff_tokens"] > given[-2]["usage"]["ff_tokens"]
