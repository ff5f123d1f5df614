"""Tests of KV blocks that are copied to the host as bytes: they are exact, bound to their model, and found after a
restart."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle import LLM
from bridle.config import ModelConfig
from bridle.kv_store.records import bytes_of
from bridle.model import weights_digest
from bridle.model.device_blocks import DeviceBlocks
from bridle.model.executor import LocalExecutor
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.kv_blocks import CacheBlocks
from bridle.model.kv_cache import KVCache
from bridle.model.loading import load_executor
from bridle.model.state_pool import StatePool, StateShape
from tests.covering import slow_but
from tests.fakes.tiny_checkpoints import HYBRID_FAMILIES, cached_checkpoint

PROMPT = [5 + i * i % 200 for i in range(200)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))


def tensors_of(pool: StatePool) -> list[torch.Tensor]:
    return [part for layer in pool.layers.values() for part in layer.values()]


def parts_of(cache: KVCache) -> list[torch.Tensor]:
    return [part for layer in cache.layers.values() for part in layer.parts]


#: Blocks in the host's memory, and those of a device, which copies them by itself.
KINDS = [
    pytest.param("cpu", CacheBlocks, id="host"),
    pytest.param("cpu", DeviceBlocks, id="device"),
    pytest.param("cuda", DeviceBlocks, id="cuda", marks=pytest.mark.gpu),
]


def bytes_read(blocks: CacheBlocks | DeviceBlocks, block: int) -> memoryview:
    return memoryview(bytes_of(blocks.read_block(block), blocks.block_bytes))


@pytest.mark.parametrize(("device", "kind"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_block_comes_back_bit_by_bit_and_touches_no_other(
    dtype: torch.dtype, device: str, kind: type[CacheBlocks | DeviceBlocks]
) -> None:
    shapes = {0: LayerGeometry(2, 1, 8, 8, 1.0), 3: LayerGeometry(4, 2, 8, 16, 1.0)}
    first, second = (KVCache(Geometry(shapes, 10), 5, 4, dtype, torch.device(device)) for _ in range(2))
    for part in parts_of(first):
        part.view(torch.uint8).random_(0, 256)
    for part in parts_of(second):
        part.view(torch.uint8).zero_()
    source, target = (kind(cache, str) for cache in (first, second))
    data = bytes_read(source, 3)
    assert len(data) == source.block_bytes == first.num_bytes // 5
    target.write_block(1, data)
    for have, want in zip(parts_of(second), parts_of(first), strict=True):
        bits = have.view(torch.uint8)
        assert torch.equal(bits[4:8], want.view(torch.uint8)[12:16])
        assert not bits[:4].any()
        assert not bits[8:].any()


def test_equal_layers_are_copied_in_one_go() -> None:
    shapes = {number: LayerGeometry(4, 2, 8, 8, 1.0) for number in range(5)}
    cache = KVCache(Geometry(shapes, 10), 5, 4, torch.float32, torch.device("cpu"))
    assert len(CacheBlocks(cache, str).parts) == 1
    mixed = KVCache(Geometry(shapes | {5: LayerGeometry(4, 2, 8, 16, 1.0)}, 10), 5, 4, torch.float32, cache.device)
    assert len(CacheBlocks(mixed, str).parts) == 2


def test_a_device_and_the_host_have_one_format() -> None:
    cache = KVCache(Geometry({0: LayerGeometry(2, 1, 8, 8, 1.0)}, 10), 5, 4, torch.int8, torch.device("cpu"))
    for part in parts_of(cache):
        part.view(torch.uint8).random_(0, 256)
    assert bytes_read(DeviceBlocks(cache, str), 2) == bytes_read(CacheBlocks(cache, str), 2)


@pytest.mark.gpu
def test_a_copy_is_of_the_time_when_it_was_asked_for() -> None:
    """A copy has the block's content of the time of the request, although later steps overwrite the block."""
    device = torch.device("cuda")
    cache = KVCache(Geometry({0: LayerGeometry(2, 1, 64, 64, 1.0)}, 10), 5, 16, torch.float32, device)
    blocks = DeviceBlocks(cache, str)
    for number in range(50):
        for part in parts_of(cache):
            part.fill_(number)
        copy = blocks.read_block(1)
        for part in parts_of(cache):
            part.fill_(-1)
        memory = blocks.allocate_host(blocks.block_bytes)
        copy.copy_into(memory)
        assert (torch.frombuffer(memory, dtype=torch.float32) == number).all()


@pytest.mark.parametrize(("device", "kind"), KINDS)
def test_a_state_comes_back_bit_by_bit_and_touches_no_other(
    device: str, kind: type[CacheBlocks | DeviceBlocks]
) -> None:
    shapes = {
        n: {("conv", 0): StateShape((3, n), torch.bfloat16), ("recurrent", 0): StateShape((2,), torch.float32)}
        for n in (1, 4)
    }
    first, second = (StatePool(shapes, 3, torch.device(device)) for _ in range(2))
    for number, pool in enumerate((first, second)):
        for part in tensors_of(pool):
            part.view(torch.uint8).fill_(0) if number else part.view(torch.uint8).random_(0, 256)
    cache = KVCache(Geometry({}, 10), 5, 4, torch.float32, torch.device(device))
    source, target = (kind(cache, str, pool) for pool in (first, second))
    assert source.block_bytes == 0  # no attention
    target.write_block(1, bytes_read(source, 2))
    data = memoryview(bytes_of(source.read_state(2), source.state_bytes))
    assert len(data) == source.state_bytes == first.num_bytes // 3
    target.write_state(0, data)
    for have, want in zip(tensors_of(second), tensors_of(first), strict=True):
        bits = have.view(torch.uint8)
        assert torch.equal(bits[0], want.view(torch.uint8)[2])
        assert not bits[1:].any()


