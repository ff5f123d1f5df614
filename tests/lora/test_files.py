"""Tests of untrusted adapter files: an error is reported in one sentence, and no data of a wrong file is kept."""

from __future__ import annotations

import json
import os
import pickle
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import AdapterRefused
from bridle.lora import files as files_module
from bridle.lora import find_adapter, open_adapter
from bridle.lora.device import check_fits
from bridle.lora.weights import read_weights
from tests.lora.kit import ALL_LINEAR, LAYERS, write_adapter
from tests.waiting import PATIENCE

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def use(folder: Path) -> None:
    """Open an adapter, check that it fits the layers, and read its weights."""
    files = open_adapter(folder)
    check_fits(files, LAYERS)
    read_weights(files)


def refusal(folder: Path) -> str:
    """Return the error message with which an adapter is refused, whichever stage refuses it."""
    with pytest.raises(AdapterRefused) as caught:
        use(folder)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_a_plain_adapter_is_understood(tmp_path: Path) -> None:
    files = find_adapter(str(write_adapter(tmp_path, targets=ALL_LINEAR, rank=6, lora_alpha=12)))
    assert (files.rank, set(files.targets), len(files.shapes)) == (6, set(ALL_LINEAR), len(LAYERS))
    assert files.num_bytes == 4 * 6 * sum(one.in_features + one.out_features for one in LAYERS.values())
    assert {shape.scale for shape in files.shapes.values()} == {2.0}
    check_fits(files, LAYERS)
    first, second = read_weights(files).pair("model.layers.1.mlp.down_proj")
    assert (first.shape, second.shape) == ((6, 64), (32, 6))


def test_adapters_of_one_form_share_what_is_known_of_it(tmp_path: Path) -> None:
    """Adapters with equal layers and ranks share one description in memory, as a server may know thousands of
    adapters."""
    first, second, other = (
        open_adapter(write_adapter(tmp_path / name, rank=rank, seed=seed))
        for name, rank, seed in (("a", 4, 0), ("b", 4, 1), ("c", 8, 0))
    )
    assert first.digest != second.digest and first.shapes is second.shapes
    assert first.shapes != other.shapes


def test_patterns_and_rslora_set_ranks_and_scales(tmp_path: Path) -> None:
    named = "model.layers.1.self_attn.q_proj"
    folder = write_adapter(
        tmp_path,
        rank=4,
        ranks={named: 16, **{name: 8 for name in LAYERS if name.endswith("v_proj")}},
        rank_pattern={f"^{named}$": 16, "v_proj": 8},
        alpha_pattern={r"model.layers.\d+.self_attn.v_proj": 3.0},
        lora_alpha=8,
        use_rslora=True,
    )
    shapes = open_adapter(folder).shapes
    assert (shapes[named].rank, shapes[named].scale) == (16, 8 / 4)
    assert shapes["model.layers.0.self_attn.q_proj"].scale == 8 / 2
    assert shapes["model.layers.2.self_attn.v_proj"].scale == pytest.approx(3 / 8**0.5)


def test_some_layers_are_enough(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, {name: one for name, one in LAYERS.items() if ".1." in name})
    assert {name.split(".")[2] for name in open_adapter(folder).shapes} == {"1"}


# -- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "'use_dora' is True"),
        ({"modules_to_save": ["lm_head"]}, r"'modules_to_save' is \['lm_head'\]"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "'lora_bias' is True"),
        ({"trainable_token_indices": [1]}, "'trainable_token_indices'"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication'"),
        ({"target_parameters": ["experts.gate"]}, "'target_parameters'"),
        ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"some_new_trick": {"depth": 3}}, "'some_new_trick' is {'depth': 3}"),
        ({"r": 0}, "the rank is 0"),
        ({"r": 1_000_000}, "the rank is 1000000"),
        ({"r": "16"}, "not a PEFT configuration"),
        ({"lora_alpha": "much"}, "not a PEFT configuration"),
        ({"rank_pattern": {"q_proj": 5}}, "but rank 5"),
        ({"rank_pattern": {"(x+x+)+y": 5}}, r"the pattern '\(x\+x\+\)\+y'"),
        ({"alpha_pattern": {"q_proj" * 100: 5}}, "the pattern 'q_projq_proj"),
        ({"alpha_pattern": {"(q_proj": 5}}, r"the pattern '\(q_proj'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterRefused, match=message):
        check_fits(open_adapter(write_adapter(tmp_path, **fields)), LAYERS)


def test_fields_that_say_nothing_are_no_hindrance(tmp_path: Path) -> None:
    silent = {"use_dora": False, "modules_to_save": None, "layer_replication": None, "some_new_trick": []}
    told = {"base_model_name_or_path": "x", "peft_version": "9", "lora_dropout": 0.1, "inference_mode": True}
    check_fits(open_adapter(write_adapter(tmp_path, **silent, **told)), LAYERS)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"peft_type": "LORA"}', '"LORA"', "[" * 100_000, "\x00", "NaN"])
