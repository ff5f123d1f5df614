"""Names resolve in one place, and an unknown one is told what there is."""

from __future__ import annotations

import pytest

from bridle.errors import InvalidRequest, UnknownModel
from bridle.serving import ModelRegistry
from tests.serving.fakes import fake_model


def test_names_and_aliases_resolve() -> None:
    model, other = fake_model(name="demo"), fake_model(name="other")
    registry = ModelRegistry()
    registry.add(model, aliases=["d", "demo", "d"])
    registry.add(other)
    assert registry.resolve("demo") is registry.resolve("d") is model
    assert registry.resolve("other") is other
    assert registry.resolve(None) is registry.resolve("") is model
    assert registry.names == ["demo", "other", "d"]
    assert registry.aliases_of(model) == ["d"]
    assert list(registry) == [model, other]
    assert len(registry) == 2


def test_an_unknown_model_is_told_what_is_served() -> None:
    registry = ModelRegistry([fake_model(name="demo")])
    with pytest.raises(UnknownModel) as refusal:
        registry.resolve("gpt-4")
    assert str(refusal.value) == "the model 'gpt-4' is not served here; served: 'demo'"
    assert refusal.value.param == "model"
    with pytest.raises(UnknownModel) as refusal:
        registry.resolve("x" * 100_000)
    assert len(str(refusal.value)) < 200


def test_an_empty_registry_says_so() -> None:
    registry = ModelRegistry()
    assert not registry.is_healthy
    for name in (None, "demo"):
        with pytest.raises(UnknownModel):
            registry.resolve(name)


def test_a_name_is_taken_once_and_a_clash_changes_nothing() -> None:
    registry = ModelRegistry()
    registry.add(fake_model(name="demo"), aliases=["d"])
    with pytest.raises(InvalidRequest, match="'d' is taken"):
        registry.add(fake_model(name="new"), aliases=["d"])
    assert registry.names == ["demo", "d"]


def test_health_and_closing_reach_every_model() -> None:
    models = [fake_model(name="a"), fake_model(name="b")]
    registry = ModelRegistry(models)
    assert registry.is_healthy
    models[1].client.is_healthy = False  # type: ignore[misc]
    assert not registry.is_healthy
    registry.close(2.0)
    assert [model.client.closed_with for model in models] == [2.0, 2.0]  # type: ignore[attr-defined]
