"""Control vectors of a server with several models: each belongs to one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle.config import EngineConfig, ModelConfig
from bridle.control_vectors import write_vector
from bridle.errors import InvalidRequest
from bridle.http import create_app
from bridle.serving import ModelSet, build_registry
from bridle.serving.models.served_models import EngineLoader
from tests.control_vectors.kit import directions
from tests.fakes import tiny_checkpoints


def served(folder: Path, *vectors: str) -> Any:
    other = str(tiny_checkpoints.cached_checkpoint("llama", head_dim=16, hidden_size=64))
    write_vector(folder / "wide.gguf", directions(6, 256, 1), "llama")
    write_vector(folder / "small.gguf", directions(2, 64, 1), "llama")
    config = ModelConfig("demo", kv_memory=8 << 20, warm_up=False, control_vectors=vectors)
    registry, load = build_registry(
        ModelSet(("demo", other), aliases=(("tiny", other),)), config, EngineLoader(EngineConfig())
    )
    return registry, load


def test_each_model_has_its_vectors(tmp_path: Path) -> None:
    """Requests without a model name use the first model's vectors; two models may each have a vector of the
    same name."""
    named = (f"a={tmp_path / 'wide.gguf'}", f"tiny:a={tmp_path / 'small.gguf'}", f"demo:b={tmp_path / 'wide.gguf'}")
    registry, load = served(tmp_path, *named)
    load()
    with TestClient(create_app(registry)) as client:

        def known(model: str) -> list[str]:
            return [row["id"] for row in client.get("/v1/control_vectors", params={"model": model}).json()["data"]]

        assert known("demo") == ["a", "b"] and known("tiny") == ["a"]
        for model in ("demo", "tiny"):
            body = {"model": model, "prompt": "Once upon", "max_tokens": 6, "temperature": 0}
            scales: list[dict[str, float]] = [{}, {"a": 0.0}, {"a": 2.0}]
            found = [client.post("/v1/completions", json={**body, "control_vectors": each}) for each in scales]
            plain, off, steered = (answer.json()["choices"][0]["text"] for answer in found)
            assert plain == off != steered
        refused = client.post("/v1/completions", json={**body, "control_vectors": {"b": 1.0}})
        assert refused.status_code == 404 and "known are 'a'" in refused.text
    registry.close()


def test_a_model_that_is_not_served_has_no_vector(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequest, match=r"'tny' is not a model of this server. Write MODEL:a=FILE with one of demo"
    ):
        served(tmp_path, "tny:a=small.gguf")
