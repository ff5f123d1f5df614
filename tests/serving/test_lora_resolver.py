"""Tests of adapters for requests: names of the base model, one load for many requests, and errors without leaks."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from bridle import lora
from bridle.config import ModelConfig
from bridle.errors import AdapterRefused, InvalidRequest, ModelUnavailable, UnknownAdapter, UnknownModel
from bridle.lora.negative_cache import FAILURE_SECONDS
from bridle.serving import AdapterSet, ModelRegistry
from bridle.serving.lora.lora_config import AdapterCatalog
from bridle.serving.models.catalog import ModelCatalog
from bridle.serving.models.model_loader import ModelManager
from bridle.testing.clock import FakeClock
from tests.serving.fake_adapters import FakeHome, with_adapters, write_adapter
from tests.serving.fakes import fake_model
from tests.serving.loaders import FakeLoader


class Desk:
    """A registry with one model that has the adapter `french`, and may load adapters from a folder."""

    def __init__(self, root: Path, is_held: bool = False) -> None:
        self.root = root
        self.model = fake_model(name="demo")
        self.home: FakeHome = with_adapters(self.model, FakeHome())
        self.registry = ModelRegistry(adapters=AdapterCatalog(AdapterSet(folder=root)))
        self.registry.add(self.model, aliases=["gpt-4"])
        self.clock = self.registry.adapters.clock = FakeClock()
        self.model.adapters.add("french", str(write_adapter(root.parent / "french")))
        self.model.adapters.fetch("french").result()
        self.home.is_held = is_held
        self.home.began.clear()

    async def fetch(self, name: str | None, timeout: float | None = None) -> str | None:
        return await self.registry.adapters.fetch(self.model, name, timeout)

    @property
    def names(self) -> list[str]:
        return [info.name for info in self.model.adapters.list()]

    def release(self) -> None:
        """Let all loads finish."""
        for key in list(self.home.waiting):
            self.home.release(key)

    async def until_loading(self) -> None:
        assert await asyncio.to_thread(self.home.began.wait, 30)
        self.home.began.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "adapters"
    root.mkdir()
    return root


async def test_names_that_mean_the_model_alone(root: Path) -> None:
    desk = Desk(root)
    for name in (None, "", "tgi", "dummy", "demo", "gpt-4"):
        assert desk.registry.adapters.is_ready(desk.model, name)
        assert await desk.fetch(name) is None
    assert await desk.fetch("french") == "french"
    with pytest.raises(UnknownAdapter, match=r"no adapter 'nobody'.*'french'"):
        await desk.fetch("nobody")
    with pytest.raises(UnknownAdapter) as refusal:
        await desk.fetch("x" * 100_000)
    assert len(str(refusal.value)) < 400


def test_a_name_chooses_a_model_or_an_adapter(root: Path) -> None:
    registry = Desk(root).registry
    assert registry.choose("french") == registry.choose("french", "french") == ("demo", "french")
    assert registry.choose("gpt-4", "french") == ("gpt-4", "french")
    assert registry.choose("tgi") == ("tgi", None)
    for name, adapter in (("nobody", None), ("nobody", "french"), ("french", "nobody"), ("nobody:french", None)):
        with pytest.raises(UnknownModel, match="served: 'demo', 'gpt-4', 'french'"):
            registry.choose(name, adapter)


async def test_a_name_may_say_whose_adapter_is_meant(root: Path) -> None:
    desk = Desk(root)
    registry = desk.registry
    second = fake_model(name="org/second:v1")
    with_adapters(second)
    second.adapters.add("french", str(root.parent / "french"))
    registry.add(second)
    assert registry.choose("french") == ("demo", "french")
    assert registry.choose("demo:french") == registry.choose("demo:french", "french") == ("demo", "french")
    assert registry.choose("gpt-4:french", "") == ("gpt-4", "french")
    assert registry.choose("org/second:v1:french") == ("org/second:v1", "french")
    for name, adapter in (("demo:", None), (":french", None), ("demo:french", "german"), ("x:" * 50_000, None)):
        with pytest.raises(UnknownModel):
            registry.choose(name, adapter)
    chosen = registry.choose("demo:nobody")
    with pytest.raises(UnknownAdapter, match="'demo' has no adapter 'nobody'"):
        await desk.fetch(chosen.adapter)
    desk.model.adapters.add("demo:french", str(root.parent / "french"))  # an adapter's own name comes first
    assert registry.choose("demo:french") == ("demo", "demo:french")


async def test_no_adapter_takes_the_name_of_a_model_that_may_be_loaded(root: Path) -> None:
    desk = Desk(root)
    keeper = ModelManager(FakeLoader({"late": 1}))
    desk.registry = ModelRegistry(
        [desk.model], catalog=ModelCatalog(ModelConfig(), hub_ids=("late",)), keeper=keeper,
        adapters=desk.registry.adapters.catalog,
    )  # fmt: skip
    write_adapter(root / "late")
    with pytest.raises(InvalidRequest, match="a model has the name 'late'"):
        await desk.registry.adapters.load(desk.model, "late", "late")
    assert await desk.registry.all_adapters() == [("demo", "french")]
    assert (await desk.registry.adapters.load(desk.model, "mine", "late")).state == "host"
    assert desk.registry.choose("late:mine") == ("late", "mine")


async def test_what_lies_in_the_folder_is_loaded_when_it_is_named(root: Path) -> None:
    desk = Desk(root)
    write_adapter(root / "new")
    assert desk.registry.choose("new") == ("demo", "new")
    assert await desk.fetch("new") == "new"
    assert desk.names == ["french", "new"]


async def test_many_requests_for_one_adapter_are_one_load_and_others_go_on(root: Path) -> None:
    desk = Desk(root, is_held=True)
    write_adapter(root / "new")
    waiting = [asyncio.create_task(desk.fetch("new")) for _ in range(20)]
    await desk.until_loading()
    assert await desk.fetch("french") == "french" and await desk.fetch(None) is None
    assert not any(task.done() for task in waiting)
    desk.release()
    assert await asyncio.gather(*waiting) == ["new"] * 20
    assert desk.names == ["french", "new"]


async def test_a_wait_ends_at_its_deadline_and_the_load_goes_on(root: Path) -> None:
    desk = Desk(root, is_held=True)
    write_adapter(root / "new")
    patient = asyncio.create_task(desk.fetch("new"))
    await desk.until_loading()
    with pytest.raises(ModelUnavailable, match="the adapter 'new' is not loaded after 0 s"):
        await desk.fetch("new", 0)
    left = asyncio.create_task(desk.fetch("new"))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    desk.release()
    assert await patient == "new"


async def test_what_cannot_be_used_leaves_nothing_behind_and_may_be_mended(root: Path) -> None:
    desk = Desk(root)
    write_adapter(root / "wide", rank=100)
    write_adapter(root / "torn")
    desk.home.broken.add("torn")
    for name, reason in (("wide", "the rank is 100"), ("torn", "torn/adapter_model.safetensors changed")):
        with pytest.raises(AdapterRefused, match=reason) as refusal:
            await desk.fetch(name)
        assert str(root) not in str(refusal.value)
    assert desk.names == ["french"] and len(desk.home.files) == 1
    write_adapter(root / "wide", rank=4)
    desk.home.broken.clear()
    assert await desk.fetch("wide") == "wide"
    with pytest.raises(AdapterRefused, match=r"torn/adapter_model.safetensors changed"):
        await desk.fetch("torn")  # its files are as they were
    desk.clock.advance(FAILURE_SECONDS)
    assert await desk.fetch("torn") == "torn"


async def test_a_flood_for_a_broken_one_looks_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, looks = Desk(root), count_looks(monkeypatch)
    write_adapter(root / "wide", rank=100)
    assert desk.registry.adapters.failure_of("demo", "wide") is None
    waiting = await asyncio.gather(*(desk.fetch("wide") for _ in range(20)), return_exceptions=True)
    for error in [*waiting, *[await failure(desk, "wide") for _ in range(100)]]:
        assert isinstance(error, AdapterRefused) and error.param == "adapter"
        assert "the rank is 100" in str(error) and str(root) not in str(error)
    assert looks == [str(root / "wide")]
    assert "the rank is 100" in str(desk.registry.adapters.failure_of("demo", "wide"))
    with pytest.raises(AdapterRefused, match="the rank is 100"):
        await desk.registry.adapters.load(desk.model, "mine", "wide")  # an admin asks for another look
    assert len(looks) == 2
    with pytest.raises(UnknownAdapter):
        await desk.fetch("mine")
    shutil.rmtree(root / "wide")
    with pytest.raises(UnknownAdapter):
        await desk.fetch("wide")
    assert len(looks) == 2


async def failure(desk: Desk, name: str) -> BaseException | None:
    try:
        await desk.fetch(name)
    except AdapterRefused as error:
        return error
    return None


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of sources whose files are read from now on."""
    looks: list[str] = []
    look = lora.find_adapter

    def count(source: str, revision: str | None = None) -> lora.AdapterFiles:
        looks.append(source)
        return look(source, revision)

    monkeypatch.setattr(lora, "find_adapter", count)
    return looks


