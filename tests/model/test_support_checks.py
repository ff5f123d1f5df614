"""Tests that damaged checkpoints, and families that would give wrong results, are refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from bridle.errors import InvalidRequest, OutOfBlocks, UnsupportedModel
from bridle.model import support_checks
from bridle.model.hub_lookup import resolve_model
from tests.fakes import tiny_checkpoints
from tests.model.driver import NaiveDriver, load

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# family -> (configuration, what the message must say)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cpmant": (
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "dim_head": 8},
        "its own attention",
    ),
    "recurrent_gemma": ({**_SMALL, "lru_width": 32}, "recurrent"),
}


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_family_is_refused_with_its_reason(family: str, tmp_path: Path) -> None:
    fields, reason = REFUSED[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        load(tmp_path)
    assert family.split("_")[0] in str(caught.value).lower().replace("-", "")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("cpmant", r"own.*0 of 2 layers"),
        ("recurrent_gemma", "keep no state in a cache: only 1 of 4"),
    ],
)
def test_dry_forward_notices_by_itself(
    family: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of one forward pass refuses a family without the list of refused structures, which can never be
    complete."""
    fields, _ = REFUSED[family]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).save_pretrained(tmp_path)
    monkeypatch.setattr(support_checks, "check_structure", lambda config: None)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)


def test_parity_notices_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with transformers refuses BART's decoder, which passes the other checks but counts positions
    itself."""
    fields = {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bart", **fields))
    tiny_checkpoints.randomize(model, 0)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(support_checks, "check_structure", lambda config: None)
    with pytest.raises(UnsupportedModel, match="differs from its own attention"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoder_is_refused(family: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "num_layers": 1, "num_heads": 4, "d_ff": 32, "d_kv": 8}
    if family == "bart":
        fields = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **fields)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("mllama", {}, "cross attention"),
        ("florence2", {}, "encoder-decoder"),
        ("blt", {}, "no 'num_hidden_layers': it is not one stack"),
    ],
)
def test_model_of_several_parts_is_refused(family: str, fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **fields)
    config.save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=why):
        load(tmp_path)


def test_unknown_type_and_remote_code_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    config = {"model_type": "ownmodel", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling.py").write_text("raise SystemExit('executed')\n")
    with pytest.raises(UnsupportedModel, match="never runs"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ownmodel"}))
    with pytest.raises(UnsupportedModel, match="ownmodel"):
        load(tmp_path)


# -- damaged and incomplete folders ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of a valid checkpoint, which the test may change."""
    target = tmp_path / "model"
    shutil.copytree(tiny_checkpoints.cached_checkpoint("llama"), target)
    return target


def _rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_truncated_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UnsupportedModel, match="cut off"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b'\x04\0\0\0\0\0\0\0{"a"'])
def test_garbage_weights_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"cut off|damaged"):
        load(folder)


def test_wrong_sizes_in_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"] = [7, 7]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(UnsupportedModel, match="damaged"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UnsupportedModel, match=r"lacks 1 weights .*layers\.1\.mlp\.up_proj"):
        load(folder)


def test_a_tensor_of_a_wrong_shape_is_named(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}))
    with pytest.raises(UnsupportedModel, match="norm"):
        load(folder)


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UnsupportedModel, match="pickled"):
        load(folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="has no weights"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        load(folder)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="model-00001-of-00002"):
        load(folder)
    index["weight_map"]["a"] = "../outside.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match="outside of the folder"):
        load(folder)


def test_a_broken_configuration_is_refused(folder: Path) -> None:
    for text in ("{", "[]", "\xff"):
        (folder / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(UnsupportedModel, match=r"config\.json"):
            load(folder)


# -- settings and memory -----------------------------------------------------------------------------------


def test_memory_errors_have_numbers() -> None:
    path = tiny_checkpoints.cached_checkpoint("llama")
    with pytest.raises(OutOfBlocks, match=r"num_blocks 1000000000000 needs .* GiB .* free"):
        load(path, num_blocks=10**12)
    with pytest.raises(OutOfBlocks, match="kv_memory"):
        load(path, num_blocks=None, kv_memory=1 << 60)
    with pytest.raises(InvalidRequest, match=r"holds \d+ tokens .* lower max_model_len or raise kv_memory") as caught:
        load(path, num_blocks=None, kv_memory=10_000)
    assert caught.value.param == "kv_memory"


def test_settings_are_checked() -> None:
    path = tiny_checkpoints.cached_checkpoint("llama")
    for settings in ({"max_model_len": 513}, {"device": "abacus"}, {"device": "mps"}, {"kernel": "magic"}):
        with pytest.raises(InvalidRequest) as caught:
            load(path, **settings)
        assert caught.value.param in settings
    with pytest.raises(InvalidRequest, match="half precision"):
        load(path, kernel="varlen", device="cpu")


def test_context_is_capped_by_a_small_pool() -> None:
    path = tiny_checkpoints.cached_checkpoint("llama")
    assert load(path, num_blocks=8, block_size=4).info.max_model_len == 32
    assert load(path, num_blocks=8, block_size=4, max_model_len=100).info.max_model_len == 100


@pytest.mark.parametrize("name", ["no/such/folder", "../up", "", "with space", "a/b/c"])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="neither"):
        resolve_model(name)


def test_hub_is_not_reached_offline() -> None:
    with pytest.raises(UnsupportedModel, match="local hub cache"):
        resolve_model("nobody/nothing-of-this-name")


def test_file_instead_of_folder(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="name the folder"):
        resolve_model(str(folder / "config.json"))


def test_progress_is_reported_in_order() -> None:
    from bridle.config import ModelConfig
    from bridle.model.loading import load_executor

    seen: list[tuple[str, float]] = []
    path = tiny_checkpoints.cached_checkpoint("llama")
    executor = load_executor(ModelConfig(model=str(path), num_blocks=8), lambda what, share: seen.append((what, share)))
    assert seen[0][1] == 0.0 and seen[-1] == ("ready", 1.0)
    assert [share for _, share in seen] == sorted(share for _, share in seen)
    assert executor.info.eos_token_ids == (tiny_checkpoints.EOS,)


def test_a_model_type_that_is_another_one(tmp_path: Path) -> None:
    """Kimi K2's Python code is not run, as transformers computes the model as DeepSeek V3."""
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4}
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
    groups = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 4}
    original = tiny_checkpoints.cached_checkpoint("deepseek_v3", **sizes, **latent, **groups)
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    fields = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    (folder / "config.json").write_text(json.dumps({**fields, "model_type": "kimi_k2", "auto_map": code}))
    assert _generate(folder) == _generate(original)


def test_the_text_part_alone(tmp_path: Path) -> None:
    """Only the text part of Gemma 3n is loaded, as its towers need packages that bridle does not require."""
    original = tiny_checkpoints.cached_checkpoint(
        "gemma3n_text",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
        intermediate_size=[64] * 4,
        activation_sparsity_pattern=[0.9, 0.9, 0.0, 0.0],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=300,
        altup_num_inputs=2,
        laurel_rank=8,
        num_kv_shared_layers=2,
        tie_word_embeddings=True,
    )
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": fields}))
    weights = load_file(folder / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    save_file({**moved, "model.vision_tower.conv": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    assert _generate(folder) == _generate(original)


def _generate(folder: Path) -> dict[int, list[int]]:
    driver = NaiveDriver(load(folder), [list(range(10, 40))])
    for _ in range(8):
        driver.run_step({0: None})
    assert len(driver.tokens[0]) == 38
    return driver.tokens
