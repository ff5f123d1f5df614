"""Tests that LoRA adapters in GGUF files equal the same adapters as PEFT saved them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bridle import LLM, SamplingParams
from bridle.cli import main
from bridle.errors import AdapterRefused, InvalidRequest
from bridle.gguf.adapter import places_of, unpack_adapter
from bridle.gguf.families import BY_MODEL_TYPE
from bridle.lora import open_adapter
from bridle.serving import parse_adapters
from tests.gguf.kit import pair
from tests.lora.kit import ALL_LINEAR, write_adapter

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"attn_q": 4, "attn_k": 2}


def as_file(folder: Path, path: Path, arch: str, alpha: float | None = None, **changes: Any) -> Path:
    """Write the adapter in `folder` as llama.cpp's converter does; with `alpha` 0 the scale is already in matrix B."""
    from gguf import GGUFWriter

    config = json.loads((folder / "adapter_config.json").read_text())
    writer = GGUFWriter(path, arch)
    writer.add_type(changes.get("type", "adapter"))
    writer.add_string("adapter.type", changes.get("kind", "lora"))
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"] if alpha is None else alpha))
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        _, _, _, _, number, *rest = name.split(".")
        module, half = ".".join(rest[:2]), "lora_a" if "lora_A" in rest else "lora_b"
        file = NAMES[module]
        if half == "lora_b" and arch == "llama" and file in HEADS:
            rows = tensor.shape[0]
            tensor = tensor.reshape(HEADS[file], 2, rows // HEADS[file] // 2, -1).transpose(1, 2).reshape(rows, -1)
        if half == "lora_b" and alpha == 0:
            tensor = tensor * config["lora_alpha"] / tensor.shape[1]
        writer.add_tensor(f"blk.{number}.{file}.weight.{half}", tensor.contiguous().numpy())
    for name, tensor in changes.get("more", {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("alpha", [None, 0.0])
def test_files_say_what_folders_say(family: str, alpha: float | None, tmp_path: Path) -> None:
    original, file = pair(family)
    ranks = {"model.layers.1.mlp.up_proj": 3}
    folder = write_adapter(
        tmp_path / "a", targets=ALL_LINEAR, rank=6, lora_alpha=9, ranks=ranks, rank_pattern=ranks, seed=3
    )
    adapter = as_file(folder, tmp_path / "a.gguf", family, alpha)
    adapters = {"folder": folder, "file": adapter}
    for model in (original, file):
        with LLM(str(model), num_blocks=64, adapters=adapters) as llm:
            outputs = llm.generate(["the one"] * 3, GREEDY, adapter=["folder", "file", None])
            folder_text, file_text, plain = (output.outputs[0].token_ids for output in outputs)
            assert folder_text == file_text != plain


def test_the_numbers_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    original, _ = pair("llama")
    folder = write_adapter(tmp_path / "a", targets=ALL_LINEAR)
    config = json.loads((original / "config.json").read_text())
    made = unpack_adapter(as_file(folder, tmp_path / "a.gguf", "llama"), config)
    want, have = load_file(folder / "adapter_model.safetensors"), load_file(made / "adapter_model.safetensors")
    assert want.keys() == have.keys() and all(torch.equal(want[name], have[name]) for name in want)
    assert open_adapter(made).shapes == open_adapter(folder).shapes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": "model"}, "is not a LoRA adapter: it has the types 'model'"),
        ({"kind": "control"}, "the types 'adapter' and 'control'"),
        ({"arch": "qwen2"}, "for the architecture 'qwen2'; the model is of type 'llama'"),
        ({"more": {"token_embd.weight.lora_a": torch.ones(2, 2)}}, "'token_embd.weight.lora_a' is not A or B"),
        ({"more": {"blk.0.attn_norm.weight.lora_a": torch.ones(2, 2)}}, "is not A or B of a known layer"),
        ({"more": {"blk.0.attn_k.weight.lora_a": torch.ones(2, 2)}}, "is not A or B of a known layer"),
        (
            {"more": {f"blk.0.attn_k.weight.lora_{x}": torch.ones(3, 2) for x in "ab"}},
            "tensors of 'blk.0.attn_k' have shapes that do not match",
        ),
        ({"more": {f"blk.0.attn_k.weight.lora_{x}": torch.ones(3) for x in "ab"}}, "must be a matrix"),
    ],
    ids=str,
)
def test_what_is_no_adapter_for_this_model_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", targets=("q_proj", "v_proj"))
    original, _ = pair("llama")
    file = as_file(folder, tmp_path / "a.gguf", changes.pop("arch", "llama"), **changes)
    with pytest.raises(AdapterRefused, match=reason):
        unpack_adapter(file, json.loads((original / "config.json").read_text()))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(AdapterRefused, match="version 0"):
        unpack_adapter(tmp_path / "a.gguf", {"model_type": "llama"})


def test_files_are_named_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, file = pair("llama")
    adapter = as_file(write_adapter(tmp_path / "a", targets=ALL_LINEAR), tmp_path / "say.gguf", "llama")
    (spec,) = parse_adapters([str(adapter)])
    assert (spec.name, spec.source) == ("say", str(adapter))
    with pytest.raises(InvalidRequest, match="neither a folder, a GGUF file nor a hub id"):
        parse_adapters(["x=/nowhere.gguf"])
    said = []
    for words in ([], ["--adapter", f"x={adapter}"]):
        assert main(["generate", str(file), "the one", "--temperature", "0", "--max-tokens", "6", *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]


def test_rows_and_columns_of_a_delta_rule_are_put_in_order(tmp_path: Path) -> None:
    """Value heads that GGUF stores in llama.cpp's order are put back into transformers' order (2 key heads, 4 value
    heads)."""
    import gguf

    rows = [head * 8 + number for head in (0, 2, 1, 3) for number in range(8)]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen35")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    a, b = torch.randn(2, 32), torch.randn(32, 2)
    for name in ("attn_gate", "ssm_out"):
        writer.add_tensor(f"blk.1.{name}.weight.lora_a", a.numpy())
        writer.add_tensor(f"blk.1.{name}.weight.lora_b", b.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 2, **sizes}
    weights = load_file(unpack_adapter(tmp_path / "a.gguf", config) / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.linear_attn"
    assert torch.equal(weights[f"{stem}.in_proj_z.lora_B.weight"][rows], b)
    assert torch.equal(weights[f"{stem}.in_proj_z.lora_A.weight"], a)
    assert torch.equal(weights[f"{stem}.out_proj.lora_A.weight"][:, rows], a)
    assert torch.equal(weights[f"{stem}.out_proj.lora_B.weight"], b)


def test_layers_are_counted_by_their_kinds() -> None:
    """Nemotron's configuration lists the kinds of layers and has no number of layers."""
    places = dict(places_of(BY_MODEL_TYPE["nemotron_h"], {"layers_block_type": ["mlp", "mlp"]}))
    assert places["blk.1.ffn_up"][0] == "model.layers.1.mixer.up_proj"
