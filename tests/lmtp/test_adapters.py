"""Tests of adapters over LMTP: GENERATE and SCORE choose an adapter by field or by model name, from raw lines, the
client and the terminal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bridle.lmtp import Client
from bridle.lmtp.client import MemoryCarrier
from bridle.lmtp.interactive import Interactive
from bridle.serving import AdapterSet, LoadedModel
from bridle.serving.lora.lora_config import AdapterCatalog
from tests.http.harness import NAME, scripted_model
from tests.lmtp.harness import Setup, running
from tests.serving.fake_adapters import FakeHome, with_adapters, write_adapter


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    """Yield a server whose model has the adapter `french`, and may load `later`."""
    model = scripted_model(spread=4096)
    with_adapters(model)
    write_adapter(tmp_path / "later")
    add(model, "french", tmp_path / "later")
    async with running(model) as setup:
        setup.registry.adapters.catalog = AdapterCatalog(AdapterSet(folder=tmp_path))
        yield setup


def add(model: LoadedModel, name: str, folder: Path) -> None:
    model.adapters.add(name, str(folder))
    model.adapters.fetch(name).result()


def tokens_of(found: list[dict[str, Any]]) -> list[Any]:
    return [body["token"] for body in found]


async def test_a_stream_chooses_by_field_or_by_name(setup: Setup) -> None:
    wire = setup.connect()
    base = tokens_of(await wire.ask("GENERATE", prompt=[5, 6], max_tokens=8))
    french = tokens_of(await wire.ask("GENERATE", prompt=[5, 6], max_tokens=8, adapter="french"))
    assert french != base
    assert tokens_of(await wire.ask("GENERATE", prompt=[5, 6], max_tokens=8, model="french")) == french
    assert tokens_of(await wire.ask("GENERATE", prompt=[5, 6], max_tokens=8, model=f"{NAME}:french")) == french
    for name in (NAME, "tgi", "", None):
        assert tokens_of(await wire.ask("GENERATE", prompt=[5, 6], max_tokens=8, adapter=name)) == base


async def test_scores_are_the_adapters_own(setup: Setup) -> None:
    wire = setup.connect()
    scores = [
        [body["logprob"] for body in await wire.ask("SCORE", prompt=[5, 6], scored=[7, 8], **fields)]
        for fields in ({}, {"adapter": "french"}, {"model": "french"})
    ]
    assert scores[0] != scores[1] == scores[2]


@pytest.mark.parametrize("kind", ["GENERATE", "SCORE"])
async def test_an_unknown_adapter_ends_the_stream(setup: Setup, kind: str) -> None:
    wire = setup.connect()
    await wire.hello()
    more = {"scored": [7]} if kind == "SCORE" else {}
    (body,) = await wire.ask(kind, prompt=[5], adapter="nobody", **more)
    assert body["code"] == "adapter_not_found" and "'french'" in body["error"] and body["param"] == "adapter"
    (body,) = await wire.ask(kind, prompt=[5], model="nobody", stream_id=2, **more)
    assert body["code"] == "model_not_found"


async def test_who_waits_for_an_adapter_is_told(setup: Setup) -> None:
    home = FakeHome(is_held=True)
    with_adapters(setup.model, home)
    wire = setup.connect()
    await wire.hello()
    await wire.send("GENERATE", stream_id=1, prompt=[5], max_tokens=1, adapter="later")
    kind, body = await wire.next()
    assert (kind, body["event"], body["adapter"]) == ("EVENT", "loading", "later")
    while not home.waiting:
        await wire.ask("GENERATE", stream_id=2, prompt=[5], max_tokens=1)  # others go on
    home.release(next(iter(home.waiting)))
    kind, body = await wire.next()
    assert (kind, body["event"], body["adapter"]) == ("EVENT", "loaded", "later")
    assert len(await wire.stream(1)) == 1


async def test_model_info_lists_them(setup: Setup) -> None:
    info = (await setup.connect().hello())["model_info"]
    assert info["adapters"] == ["french"] and info["lmtp"]["adapters"] is True
    wire = setup.connect()
    assert "adapter" not in info
    for name in ("french", f"{NAME}:french"):
        await wire.send("MODEL_INFO", stream_id=1, model=name)
        info = (await wire.stream(1))[0]["model_info"]
        assert (info["model"], info["adapter"]) == (NAME, "french")


async def test_buffers_serve_the_model_and_its_adapters(setup: Setup) -> None:
    wire = setup.connect()
    plain = await wire.ask("GENERATE", prompt=[9, 8, 7], max_tokens=4, adapter="french")
    await wire.ask("BUFFER", name="b", prompt=[9, 8])
    assert await wire.ask("GENERATE", buffer="b", prompt=[7], max_tokens=4, adapter="french") == plain
    await wire.ask("BUFFER", name="c", prompt=[9, 8], model="french")
    named = await wire.ask("GENERATE", buffer="c", prompt=[7], max_tokens=4, model="french")
    assert tokens_of(named) == tokens_of(plain)


class Screen:
    """A screen that stores the shown texts."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.notes: list[str] = []

    def begin(self, number: int, prompt: str) -> None:
        self.texts[number] = ""

    def text(self, number: int, text: str) -> None:
        self.texts[number] += text

    def token(self, number: int, token: dict[str, Any]) -> None:
        raise AssertionError("no tokens were asked for")

    def end(self, number: int) -> None:
        """Do nothing at the end of a text."""

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ask(self) -> None:
        """Do nothing for a question."""


async def test_the_client_and_the_terminal_take_it_as_an_option(setup: Setup) -> None:
    screen = Screen()

    async def lines() -> AsyncIterator[str]:
        for line in ("Say it", "Say it adapter='french'", "Say it adapter='nobody'"):
            yield f"{line} max_tokens=6"

    async with Client(MemoryCarrier(setup.server.serve), NAME) as client:
        texts = [
            "".join([token.text or "" async for token in await client.generate("Say it", max_tokens=6, adapter=name)])
            for name in (None, "french")
        ]
        scores = [await client.score([5, 6], [7], adapter=name) for name in (None, "french")]
        await Interactive(client, screen).run(lines(), leaves_at_once=False)
    assert texts[0] != texts[1] and scores[0][0].logprob != scores[1][0].logprob
    assert [screen.texts.get(number) for number in (1, 2)] == texts
    assert any("no adapter 'nobody'" in note for note in screen.notes)