def identity(folder: Path, **settings: Any) -> str:
    executor = load_executor(ModelConfig(str(folder), num_blocks=8, warm_up=False, **settings))
    assert isinstance(executor, LocalExecutor)
    assert executor.kv_blocks is not None
    found = executor.kv_blocks.identity()
    executor.close()
    return found


def test_the_identity_follows_weights_and_all_that_changes_their_kv(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cached_checkpoint("llama"), tmp_path / "llama"))
    plain = identity(folder)
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert identity(moved) == identity(folder) == plain
    others = [
        identity(folder, **settings)
        for settings in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"block_size": 8}, {"max_model_len": 64})
    ]
    (weights,) = folder.glob("*.safetensors")
    state, content = weights.stat(), bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))  # as a copy does that keeps times
    assert len({plain, identity(folder), *others}) == 6


def test_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached_checkpoint("llama")
    found = weights_digest.weights_digest(folder)
    monkeypatch.setattr(weights_digest, "digest_piece", None)
    assert weights_digest.weights_digest(folder) == found


@pytest.mark.parametrize("dtype", slow_but(["auto", "int8"], ["auto", "int8", "bfloat16"]))
def test_after_a_restart_a_conversation_computes_only_new_tokens(tmp_path: Path, dtype: str) -> None:
    model = str(cached_checkpoint("llama"))
    settings: dict[str, Any] = {"num_blocks": 64, "kv_cache_dtype": dtype}
    with LLM(model, **settings) as llm:
        (want,) = llm.generate([PROMPT], max_tokens=20, temperature=0, ignore_eos=True)
    store = {"kv_store": str(tmp_path / "kv"), **settings}
    with LLM(model, **store) as llm:
        (first,) = llm.generate([PROMPT], max_tokens=20, temperature=0, ignore_eos=True)
    assert first.outputs[0].token_ids == want.outputs[0].token_ids
    with LLM(model, **store) as llm:
        (second,) = llm.generate([PROMPT], max_tokens=20, temperature=0, ignore_eos=True)
        assert second.outputs[0].token_ids == want.outputs[0].token_ids
        assert second.usage.cached_tokens == len(PROMPT) // 16 * 16
        (third,) = llm.generate([[*PROMPT, *second.outputs[0].token_ids, 7]], max_tokens=1)
        assert third.usage.cached_tokens == (len(PROMPT) + 19) // 16 * 16
        statistics = llm.statistics()
        assert statistics.num_restored_tokens == second.usage.cached_tokens
        assert statistics.num_restored_bytes == statistics.num_restored_tokens // 16 * llm.info.block_bytes


def test_a_cache_that_is_too_small_for_two_conversations_keeps_both(tmp_path: Path) -> None:
    prompts = [PROMPT, [token + 1 for token in PROMPT]]
    with LLM("demo", kv_store=str(tmp_path / "kv"), kv_store_bytes=64 << 20, max_batch_total_tokens=288) as llm:
        for turn in range(3):
            for prompt in prompts:
                (output,) = llm.generate([prompt], max_tokens=1)
                if turn == 2:
                    assert output.usage.cached_tokens == len(PROMPT) // 16 * 16
        statistics = llm.statistics()
        assert statistics.num_stored_blocks >= len(PROMPT) // 16
        assert statistics.num_restored_tokens > 0


@pytest.mark.parametrize("family", slow_but(["lfm2"], HYBRID_FAMILIES))
def test_a_recurrent_model_continues_after_a_restart_as_without_one(tmp_path: Path, family: str) -> None:
    """Two conversations with a common beginning continue for five turns, with a restart and without one."""
    model, options = str(cached_checkpoint(family)), {"dtype": "float32", "max_batch_total_tokens": 65_536}

    def turns(llm: LLM, numbers: range) -> list[tuple[list[int], int]]:
        found = []
        for number in numbers:
            tokens = chats[number % 2]
            (output,) = llm.generate([tokens], max_tokens=20, temperature=0, ignore_eos=True)
            answer = list(output.outputs[0].token_ids)
            tokens += [*answer, 7, 8 + number]
            found.append((answer, output.usage.cached_tokens))
        return found

    chats = start()
    with LLM(model, **options) as llm:  # type: ignore[arg-type]
        wanted = turns(llm, range(5))
    assert wanted[-1][1] > len(start()[0])
    chats, got = start(), []
    for number in range(5):
        with LLM(model, kv_store=str(tmp_path / "kv"), **options) as llm:  # type: ignore[arg-type]
            got += turns(llm, range(number, number + 1))
    assert got == wanted


def start() -> list[list[int]]:
    return [[3 + i * i % 200 for i in range(100)] + [number] * 30 for number in (5, 6)]
