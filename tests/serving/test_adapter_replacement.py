"""Tests of adapters replaced in place: running requests keep the weights of their start, and new requests get the new
weights."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from bridle import LLM, SamplingParams
from bridle.errors import AdapterRefused, InvalidRequest
from bridle.http import create_app
from bridle.serving import AdapterRegistry, AdapterSet, ModelRegistry
from bridle.serving.lora.lora_config import AdapterCatalog
from tests.serving.fake_adapters import FakeHome, with_adapters, write_adapter, write_demo_adapter
from tests.serving.fakes import fake_model


def versions(root: Path, count: int) -> list[str]:
    return [str(write_adapter(root / f"v{number}", scale=1.0, seed=number)) for number in range(count)]


def test_a_name_gets_other_weights(tmp_path: Path) -> None:
    home = FakeHome()
    registry = AdapterRegistry(home, ("m",))
    one, two, three = versions(tmp_path, 3)
    registry.replace("a", one)
    keys = [registry.resolve("a")]
    assert registry.replace("a", two).source == two
    keys.append(registry.resolve("a"))
    assert keys[0] != keys[1] and set(home.files) == set(keys), "requests may be on their way with the first key"
    registry.replace("a", three)
    keys.append(registry.resolve("a"))
    assert set(home.files) == set(keys[1:])
    registry.replace("a", three)
    registry.replace("a", two)
    assert registry.resolve("a") == keys[1] and set(home.files) == set(keys[1:])
    registry.remove("a")
    assert not home.files


def test_new_requests_wait_for_nothing(tmp_path: Path) -> None:
    """The old weights are chosen until the new ones are in memory."""
    home = FakeHome()
    registry = AdapterRegistry(home, ("m",))
    one, two = versions(tmp_path, 2)
    registry.replace("a", one)
    before, home.is_held = registry.resolve("a"), True
    home.began.clear()
    thread = threading.Thread(target=registry.replace, args=("a", two))
    thread.start()
    assert home.began.wait(10)
    assert registry.resolve("a") == before
    (loading,) = [key for key in home.waiting if key != before and not home.waiting[key].done()]
    home.release(loading)
    thread.join(10)
    assert registry.resolve("a") == loading


def test_a_failure_changes_nothing(tmp_path: Path) -> None:
    home = FakeHome()
    registry = AdapterRegistry(home, ("m",))
    one, two = versions(tmp_path, 2)
    registry.replace("a", one)
    before = registry.resolve("a")
    home.broken.add("v1")
    with pytest.raises(AdapterRefused, match="changed"):
        registry.replace("a", two)
    assert registry.resolve("a") == before and set(home.files) == {before}
    with pytest.raises(InvalidRequest, match="reserved for the base model"):
        registry.replace("m", one)
    with pytest.raises(InvalidRequest, match="remove it first, or replace it"):
        registry.add("a", two)


def test_both_spellings_of_the_route_replace(tmp_path: Path) -> None:
    versions(tmp_path, 3)
    model = fake_model(name="demo")
    home = with_adapters(model)
    registry = ModelRegistry(adapters=AdapterCatalog(AdapterSet(folder=tmp_path)))
    registry.add(model)
    client = TestClient(create_app(registry))
    assert client.post("/v1/adapters", json={"name": "a", "source": "v0"}).status_code == 201
    assert client.post("/v1/adapters", json={"name": "a", "source": "v1"}).status_code == 400
    answer = client.post("/v1/adapters", json={"name": "a", "source": "v1", "replace": True})
    assert answer.status_code == 201 and answer.json()["source"] == str(tmp_path / "v1")
    body = {"lora_name": "a", "lora_path": "v2", "load_inplace": True}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert client.get("/v1/adapters/a").json()["source"] == str(tmp_path / "v2")
    home.broken.add("v0")
    refused = client.post("/v1/adapters", json={"name": "a", "source": "v0", "replace": True})
    assert refused.status_code == 400 and str(tmp_path) not in refused.text
    assert client.get("/v1/adapters/a").json()["source"] == str(tmp_path / "v2")


def test_a_running_request_keeps_its_weights(tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    old, new = write_demo_adapter(tmp_path / "old", 1), write_demo_adapter(tmp_path / "new", 2)
    with LLM("demo", adapters={"a": old}, num_blocks=256) as llm:
        before = llm.generate("Once upon", greedy, adapter="a")[0].text
        stream = iter(llm.stream("Once upon", greedy, adapter="a"))
        text = next(stream)
        llm.load_adapter("a", new, replace=True)
        after = llm.generate("Once upon", greedy, adapter="a")[0].text
        assert text + "".join(stream) == before
        assert after != before
        assert llm.generate("Once upon", greedy, adapter="a")[0].text == after
