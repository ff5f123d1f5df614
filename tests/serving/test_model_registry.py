"""Tests of the model registry: loading, names, and errors for unknown models."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.config import EngineConfig, ModelConfig
from bridle.errors import EngineClosed, InvalidRequest, UnknownModel, UnsupportedModel
from bridle.sampling import SamplingParams
from bridle.serving import ModelRegistry, OutputCollector, build_request, load_model, model_name
from bridle.serving.outputs.output_collector import collect
from tests.fakes.tiny_checkpoints import cached_checkpoint
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
    with pytest.raises(InvalidRequest, match="'d' is in use"):
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


def test_a_name_is_the_folders_last_part_or_the_id_itself(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert model_name(str(tmp_path / "model")) == "model"
    assert model_name(str(tmp_path / "model") + "/") == "model"
    assert model_name("org/model") == "org/model"
    assert model_name("demo") == "demo"


async def test_a_checkpoint_is_loaded_runs_and_ends() -> None:
    path = cached_checkpoint("llama")
    said: list[tuple[str, float]] = []
    model = load_model(
        ModelConfig(str(path), device="cpu", num_blocks=64, max_model_len=128),
        EngineConfig(max_num_seqs=4),
        progress=lambda what, share: said.append((what, share)),
    )
    try:
        assert model.name == path.name
        assert model.client.is_healthy
        assert said
        assert all(0 <= share <= 1 for _, share in said)
        assert model.info.vocab_size >= model.tokenizer.vocab_size
        assert model.max_sequence_tokens == 128
        sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        texts = []
        for _ in range(2):
            request = build_request(model, "Hello there", sampling)
            output = await collect(model.client.submit(request), OutputCollector(request))
            assert len(output.outputs[0].token_ids) == 6
            texts.append(output.text)
        assert texts[0] == texts[1] == model.tokenizer.decode(output.outputs[0].token_ids)
    finally:
        model.close()
        model.close()
    assert not model.client.is_healthy
    with pytest.raises(EngineClosed):
        model.client.submit(build_request(model, "a", sampling))


@pytest.mark.parametrize("model", ["no/such/folder/here", ""])
def test_what_cannot_be_found_is_told(model: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedModel)):
        load_model(ModelConfig(model))
