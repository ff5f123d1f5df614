"""Tests that a cached model gives the same bits as a newly loaded one, and that a changed model is loaded again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bridle import file_cache
from bridle.config import ModelConfig
from bridle.cpu_kernels.library import kernels
from bridle.file_cache import CacheFile, entries
from bridle.lora import LayerShape
from bridle.model import kv_profiling, model_cache
from bridle.model.dense_layer import DENSE_FAMILIES
from bridle.model.executor import LocalExecutor
from bridle.model.memory_estimate import weights_of
from bridle.model.model_cache import Description
from bridle.model.restored import RestoredModel
from tests.covering import covering
from tests.fakes import tiny_checkpoints
from tests.gguf.kit import pair
from tests.model.driver import record as run
from tests.sources import ROOT

pytestmark = pytest.mark.skipif(kernels() is None, reason="no kernels for this machine")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cache, "LEAST_BYTES", 0)
    monkeypatch.setattr(kv_profiling, "LEAST_BYTES", 0)


def is_restored(executor: LocalExecutor) -> bool:
    return isinstance(executor.runner.model, RestoredModel)


def kept_models() -> list[CacheFile]:
    return [entry for entry in entries() if entry.path.parent.name == "models"]


def check_twice(path: Path, **settings: Any) -> LocalExecutor:
    """Load a model twice, compare all results, and return the second executor."""
    first, want = run(path, **settings)
    second, have = run(path, **settings)
    assert not is_restored(first) and is_restored(second)
    assert torch.equal(want, have)
    assert first.info == second.info and first.num_bytes >= second.num_bytes > 0
    assert first.adapters is not None and second.adapters is not None
    assert first.adapters.layers == second.adapters.layers
    return second


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "kind"), covering(sorted(DENSE_FAMILIES - {"ministral", "seed_oss"}), ["Q8_0", "F32"])
)
def test_files_give_the_same_bits(family: str, kind: str) -> None:
    try:
        _, file = pair(family, kind)
    except KeyError:
        pytest.skip("no such family in GGUF files")
    check_twice(file)


@pytest.mark.few(3)
@pytest.mark.parametrize(("family", "quantization"), covering(sorted(DENSE_FAMILIES), ["none", "int8", "q8_0"]))
def test_folders_give_the_same_bits(family: str, quantization: str) -> None:
    check_twice(tiny_checkpoints.cached_checkpoint(family), quantization=quantization)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"hidden_size": 256, "head_dim": 32, "intermediate_size": 512},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_0"])
def test_variants_give_the_same_bits(changes: dict[str, Any], kind: str) -> None:
    check_twice(pair("llama", kind, **changes)[1])


def test_layers_that_adapters_name_are_the_same() -> None:
    second = check_twice(tiny_checkpoints.cached_checkpoint("llama"))
    assert second.adapters is not None
    assert second.adapters.layers["model.layers.0.self_attn.v_proj"] == LayerShape(32, 16, False)


def test_what_is_measured_is_known_without_the_files_header() -> None:
    _, file = pair("qwen2", "Q8_0")
    config = ModelConfig(model=str(file))
    want = weights_of(config)
    run(file)
    assert kept_models() and weights_of(config) == want


def test_the_largest_step_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = pair("qwen2", "Q8_0")
    first, want = run(file, num_blocks=None, max_kv_memory=1 << 22)

    def fail(*arguments: object) -> None:
        raise AssertionError("it is known what it takes")

    monkeypatch.setattr(kv_profiling, "run_largest_step", fail)
    second, have = run(file, num_blocks=None, max_kv_memory=1 << 22)
    assert torch.equal(want, have) and first.info == second.info
    with pytest.raises(AssertionError, match="it is known"):
        run(file, num_blocks=None, max_kv_memory=1 << 22, step_tokens=17)


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"max_model_len": 40}, {"kernel": "cpu"}], ids=str)
def test_another_wish_is_another_entry_or_the_same_bits(settings: dict[str, Any]) -> None:
    folder = tiny_checkpoints.cached_checkpoint("llama")
    run(folder)
    first, want = run(folder, **settings)
    second, have = run(folder, **settings)
    assert is_restored(second) and torch.equal(want, have) and first.info == second.info
    assert is_restored(first) == (settings == {"kernel": "cpu"})


def test_a_changed_file_is_loaded_anew(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoints.cached_checkpoint("llama"), tmp_path / "model")
    run(folder)
    other = tiny_checkpoints.cached_checkpoint("llama", seed=1)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    changed, have = run(folder)
    assert not is_restored(changed) and torch.equal(have, run(other)[1])


def test_a_damaged_entry_is_made_anew() -> None:
    folder = tiny_checkpoints.cached_checkpoint("llama")
    _, want = run(folder)
    (entry,) = kept_models()
    for at in (entry.num_bytes - 100, 200, 3):
        data = bytearray(entry.path.read_bytes())
        data[at] ^= 16
        entry.path.write_bytes(data)
        again, have = run(folder)
        assert not is_restored(again) and torch.equal(want, have)
        assert is_restored(run(folder)[0])


def _without_tensors(text: Description) -> Description:
    return msgspec.structs.replace(text, tensors=text.tensors[:3])


def _beyond(text: Description) -> Description:
    places = [msgspec.structs.replace(place, begin=place.begin + (64 << 20)) for place in text.tensors]
    return msgspec.structs.replace(text, tensors=tuple(places))


def _unknown_type(text: Description) -> Description:
    places = [msgspec.structs.replace(place, dtype="complex64") for place in text.tensors]
    return msgspec.structs.replace(text, tensors=tuple(places))


def _wider(text: Description) -> Description:
    layers = [
        msgspec.structs.replace(
            layer, out=tuple(msgspec.structs.replace(part, outputs=part.outputs * 64) for part in layer.out)
        )
        for layer in text.model.layers
    ]
    return msgspec.structs.replace(text, model=msgspec.structs.replace(text.model, layers=tuple(layers)))


def _other_key(text: Description) -> Description:
    return msgspec.structs.replace(text, key=text.key + " ")


@pytest.mark.parametrize("change", [_without_tensors, _beyond, _unknown_type, _wider, _other_key])
def test_an_entry_that_says_something_else_is_not_used(change: Any) -> None:
    folder = tiny_checkpoints.cached_checkpoint("llama")
    _, want = run(folder)
    (entry,) = kept_models()
    files = file_cache.FileCache("models")
    found = files.read(entry.path, lambda size: torch.empty(size, dtype=torch.uint8).numpy())
    assert found is not None
    text = change(msgspec.json.decode(found[0], type=Description))
    assert files.write(entry.path, msgspec.json.encode(text), [found[1]])
    again, have = run(folder)
    assert not is_restored(again) and torch.equal(want, have)


def test_a_model_that_would_give_other_bits_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "restores_exactly", lambda *arguments: False)
    run(tiny_checkpoints.cached_checkpoint("llama"))
    assert not kept_models()


@pytest.mark.parametrize(
    ("family", "settings"), [("mixtral", {}), ("gpt2", {}), ("llama", {"dtype": "bfloat16"})], ids=str
)
def test_other_models_are_not_kept(family: str, settings: dict[str, Any]) -> None:
    folder = tiny_checkpoints.cached_checkpoint(family)
    _, want = run(folder, **settings)
    assert not kept_models() and torch.equal(run(folder, **settings)[1], want)


_LOADS = """
import sys
from bridle.model import model_cache
model_cache.LEAST_BYTES = 0
from tests.model.driver import record
import transformers.models.llama.modeling_llama
print("ready", flush=True)
print(record(sys.argv[1])[1].double().sum().item())
"""


@pytest.mark.slow  # `test_file_cache.py` has many writers of one entry
def test_two_processes_may_load_one_model_at_once() -> None:
    folder = tiny_checkpoints.cached_checkpoint("llama")
    command = [sys.executable, "-c", _LOADS, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        _, mine = run(folder)
        told = process.stdout.read()
    second, have = run(folder)
    assert is_restored(second) and len(kept_models()) == 1
    assert float(told) == mine.double().sum().item() == have.double().sum().item()


_NEEDS_NONE = """
import sys
from bridle.config import ModelConfig
from bridle.model import load_executor
from bridle.tokenizer import Tokenizer
executor = load_executor(ModelConfig(model=sys.argv[1]))
Tokenizer.load(sys.argv[1])
print(type(executor.runner.model).__name__, "transformers" in sys.modules, "torch._dynamo" in sys.modules)
"""


def test_a_kept_file_needs_no_transformers() -> None:
    _, file = pair("qwen2", "Q8_0")
    run(file)
    command, environment = [sys.executable, "-c", _NEEDS_NONE, str(file)], os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert told == "RestoredModel False False\n"