async def test_a_broken_one_that_was_mended_while_it_was_read_is_read_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, looks = Desk(root, is_held=True), count_looks(monkeypatch)
    write_adapter(root / "torn")
    desk.home.broken.add("torn")
    waiting = asyncio.create_task(desk.fetch("torn"))
    await desk.until_loading()
    write_adapter(root / "torn", rank=3)
    desk.release()
    with pytest.raises(AdapterRefused):
        await waiting
    desk.home.is_held = False
    desk.home.broken.clear()
    assert await desk.fetch("torn") == "torn" and len(looks) == 2


async def test_admins_give_names_to_what_may_be_loaded(root: Path) -> None:
    desk = Desk(root)
    write_adapter(root / "new")
    load = desk.registry.adapters.load
    assert (await load(desk.model, "mine", "new")).state == "host"
    for name, source, reason in (
        ("mine", "new", "exists already"),
        ("french", "new", "exists already"),
        ("gpt-4", "new", "a model has the name"),
        ("demo", "new", "a model has the name"),
        ("tgi", "new", "reserved for the base model"),
        ("../x", "new", "not allowed"),
        ("other", str(root.parent / "french"), "may not load adapters from"),
        ("other", "org/name", "may not load adapters from"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            await load(desk.model, name, source)
    assert desk.names == ["french", "mine"]
    desk.model.adapters.remove("mine")
    with pytest.raises(UnknownAdapter):
        await desk.fetch("mine")
