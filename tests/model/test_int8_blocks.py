"""Tests of KV blocks in 8 bits: they are smaller than exact blocks and within the stated error. 8-bit blocks have cache
keys of their own, and are found after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle import LLM
from bridle.config import EngineConfig
from bridle.errors import InvalidRequest
from bridle.kv_store.records import bytes_of
from bridle.model.geometry import Geometry, LayerGeometry
from bridle.model.int8_blocks import Heads, Int8Blocks, Int8Codec
from bridle.model.kv_blocks import CacheBlocks
from bridle.model.kv_cache import KVCache
from tests.fakes.tiny_checkpoints import cached_checkpoint

PROMPT = [5 + i * i % 200 for i in range(200)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))


def as_floats(data: bytes | memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).float()


@given(
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    widths=st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=5),
    spread=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_each_number_is_within_half_a_step(seed: int, dtype: torch.dtype, widths: list[int], spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [Heads(6, width) for width in widths]
    rows = [torch.randn(6, width, generator=generator).mul(spread).to(dtype) for width in widths]
    rows[0][0] = 0
    block = b"".join(row.view(torch.uint8).numpy().tobytes() for row in rows)
    codec = Int8Codec(parts, str(dtype).removeprefix("torch."))
    data = codec.encode(block)
    assert len(data) == codec.num_bytes == sum(6 * (width + 4) for width in widths)
    found, at = as_floats(codec.decode(memoryview(data)), dtype), 0
    for row in rows:
        have = found[at : at + row.numel()].view(row.shape)
        largest = row.float().abs().amax(1, keepdim=True)
        rounding = have.abs() * torch.finfo(dtype).eps
        assert ((have - row.float()).abs() <= largest / 254 * 1.001 + rounding + 1e-9).all()
        at += row.numel()


def test_blocks_of_a_cache_come_back_within_the_error() -> None:
    shapes = {0: LayerGeometry(2, 1, 8, 8, 1.0), 3: LayerGeometry(4, 2, 8, 16, 1.0)}
    cache = KVCache(Geometry(shapes, 10), 5, 4, torch.float32, torch.device("cpu"))
    before = [part.normal_().clone() for layer in cache.layers.values() for part in (layer.keys, layer.values)]
    heads = [Heads(4 * part.shape[1], part.shape[2]) for part in before]
    blocks = Int8Blocks(CacheBlocks(cache, str), Int8Codec(heads, "float32"))
    data = bytes_of(blocks.read_block(3), blocks.block_bytes)
    assert len(data) < cache.num_bytes // 5 / 2
    blocks.write_block(1, memoryview(data))
    after = [part for layer in cache.layers.values() for part in (layer.keys, layer.values)]
    for have, want in zip(after, before, strict=True):
        assert torch.allclose(have[4:8], want[12:16], atol=float(want.abs().max()) / 250)
        assert torch.equal(have[8:], want[8:])
        assert torch.equal(have[:4], want[:4])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_after_a_restart_blocks_of_the_same_format_are_found(tmp_path: Path, dtype: str) -> None:
    model = str(cached_checkpoint("llama", head_dim=16, hidden_size=64))
    store: dict[str, Any] = {"kv_store": str(tmp_path / "kv"), "num_blocks": 64, "dtype": dtype}
    sizes, found = {}, []
    for kind in ("int8", "exact", "int8", "exact"):
        with LLM(model, kv_store_format=kind, **store) as llm:
            (output,) = llm.generate([PROMPT], max_tokens=1, temperature=0)
            found.append(output.usage.cached_tokens)
            if statistics := llm.statistics().num_restored_bytes:
                sizes[kind] = statistics
    assert found == [0, 0, 192, 192]
    assert sizes["int8"] < sizes["exact"] * (0.4 if dtype == "float32" else 0.7)


def test_what_cannot_be_stored_in_8_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="kv_store_format is 'int4'; must be exact or int8"):
        EngineConfig(kv_store_format="int4")
    with pytest.raises(InvalidRequest, match="kv_store_format is 'int8'; it needs a KV cache of floating-point"):
        LLM(str(cached_checkpoint("llama")), kv_store=str(tmp_path), kv_store_format="int8", kv_cache_dtype="int8")


def test_halves_are_rounded_to_even_as_torch_does() -> None:
    numbers = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    codec = Int8Codec([Heads(256, 16)], "bfloat16")
    raw = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    data = memoryview(codec.encode(raw))
    scales = np.frombuffer(data, np.float32, 256, 4096)
    want = torch.from_numpy(np.frombuffer(data, np.int8, 4096).reshape(256, 16) * scales[:, None]).to(torch.bfloat16)
    assert codec.decode(data) == want.view(torch.uint8).numpy().tobytes()
