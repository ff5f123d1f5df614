"""A checkpoint becomes something that answers, and names follow from where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.config import EngineConfig, ModelConfig
from bridle.errors import EngineClosed, InvalidRequest, UnsupportedModel
from bridle.sampling import SamplingParams
from bridle.serving import OutputCollector, build_request, load_model, model_name
from bridle.serving.outputs.output_collector import collect
from tests.fakes.tiny_checkpoints import cached_checkpoint


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
