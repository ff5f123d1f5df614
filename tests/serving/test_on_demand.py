"""Models are loaded on demand and unloaded if memory is needed. One load serves all waiting requests, and no model is
loaded without a request."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from bridle.config import ModelConfig
from bridle.errors import (
    EngineClosed,
    InvalidRequest,
    ModelUnavailable,
    RequestCancelled,
    UnknownModel,
    UnsupportedFeature,
    UnsupportedModel,
)
from bridle.load_progress import on_download
from bridle.serving import AdapterSet, AdapterSpec, Lease, ModelRegistry, ModelSet, ModelState, build_registry
from bridle.serving.models.catalog import ModelCatalog
from bridle.serving.models.model_loader import FAILURE_SECONDS, ModelManager
from bridle.testing.clock import FakeClock
from tests.serving.fake_adapters import AdapterFakes, write_adapter
from tests.serving.loaders import MIB, FakeLoader, registry_of
from tests.waiting import PATIENCE, until_async


async def until(registry: ModelRegistry, name: str, stage: str) -> None:
    """Let the event loop run until a load has reached the given stage."""
    async with asyncio.timeout(PATIENCE):
        while registry.slot_of(name).stage != stage:  # noqa: ASYNC110 - a thread writes it, and tells nobody
            await asyncio.sleep(0.001)


async def test_one_load_serves_all_who_wait_for_it_and_a_loaded_model_is_there_at_once() -> None:
    loader = FakeLoader({"a": 10}, is_held=True)
    registry = registry_of(loader)
    assert registry.state_of("a") is ModelState.LOADABLE
    waiting = [asyncio.create_task(registry.acquire("a")) for _ in range(20)]
    await until(registry, "a", "reading weights")
    assert registry.state_of("a") is ModelState.LOADING
    assert registry.slot_of("a").share == 0.5
    loader.go.set()
    leases = await asyncio.gather(*waiting)
    assert loader.loads == ["a"]
    assert {id(lease.model) for lease in leases} == {id(loader.models["a"])}
    with await registry.acquire("a") as model:
        assert model is loader.models["a"]
    assert registry.state_of("a") is ModelState.LOADED
    assert registry.slot_of("a").num_leases == 20
    for lease in leases:
        lease.release()
        lease.release()
    assert registry.slot_of("a").num_leases == 0


async def test_others_are_served_while_a_model_loads() -> None:
    loader = FakeLoader({"good": 1, "slow": 1})
    registry = registry_of(loader, named=("good",))
    loader.go.clear()
    waiting = asyncio.create_task(registry.acquire("slow"))
    await until(registry, "slow", "reading weights")
    (await registry.acquire("good", timeout=0)).release()
    loader.go.set()
    (await waiting).release()


async def is_finding(registry: ModelRegistry, name: str) -> asyncio.Task[Lease]:
    """Request a model, and wait until its load is in the lookup stage."""
    waiting = asyncio.create_task(registry.acquire(name))
    await until_async(lambda: registry.slot_of(name).num_waiting, "that the load begins")
    await until(registry, name, "finding the model")
    return waiting


async def give_up(registry: ModelRegistry, name: str) -> None:
    """Request a model, and cancel during its lookup."""
    waiting = await is_finding(registry, name)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_loads_that_are_given_up_leave_one_thread_that_the_next_one_joins() -> None:
    loader, go = FakeLoader({"a": 10}), threading.Event()
    loader.on_measure = lambda: go.wait(PATIENCE)
    registry = registry_of(loader)
    for _ in range(5):
        await give_up(registry, "a")
    assert loader.measured == ["a"]
    waiting = await is_finding(registry, "a")
    go.set()
    (await waiting).release()
    assert loader.measured == ["a"] and registry.slot_of("a").finding is None


async def test_a_download_ends_once_nobody_waits_for_it_and_a_later_one_begins_again() -> None:
    loader, go, ends = FakeLoader({"a": 10}), threading.Event(), list[BaseException | None]()

    def download() -> None:
        assert go.wait(PATIENCE)
        try:
            on_download()(0.5)
        except BaseException as error:
            ends.append(error)
            raise
        ends.append(None)

    loader.on_measure = download
    registry = registry_of(loader)
    await give_up(registry, "a")
    slot = registry.slot_of("a")
    go.set()
    await until_async(lambda: slot.finding is None, "that the thread ends")
    assert [type(end) for end in ends] == [RequestCancelled] and slot.failure is None
    (await registry.acquire("a")).release()
    assert ends[1:] == [None] and loader.loads == ["a"]


async def test_a_load_that_begins_while_another_is_stopped_is_not_stopped() -> None:
    loader, go = FakeLoader({"a": 10}), threading.Event()

    def stop() -> None:
        if len(loader.measured) == 1:
            assert go.wait(PATIENCE)
            raise RequestCancelled("nobody waits")  # as it saw a moment before the next load began

    loader.on_measure = stop
    registry = registry_of(loader)
    await give_up(registry, "a")
    waiting = await is_finding(registry, "a")
    go.set()
    (await waiting).release()
    assert loader.measured == ["a", "a"]


async def test_a_load_that_fails_is_one_clear_error_and_is_remembered_for_a_while() -> None:
    clock = FakeClock()
    loader = FakeLoader({"a": 10}, is_held=True)
    loader.error = OSError("/secret/place broke")
    registry = registry_of(loader, clock=clock)
    waiting = [asyncio.create_task(registry.acquire("a")) for _ in range(3)]
    await until(registry, "a", "reading weights")
    loader.go.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    message = "the model 'a' could not be loaded: an unexpected error; the server's log has more"
    assert [str(result) for result in results] == [message] * 3
    assert all(isinstance(result, ModelUnavailable) for result in results)
    with pytest.raises(ModelUnavailable, match="could not be loaded"):
        await registry.acquire("a")
    assert loader.loads == ["a"]
    loader.error = None
    clock.advance(FAILURE_SECONDS)
    (await registry.acquire("a")).release()
    assert loader.loads == ["a", "a"]


async def test_an_error_tells_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "bad"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    registry = ModelRegistry(
        catalog=ModelCatalog(models_dir=tmp_path / "models"), keeper=ModelManager(FakeLoader({}), None)
    )
    with pytest.raises(ModelUnavailable, match="could not be loaded: there is no 'bad'"):
        await registry.acquire("bad")


async def test_a_wait_ends_at_its_deadline_and_the_load_goes_on() -> None:
    loader = FakeLoader({"a": 10}, is_held=True)
    registry = registry_of(loader)
    waiting = asyncio.create_task(registry.acquire("a"))
    await until(registry, "a", "reading weights")
    with pytest.raises(ModelUnavailable, match=r"'a' is not loaded after 0 s \(reading weights\)"):
        await registry.acquire("a", timeout=0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert registry.state_of("a") is ModelState.LOADING
    loader.go.set()
    (await registry.acquire("a")).release()
    assert loader.loads == ["a"]


async def test_the_model_idle_for_longest_makes_room() -> None:
    clock = FakeClock()
    loader = FakeLoader({"a": 40, "b": 40, "c": 40})
    registry = registry_of(loader, max_mib=130, clock=clock, kv_mib=10)
    for name in ("a", "b", "a"):
        clock.advance(1)
        (await registry.acquire(name)).release()
    (await registry.acquire("c")).release()
    assert [registry.state_of(name).value for name in "abc"] == ["loaded", "loadable", "loaded"]
    assert loader.models["b"].client.closed_with == 0.0  # type: ignore[attr-defined]
    (await registry.acquire("b")).release()
    assert loader.loads == ["a", "b", "c", "b"]


async def test_a_model_in_use_never_goes_and_who_needs_its_room_waits() -> None:
    loader = FakeLoader({"a": 60, "b": 60})
    registry = registry_of(loader, max_mib=100)
    lease = await registry.acquire("a")
    waiting = asyncio.create_task(registry.acquire("b"))
    await until(registry, "b", "waiting for room")
    with pytest.raises(ModelUnavailable, match=r"'b' is not loaded after 0 s \(waiting for room\)"):
        await registry.acquire("b", timeout=0)
    with pytest.raises(ModelUnavailable, match="'a' cannot be unloaded: 1 requests use it"):
        await registry.unload("a")
    assert registry.state_of("a") is ModelState.LOADED
    lease.release()
    (await waiting).release()
    assert registry.state_of("a") is ModelState.LOADABLE


async def test_a_load_that_nobody_waits_for_any_more_is_given_up_and_disturbs_nobody() -> None:
    loader = FakeLoader({"a": 60, "b": 60, "c": 30})
    registry = registry_of(loader, max_mib=100)
    lease = await registry.acquire("a")
    waiting = asyncio.create_task(registry.acquire("b"))
    await until(registry, "b", "waiting for room")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert registry.state_of("b") is ModelState.LOADABLE
    assert registry.state_of("a") is ModelState.LOADED
    lease.release()
    (await registry.acquire("c")).release()
    assert loader.loads == ["a", "c"]


async def test_bogus_names_disturb_no_model() -> None:
    loader = FakeLoader({"a": 60})
    registry = registry_of(loader, max_mib=100)
    (await registry.acquire("a")).release()
    for name in ("b", "../a", "/etc", "a/../a", "A", "x" * 10_000, "a\x00"):
        with pytest.raises(UnknownModel, match="not served here; served: 'a'"):
            await registry.acquire(name)
    assert registry.state_of("a") is ModelState.LOADED
    assert loader.loads == ["a"]


async def test_what_can_never_fit_is_refused_without_closing_anything() -> None:
    loader = FakeLoader({"a": 10, "huge": 200})
    registry = registry_of(loader, max_mib=100)
    (await registry.acquire("a")).release()
    with pytest.raises(
        ModelUnavailable,
        match="'huge' needs 250 MiB with the smallest possible KV cache; all models together may take 100 MiB",
    ):
        await registry.acquire("huge")
    assert registry.state_of("a") is ModelState.LOADED


async def test_admins_unload_by_hand() -> None:
    loader = FakeLoader({"a": 10, "good": 1})
    registry = registry_of(loader, named=("good",))
    (await registry.acquire("a")).release()
    await registry.unload("a")
    assert registry.state_of("a") is ModelState.LOADABLE
    await registry.unload("a")
    with pytest.raises(UnsupportedFeature, match="'good' is served permanently"):
        await registry.unload("good")


async def test_closing_ends_loads_and_models() -> None:
    loader = FakeLoader({"a": 10, "b": 10}, is_held=True)
    registry = registry_of(loader)
    waiting = asyncio.create_task(registry.acquire("a"))
    await until(registry, "a", "reading weights")
    registry.close()
    loader.go.set()
    with pytest.raises(EngineClosed):
        await waiting
    with pytest.raises(EngineClosed):
        await registry.acquire("b")


async def test_thousands_of_short_uses_leave_nothing_behind() -> None:
    loader = FakeLoader(dict.fromkeys("abcde", 40))
    registry = registry_of(loader, max_mib=130, kv_mib=10)

    async def use(number: int) -> None:
        with await registry.acquire("abcde"[number * number % 5]) as model:
            assert model.client.closed_with is None  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            assert model.client.closed_with is None  # type: ignore[attr-defined]

    for begin in range(0, 400, 40):
        await asyncio.gather(*(use(number) for number in range(begin, begin + 40)))
    assert all(slot.num_leases == slot.num_waiting == 0 for slot in registry.slots)
    loaded = [slot for slot in registry.slots if slot.model is not None]
    assert 0 < sum(slot.num_bytes for slot in loaded) <= 130 * MIB


# -- memory ------------------------------------------------------------------------------------------------------


def test_the_kv_budget_is_split_evenly_at_the_start() -> None:
    loader = FakeLoader({"a": 20, "b": 40})
    registry_of(loader, max_mib=150, named=("a", "b"))
    assert [loader.configs[name].max_kv_memory for name in "ab"] == [30 * MIB, 30 * MIB]


async def test_a_model_on_demand_gets_half_of_what_is_left_for_its_kv_cache() -> None:
    loader = FakeLoader({"a": 20, "b": 40})
    registry = registry_of(loader, max_mib=100)
    (await registry.acquire("b")).release()
    assert loader.configs["b"].max_kv_memory == 30 * MIB
    (await registry.acquire("a")).release()
    assert loader.configs["a"].max_kv_memory == 5 * MIB


def test_flags_override_the_split() -> None:
    loader = FakeLoader({"a": 20, "b": 20})
    models = ModelSet(("a", "b"), max_memory=100 * MIB)
    registry, load_named = build_registry(models, ModelConfig("a", kv_memory=7 * MIB), loader)
    load_named()
    assert [model.num_bytes for model in registry] == [27 * MIB] * 2


async def test_what_is_set_aside_for_adapters_is_counted(tmp_path: Path) -> None:
    """`a` and `b` are loaded at startup, and `c` on demand. Each gets 30 of the 200 MiB for its adapters."""
    loader = AdapterFakes({"a": 20, "b": 20, "c": 20}, room=30)
    models = ModelSet(("a", "b"), allow_hub=("c",), max_memory=200 * MIB)
    registry, load_named = build_registry(models, ModelConfig("a"), loader, None, AdapterSet(folder=tmp_path))
    load_named()
    assert {config.reserved_memory for config in loader.configs.values()} == {30 * MIB}
    assert [loader.configs[name].max_kv_memory for name in "ab"] == [100 * MIB // 3] * 2  # of 200 - 2 * (20 + 30)
    (await registry.acquire("c")).release()  # in the place of one of the others
    assert [registry.state_of(name).value for name in "abc"] == ["loadable", "loaded", "loaded"]
    assert sum(model.num_bytes for model in registry) <= 200 * MIB
    assert loader.configs["c"].reserved_memory == 30 * MIB


def test_only_models_that_may_have_adapters_set_memory_aside(tmp_path: Path) -> None:
    named = AdapterSet((AdapterSpec("x", str(write_adapter(tmp_path / "x")), model="b"),))
    loader = AdapterFakes({"a": 20, "b": 20}, room=30)
    registry, load_named = build_registry(
        ModelSet(("a", "b"), max_memory=150 * MIB), ModelConfig(), loader, None, named
    )
    load_named()
    assert [loader.configs[name].reserved_memory for name in "ab"] == [None, 30 * MIB]
    assert [loader.configs[name].max_kv_memory for name in "ab"] == [40 * MIB] * 2
    assert [model.num_bytes for model in registry] == [60 * MIB, 90 * MIB]


def test_adapters_that_leave_no_room_are_named_in_the_error(tmp_path: Path) -> None:
    loader = AdapterFakes({"a": 20}, room=90)
    models = ModelSet(("a",), max_memory=100 * MIB)
    _, load_named = build_registry(models, ModelConfig(), loader, None, AdapterSet(folder=tmp_path))
    with pytest.raises(
        UnsupportedModel,
        match="a needs 115 MiB with the smallest possible KV cache and 90 MiB for adapters; all models together "
        "may take 100 MiB; raise --max-model-memory, or lower --adapter-memory and --adapter-host-memory",
    ):
        load_named()


# -- names -------------------------------------------------------------------------------------------------------


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_only_folders_that_really_lie_under_the_models_folder_have_names(tmp_path: Path) -> None:
    root, outside = tmp_path / "models", model_folder(tmp_path / "outside")
    good, deep = model_folder(root / "good"), model_folder(root / "org" / "deep")
    (root / "link").symlink_to(outside)
    (root / "empty").mkdir()
    (root / ".hidden").symlink_to(good)
    leaky = model_folder(root / "leaky")
    (leaky / "model.safetensors").symlink_to("/etc/passwd")
    inner = model_folder(root / "inner")
    (inner / "tokenizer.json").symlink_to(good / "config.json")
    model_folder(root / "a" / "b" / "c")
    catalog = ModelCatalog(ModelConfig(dtype="float16", revision="v1"), models_dir=root)
    assert catalog.names() == ["good", "inner", "org/deep"]
    assert catalog.find("good") == ModelConfig(str(good), dtype="float16")
    assert catalog.find("org/deep") == ModelConfig(str(deep), dtype="float16")
    names = ["link", "empty", ".hidden", "leaky", "..", ".", "", "/", "good/", "good/..", "../models/good", str(good)]
    names += ["org//deep", "org/../good", "a/b/c", "~", "good\x00", "good\n", "x" * 5000, "org", "C:good", "good\\x"]
    assert [name for name in names if catalog.find(name) is not None] == []
    model_folder(root / "new")
    assert catalog.find("new") is not None


def test_hub_ids_are_those_allowed() -> None:
    catalog = ModelCatalog(hub_ids=["org/name"])
    assert catalog.find("org/name") == ModelConfig("org/name")
    assert catalog.find("org/other") is None
    with pytest.raises(InvalidRequest, match=r"allow_hub is '\.\./name'"):
        ModelCatalog(hub_ids=["../name"])


def test_pulled_models_have_names_if_the_operator_lets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_MODELS", str(tmp_path))
    (tmp_path / "minilm").mkdir()
    (tmp_path / "mine").mkdir()
    catalog = ModelCatalog(pulled=True)
    assert catalog.names() == ["minilm"] and not catalog.is_empty
    assert catalog.find("minilm") == ModelConfig(str(tmp_path / "minilm"))
    assert [name for name in ("all-minilm", "smollm2", "mine", str(tmp_path / "mine")) if catalog.find(name)] == []
    assert catalog.find("demo") is not None
    assert not catalog.has_own and ModelCatalog(hub_ids=["org/name"]).has_own
    closed = ModelCatalog()
    assert closed.is_empty and closed.names() == [] and closed.find("minilm") is closed.find("demo") is None


async def test_aliases_mean_known_models_or_name_new_ones(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "models" / "local")
    elsewhere = model_folder(tmp_path / "elsewhere")
    aliases = (("gpt-4", "a"), ("chat", "local"), ("big", str(elsewhere)), ("large", str(elsewhere)))
    loader = FakeLoader({"a": 1, str(folder): 1, str(elsewhere): 1})
    models = ModelSet(("a",), aliases, models_dir=tmp_path / "models", max_memory=1000 * MIB)
    registry, load_named = build_registry(models, ModelConfig("a", revision="v1"), loader)
    load_named()
    assert loader.configs["a"].revision == "v1"
    leases = {name: await registry.acquire(name) for name in ("gpt-4", "chat", "big", "large", "")}
    assert {name: lease.model.name for name, lease in leases.items()} == {
        "gpt-4": "a", "chat": "local", "big": "big", "large": "big", "": "a",
    }  # fmt: skip
    assert loader.loads == ["a", str(folder), str(elsewhere)]
    assert await registry.all_names() == ["a", "big", "local", "gpt-4", "chat", "large"]


async def test_auto_has_no_default_but_serves_what_is_named() -> None:
    loader = FakeLoader({"org/name": 1})
    models = ModelSet(("auto",), allow_hub=("org/name",), max_memory=100 * MIB)
    registry, load_named = build_registry(models, ModelConfig("auto"), loader)
    load_named()
    assert registry.is_healthy
    assert (registry.names, registry.loadable_names) == ([], ["org/name"])
    with pytest.raises(UnknownModel, match="this server has no default model"):
        await registry.acquire(None)
    (await registry.acquire("org/name")).release()
    with pytest.raises(UnknownModel, match="this server has no default model"):
        await registry.acquire(None)


async def test_static_loads_and_unloads_nothing() -> None:
    loader = FakeLoader({"a": 1, "b": 1})
    models = ModelSet(("a",), (("alias", "a"),), is_static=True, max_memory=100 * MIB)
    registry, load_named = build_registry(models, ModelConfig("a"), loader)
    load_named()
    lease: Lease = await registry.acquire("alias")
    lease.release()
    for name in ("b", "a2"):
        with pytest.raises(UnknownModel):
            await registry.acquire(name)
    with pytest.raises(UnsupportedFeature):
        await registry.unload("a")


@pytest.mark.parametrize(
    ("models", "base", "name", "message"),
    [
        (ModelSet(("a", "a")), ModelConfig("a"), None, "the model name 'a' is in use already"),
        (ModelSet(("a", "b")), ModelConfig("a"), "mine", "served_name is 'mine'; this setting applies to one model"),
        (
            ModelSet(("a", "b")),
            ModelConfig("a", revision="v1"),
            None,
            "revision is 'v1'; this setting applies to one model",
        ),
        (ModelSet(("a",), (("a", "b"),)), ModelConfig("a"), None, "the model name 'a' is in use already"),
        (
            ModelSet(("a",), (("x", "no/such/folder"),)),
            ModelConfig("a"),
            None,
            "neither a folder, a GGUF file nor a hub id",
        ),
        (
            ModelSet(("a",), (("x", "b"),), is_static=True),
            ModelConfig("a"),
            None,
            "with static no other model is loaded",
        ),
        (ModelSet(("a",), models_dir=Path("/no/where")), ModelConfig("a"), None, "models_dir /no/where cannot be used"),
    ],
)
def test_sets_that_contradict_themselves_are_refused(
    models: ModelSet, base: ModelConfig, name: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        build_registry(models, base, FakeLoader({}), name)