def test_a_configuration_must_be_an_object(tmp_path: Path, text: str) -> None:
    (write_adapter(tmp_path) / "adapter_config.json").write_text(text)
    refusal(tmp_path)


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q0}.lora_B.weight": None}, "has lora_A, but no lora_B"),
        ({f"{Q0}.lora_A.weight": None}, "has lora_B, but no lora_A"),
        ({f"{Q0}.lora_A.weight": torch.zeros(5, 32)}, "but rank 4"),
        ({f"{Q0}.lora_A.weight": torch.zeros(4, 31)}, "from 31 to 32 features; this model's goes from 32"),
        ({f"{Q0}.lora_B.weight": torch.zeros(33, 4)}, "from 32 to 33 features"),
        ({f"{Q0}.lora_A.weight": torch.zeros(4, 32, 1)}, r"has shape \[4, 32, 1\]"),
        ({f"{Q0}.lora_A.weight": torch.zeros(4, 32, dtype=torch.int64)}, "of type 'I64'"),
        ({f"{Q0}.lora_A.weight": torch.full((4, 32), float("nan"))}, "not finite"),
        ({f"{Q0}.lora_B.weight": torch.full((32, 4), float("inf"))}, "not finite"),
        ({f"{Q0}.lora_magnitude_vector": torch.zeros(1, 32)}, "DoRA"),
        ({"base_model.model.model.embed_tokens.weight": torch.zeros(9, 9)}, "trained embeddings"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 9)}, "LoRA on embeddings"),
        ({"base_model.model.lm_head.weight": torch.zeros(9, 9)}, "trained head"),
        ({f"{Q0}.lora_A.bias": torch.zeros(1, 4)}, "biases"),
        ({"weird": torch.zeros(1, 1)}, "only pairs of matrices"),
        (
            {
                "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32),
                "base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight": torch.zeros(32, 4),
            },
            "layers.7.self_attn.q_proj'; it may change only linear layers",
        ),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(9, 4),
            },
            "layer 'lm_head'; it may change only linear layers",
        ),
    ],
)
def test_tensors_that_do_not_belong_are_named(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    write_adapter(tmp_path, tensors=tensors)
    with pytest.raises(AdapterRefused, match=message):
        use(tmp_path)


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def overlapping(data: bytes) -> bytes:
    header, payload = header_of(data)
    names = [name for name in header if name.endswith("q_proj.lora_A.weight")]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    return with_header(header, payload)


def with_a_gap(data: bytes) -> bytes:
    header, payload = header_of(data)
    return with_header(header, payload + b"hidden")


def huge(data: bytes) -> bytes:
    header, payload = header_of(data)
    header[f"{Q0}.lora_A.weight"]["shape"] = [1 << 40, 1 << 40]
    return with_header(header, payload)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[:-1],
        lambda data: struct.pack("<Q", 1 << 62) + data[8:],
        lambda data: struct.pack("<Q", 2) + b"{}" + data,
        lambda data: struct.pack("<Q", 100_000) + b"[" * 100_000,
        overlapping,
        with_a_gap,
        huge,
        lambda data: pickle.dumps({"a": 1}),
        lambda data: b"PK\x03\x04" + data,
    ],
)
def test_damaged_weights_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = write_adapter(tmp_path) / "adapter_model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    refusal(tmp_path)


@given(st.data())
def test_no_damage_is_anything_but_a_refusal(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """After one flipped byte, the adapter is refused, or the byte is part of a valid number."""
    folder = tmp_path_factory.mktemp("flipped")
    write_adapter(folder, {name: one for name, one in LAYERS.items() if ".0." in name}, targets=("q_proj",))
    name = data.draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
    content = bytearray((folder / name).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(content)
    with suppress(AdapterRefused):
        use(folder)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    write_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert "pickled weights (adapter_model.bin)" in refusal(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    inside, outside = write_adapter(tmp_path / "inside"), write_adapter(tmp_path / "outside")
    (inside / name).unlink()
    (inside / name).symlink_to(outside / name)
    assert "links to a file outside of" in refusal(inside)
    assert open_adapter(inside, root=tmp_path).rank == 4  # as the hub's cache has it


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_pipes_and_folders_are_no_files(tmp_path: Path, name: str) -> None:
    (write_adapter(tmp_path) / name).unlink()
    os.mkfifo(tmp_path / name)
    done = threading.Event()

    def look() -> None:
        refusal(tmp_path)
        done.set()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    assert done.wait(PATIENCE), "a pipe that nobody writes to must not be waited for"
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refusal(tmp_path)


def test_a_look_reads_in_pieces_what_is_read_whole_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path, targets=ALL_LINEAR, rank=16)
    whole, weights = files_module.read_adapter(folder)
    monkeypatch.setattr(files_module, "MAX_HEADER_BYTES", 8_192)
    monkeypatch.setattr(files_module, "CHUNK_BYTES", 1_000)
    assert len(weights) > 3 * 8_192
    assert open_adapter(folder) == whole


def test_oversized_files_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path)
    monkeypatch.setattr(files_module, "MAX_WEIGHTS_BYTES", 1_000)
    assert "at most 1000 are read" in refusal(tmp_path)
    monkeypatch.setattr(files_module, "MAX_CONFIG_BYTES", 10)
    assert "at most 10 are read" in refusal(tmp_path)


@pytest.mark.parametrize("source", ["", "nowhere", "../x", "a/../b", "/nowhere/at/all", "a/b/c", "https://x/y", "-/x"])
def test_what_is_neither_folder_nor_hub_id_is_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    with pytest.raises(AdapterRefused, match="neither an existing folder nor a hub id"):
        find_adapter(source)


def test_where_the_hubs_cache_lies_is_not_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--poet" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(files_module, "fetch_adapter", lambda *_: snapshot)
    with pytest.raises(AdapterRefused, match=r"^owner/poet has no adapter_config.json") as refusal:
        find_adapter("owner/poet")
    assert str(tmp_path) not in str(refusal.value)


def test_hub_ids_go_to_the_hub_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without network access, an adapter that is not in the local cache is refused, and the error says so."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        AdapterRefused, match="'owner/poet' cannot be fetched from the hub: it is not in the local cache"
    ):
        find_adapter("owner/poet", "main")


def test_files_that_change_after_they_were_looked_at_are_noticed(tmp_path: Path) -> None:
    files = open_adapter(write_adapter(tmp_path))
    write_adapter(tmp_path, seed=1)
    with pytest.raises(AdapterRefused, match="have changed since it was added"):
        read_weights(files)
