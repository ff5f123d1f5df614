"""Adapters for requests: names that mean the model alone, one load for many, errors that leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bridle.errors import AdapterRefused, InvalidRequest, ModelUnavailable, UnknownAdapter, UnknownModel
from bridle.service import AdapterSet, ModelRegistry
from bridle.service.adapter_set import AdapterCatalog
from tests.service.fake_adapters import FakeHome, with_adapters, write_adapter
from tests.service.fakes import fake_model


class Desk:
    """A registry with one model that has the adapter `french`, and may load what is in a folder."""

    def __init__(self, root: Path, is_held: bool = False) -> None:
        self.root = root
        self.model = fake_model(name="demo")
        self.home: FakeHome = with_adapters(self.model, FakeHome())
        self.registry = ModelRegistry(adapters=AdapterCatalog(AdapterSet(folder=root)))
        self.registry.add(self.model, aliases=["gpt-4"])
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
        """Let all loads end."""
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
    for name, adapter in (("nobody", None), ("nobody", "french"), ("french", "nobody")):
        with pytest.raises(UnknownModel, match="served: 'demo', 'gpt-4', 'french'"):
            registry.choose(name, adapter)


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
    with pytest.raises(ModelUnavailable, match="the adapter 'new' is not there after 0 s"):
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
    assert await desk.fetch("wide") == "wide" and await desk.fetch("torn") == "torn"


async def test_admins_give_names_to_what_may_be_loaded(root: Path) -> None:
    desk = Desk(root)
    write_adapter(root / "new")
    load = desk.registry.adapters.load
    assert (await load(desk.model, "mine", "new")).state == "host"
    for name, source, reason in (
        ("mine", "new", "known already"),
        ("french", "new", "known already"),
        ("gpt-4", "new", "is a model's"),
        ("demo", "new", "is a model's"),
        ("tgi", "new", "means the base model"),
        ("../x", "new", "not allowed"),
        ("other", str(root.parent / "french"), "may not be loaded here"),
        ("other", "org/name", "may not be loaded here"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            await load(desk.model, name, source)
    assert desk.names == ["french", "mine"]
    desk.model.adapters.remove("mine")
    with pytest.raises(UnknownAdapter):
        await desk.fetch("mine")
