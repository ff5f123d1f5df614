"""Control vectors on every API: requests choose them, each API refuses unknown ones in its own error format, and
administrators load and replace them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle.config import EngineConfig, ModelConfig
from bridle.control_vectors import write_vector
from bridle.http import HttpSettings, create_app
from bridle.serving import AdapterSet, ModelRegistry, load_model
from bridle.serving.lora.lora_config import AdapterCatalog
from bridle.serving.tenancy.keys import KeyStore
from tests.control_vectors.kit import directions
from tests.lmtp.harness import running

TURN = [{"role": "user", "content": "Once upon a time there was"}]
CHAT = {"messages": TURN, "max_tokens": 8, "temperature": 0}
GREEDY = {"max_new_tokens": 8, "temperature": None, "do_sample": False}
#: Routes, bodies, where the fields of sampling are, and where the text of an answer is.
ROUTES: list[tuple[str, dict[str, Any], str | None, tuple[Any, ...]]] = [
    (
        "/v1/completions",
        {"prompt": "Once upon a time there was", "max_tokens": 8, "temperature": 0},
        None,
        ("choices", 0, "text"),
    ),
    ("/v1/chat/completions", CHAT, None, ("choices", 0, "message", "content")),
    (
        "/v1/responses",
        {"input": "Once upon a time there was", "max_output_tokens": 8, "temperature": 0},
        None,
        ("output", 0, "content", 0, "text"),
    ),
    ("/v1/messages", CHAT, None, ("content", 0, "text")),
    ("/api/generate", {"prompt": "Once upon a time there was", "stream": False}, "options", ("response",)),
    ("/api/chat", {"messages": TURN, "stream": False}, "options", ("message", "content")),
    ("/generate", {"inputs": "Once upon a time there was", "parameters": GREEDY}, "parameters", ("generated_text",)),
]
OLLAMA = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vectors")
    write_vector(root / "loud.gguf", directions(6, 256, 1), "llama")
    write_vector(root / "soft.gguf", directions(6, 256, 2), "llama")
    write_vector(root / "narrow.gguf", directions(6, 8, 2), "llama")
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    config = ModelConfig("demo", num_blocks=256, warm_up=False, control_vectors=(f"loud={folder / 'loud.gguf'}",))
    model = load_model(config, EngineConfig())
    registry = ModelRegistry(adapters=AdapterCatalog(AdapterSet(folder=folder)))
    registry.add(model)
    with TestClient(create_app(registry), raise_server_exceptions=False) as made:
        yield made
    registry.close()


def ask(client: TestClient, route: str, body: dict[str, Any], within: str | None, scales: Any) -> Any:
    fields = {} if scales is None else {"control_vectors": scales}
    if within is None:
        return client.post(route, json=body | fields)
    inner = OLLAMA if within == "options" else {name: value for name, value in GREEDY.items() if value is not None}
    return client.post(route, json=body | {within: inner | fields})


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("route", "body", "within", "where"), ROUTES, ids=lambda value: value if str(value)[0] == "/" else ""
)
def test_a_request_scales_vectors(
    client: TestClient, route: str, body: dict[str, Any], within: str | None, where: tuple[Any, ...]
) -> None:
    texts = []
    for scales in (None, {"loud": 0.0}, {"loud": 1.0}):
        answer = ask(client, route, body, within, scales)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        for step in where:
            found = found[step]
        texts.append(found)
    assert texts[0] == texts[1] != texts[2]
    unknown = ask(client, route, body, within, {"nobody": 1.0})
    assert unknown.status_code == 404 and "known are 'loud'" in unknown.text
    for wrong in ({"loud": "much"}, {"loud": 1e9}, ["loud"]):
        refused = ask(client, route, body, within, wrong)
        assert 400 <= refused.status_code < 500 and "control_vectors" in refused.text


def test_admins_load_replace_and_remove(client: TestClient, folder: Path) -> None:
    prompt = {
        "prompt": "Once upon a time there was",
        "max_tokens": 8,
        "temperature": 0,
        "control_vectors": {"voice": 1.0},
    }
    row = client.post("/v1/control_vectors", json={"name": "voice", "source": "soft.gguf"})
    assert row.status_code == 201
    assert row.json() == {
        "id": "voice",
        "object": "control_vector",
        "model": "demo",
        "layers": [1, 2, 3, 4, 5],
        "num_users": 0,
        "source": str(folder / "soft.gguf"),
    }
    soft = client.post("/v1/completions", json=prompt).json()["choices"][0]["text"]
    assert client.post("/v1/control_vectors", json={"name": "voice", "source": "loud"}).status_code == 201
    loud = client.post("/v1/completions", json=prompt).json()["choices"][0]["text"]
    assert soft != loud
    assert (
        loud
        == client.post("/v1/completions", json=prompt | {"control_vectors": {"loud": 1.0}}).json()["choices"][0]["text"]
    )
    assert [each["id"] for each in client.get("/v1/control_vectors").json()["data"]] == ["loud", "voice"]
    assert client.get("/v1/control_vectors/voice").json()["num_users"] == 0
    assert client.delete("/v1/control_vectors/voice").json()["deleted"] is True
    for answer in (
        client.get("/v1/control_vectors/voice"),
        client.delete("/v1/control_vectors/voice"),
        client.post("/v1/completions", json=prompt),
    ):
        assert answer.status_code == 404 and "control_vector_not_found" in answer.text


@pytest.mark.parametrize("source", ["/etc/passwd", "../loud.gguf", "nothing", "narrow", "a" * 200])
def test_a_source_is_a_file_of_the_folder(client: TestClient, folder: Path, source: str) -> None:
    answer = client.post("/v1/control_vectors", json={"name": "x", "source": source})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "source"
    assert str(folder) not in answer.text
    assert [each["id"] for each in client.get("/v1/control_vectors").json()["data"]] == ["loud"]


def test_only_admins_change_what_there_is(client: TestClient, folder: Path, tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    user = {"authorization": f"Bearer {keys.add('anna')}"}
    other = TestClient(create_app(client.app.state.http.registry, HttpSettings(), keys=keys))  # type: ignore[attr-defined]
    assert other.post("/v1/control_vectors", json={"name": "loud"}, headers=user).status_code == 403
    assert other.delete("/v1/control_vectors/loud", headers=user).status_code == 403
    assert "source" not in other.get("/v1/control_vectors", headers=user).json()["data"][0]


def test_a_run_of_a_controller_scales_vectors(client: TestClient) -> None:
    body = {"controller": "none", "controller_arg": "Once upon a time there", "max_tokens": 8, "temperature": 0}

    def text(**fields: Any) -> str:
        answer = client.post("/v1/run", json=body | fields)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(fork.get("text", "") for event in events for fork in event.get("forks", ()))

    assert text() == text(control_vectors={"loud": 0.0}) != text(control_vectors={"loud": 1.0})


async def test_a_stream_of_lmtp_scales_vectors(folder: Path) -> None:
    model = load_model(ModelConfig("demo", num_blocks=256, warm_up=False), EngineConfig())
    model.require_control_vectors().add("loud", folder / "loud.gguf")
    async with running(model) as setup:
        wire = setup.connect()
        texts = [
            [
                body.get("token")
                for body in await wire.ask(
                    "GENERATE", model="demo", prompt="Once upon a time there", max_tokens=8, **fields
                )
            ]
            for fields in ({}, {"control_vectors": {"loud": 0.0}}, {"control_vectors": {"loud": 1.0}})
        ]
        assert texts[0] == texts[1] != texts[2]
        (refused,) = await wire.ask("GENERATE", model="demo", prompt="a", max_tokens=8, control_vectors={"nobody": 1.0})
        assert "known are 'loud'" in refused["error"]
