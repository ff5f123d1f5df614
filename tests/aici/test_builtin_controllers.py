"""Tests of controllers that come with bridle: they are compiled outside of requests and of users' limits."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool, WasmController
from bridle.aici.runtime.builtin_controllers import BuiltinControllers
from bridle.aici.runtime.compile_cache import CompiledCode, Compilers
from bridle.aici.runtime.limits import DEFAULT_LIMITS
from bridle.aici.runtime.module_metadata import settings_key
from bridle.aici.runtime.modules import Compiled, ModuleStore
from bridle.controllers.standard import manifest
from bridle.engine import Request
from bridle.errors import ControllerUnavailable, Overloaded
from tests.aici.conftest import CAPABLE, VOCAB_SIZE, Start
from tests.aici.guests import NOOP, guest2
from tests.waiting import PATIENCE, until

SMALL = "uppercase"


class SlowCompilers:
    """Compilers that wait until the test lets them compile."""

    def __init__(self, store: ModuleStore) -> None:
        self._store = store
        self.may_go = threading.Event()
        self.num_compiled = 0
        self.known: dict[str, Compiled] = {}
        self.in_package: CompiledCode | ControllerUnavailable | None = None

    def shipped(self, module: str, name: str) -> CompiledCode | None:
        assert module == manifest()[name].sha256
        if isinstance(self.in_package, ControllerUnavailable):
            raise self.in_package
        return self.in_package

    def cached(self, module: str) -> Compiled | None:
        return self.known.get(module)

    def get(self, module: str) -> Compiled:
        raise AssertionError("the limits for users must not be used")

    def compile_ours(self, wasm: bytes) -> CompiledCode:
        self.may_go.wait(PATIENCE)
        self.num_compiled += 1
        return CompiledCode(wasm, "{}", 1)

    def keep(self, module: str, code: CompiledCode) -> Compiled:
        self.known[module] = compiled = self._store.add_compiled(module, "s", code.code, code.facts)
        return compiled


@pytest.fixture
def compilers(tmp_path: Path) -> Iterator[SlowCompilers]:
    store = ModuleStore(tmp_path)
    made = SlowCompilers(store)
    yield made
    made.may_go.set()
    store.close()


def shipped_with(
    compilers: SlowCompilers, wait_ms: int, kind: type[BuiltinControllers] = BuiltinControllers
) -> BuiltinControllers:
    other: Any = compilers
    return kind(compilers._store, other, replace(DEFAULT_LIMITS, max_prepare_wait=wait_ms))


def test_a_request_is_told_to_come_back_and_then_finds_it(compilers: SlowCompilers) -> None:
    shipped = shipped_with(compilers, 1)
    module = shipped.install(SMALL)
    with pytest.raises(Overloaded, match="uppercase is being compiled for this machine, for 0 s so far") as caught:
        shipped.compiled(module)
    assert caught.value.retry_after > 0
    with pytest.raises(Overloaded):  # joins the same compilation
        shipped.compiled(module)
    patient = shipped_with(compilers, 30_000)
    patient._under_way = shipped._under_way
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(patient.compiled, module) for _ in range(4)]
        compilers.may_go.set()
        assert {each.result(PATIENCE) for each in waiting} == {compilers.known[module]}
    assert compilers.num_compiled == 1
    assert shipped.compiled(module) == compilers.known[module]


def test_a_controller_is_prepared_once(compilers: SlowCompilers) -> None:
    compilers.may_go.set()
    shipped = shipped_with(compilers, 1)
    shipped.prepare([SMALL])
    shipped.prepare([SMALL])
    assert compilers.num_compiled == 1


def test_the_controller_of_the_first_script_is_compiled_before_others(compilers: SlowCompilers) -> None:
    prepared: list[str] = []

    class Recording(BuiltinControllers):
        def prepare(self, names: Iterable[str]) -> None:
            prepared.extend(names)

    shipped_with(compilers, 1, Recording).prepare_in_background(manifest())
    until(lambda: len(prepared) == len(manifest()))
    compiled = [name for name in prepared if not manifest()[name].code]
    assert compiled[0] == "jsctrl" and len(compiled) > 1
    assert prepared[-len(compiled) :] == compiled


def test_code_of_the_package_is_not_compiled(compilers: SlowCompilers) -> None:
    compilers.in_package = CompiledCode(b"machine code", "{}", 0)
    shipped = shipped_with(compilers, 30_000)
    compiled = shipped.compiled(shipped.install(SMALL))
    assert compiled.path.read_bytes() == b"machine code" and compilers.num_compiled == 0


def test_damaged_code_of_the_package_is_told_and_compiled(
    compilers: SlowCompilers, caplog: pytest.LogCaptureFixture
) -> None:
    compilers.in_package = ControllerUnavailable("the standard controller x is damaged")
    compilers.may_go.set()
    shipped = shipped_with(compilers, 30_000)
    shipped.compiled(shipped.install(SMALL))
    assert compilers.num_compiled == 1
    (told,) = caplog.records
    assert told.levelname == "WARNING" and told.name.startswith("bridle.")
    assert "x is damaged; the controller uppercase is compiled on this machine instead" in told.getMessage()


def _code_for_here() -> bool:
    return settings_key(DEFAULT_LIMITS) in manifest()["pyctrl"].code


@pytest.mark.skipif(not _code_for_here(), reason="the package has no machine code for this machine")
def test_scripts_in_python_run_where_nothing_can_be_compiled(start: Start, tmp_path: Path) -> None:
    limits = ("max_shipped_compile_time=1", "max_prepare_wait=60000", "max_init_time=20000")
    llm = start(*CAPABLE, *(word for limit in limits for word in ("--limit", limit)), store=tmp_path)
    script = "import pyaici.server as aici\nasync def main(): pass\naici.start(main())"
    answer = llm.start("pyctrl", 1, arg=script)
    assert answer["error"] == "" and answer["result"]["branches"] == []
    _, reply = llm.instantiate("declctrl", "")
    assert "longer than the limit of 1 ms" in str(reply)


def test_code_of_the_package_is_for_its_settings_alone_and_taken_once(tmp_path: Path) -> None:
    """Code is compiled again for other settings, such as another stack size, and if a worker could not load the
    code."""
    store = ModuleStore(tmp_path)
    nursery: Any = None
    module = manifest()["pyctrl"].sha256
    other = Compilers(nursery, store, replace(DEFAULT_LIMITS, max_wasm_stack=1 << 19))
    assert other.shipped(module, "pyctrl") is None
    here = Compilers(nursery, store, DEFAULT_LIMITS)
    assert (here.shipped(module, "pyctrl") is not None) == _code_for_here()
    assert here.shipped(manifest()[SMALL].sha256, SMALL) is None
    here.reject(module)
    assert here.shipped(module, "pyctrl") is None
    store.close()


def test_limits_of_users_do_not_hold_for_them(start: Start, tmp_path: Path) -> None:
    """The limits allow no uploads or compilations of users, and the built-in controllers are still ready."""
    limits = ("--limit", "max_compile_time=1", "--limit", "max_prepare_wait=30000")
    llm = start(*CAPABLE, *limits, store=tmp_path)
    assert llm.start(SMALL, 1)["error"] == ""
    assert "longer than the limit of 1 ms" in llm.side(op="mk_module", binary=_BIG)["error"]


def test_prepared_at_the_start(start: Start, tmp_path: Path) -> None:
    llm = start(*CAPABLE, "--prepare", store=tmp_path, command=_own(only=SMALL))
    llm.main(op="ping")
    until(lambda: any(manifest()[SMALL].sha256 in path.name for path in (tmp_path / "compiled").iterdir()))


def test_no_room_is_told_with_a_time_to_come_back(tokenizer: Path, store: Path) -> None:
    args = ("--store", str(store), "--limit", "max_instances=1", "--limit", "max_prepare_wait=600000")
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=args, json_size=8), VOCAB_SIZE)
    try:
        first, second = (pool.open(Request(name, (1,), controller=WasmController(SMALL))) for name in "ab")
        errors = [each.exception(PATIENCE) for each in (first, second)]
        assert [type(error) for error in errors if error] == [Overloaded]
        assert "1 of at most 1 instances" in str(errors) and max(e.retry_after for e in errors if e) > 0  # type: ignore[attr-defined]
    finally:
        pool.shutdown()


def _own(only: str) -> tuple[str, ...]:
    """bridle's runtime with `only` one built-in controller, because interpreters take long to compile."""
    import sys

    program = (
        "import sys; from bridle.controllers import standard as s; from bridle.aici.runtime.main import main\n"
        f"kept = {{'{only}': s.manifest()['{only}']}}; s.manifest = lambda: kept; sys.exit(main(sys.argv[1:]))"
    )
    return (sys.executable, "-c", program)


def _encoded(wasm: bytes) -> str:
    import base64

    return base64.b64encode(wasm).decode()


_BIG = _encoded(guest2([NOOP for _ in range(4000)]))
