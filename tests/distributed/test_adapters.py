"""Tests of adapters with shards: the router decides which are loaded, and the shard reads the files. Outputs equal
those of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridle.config import ModelConfig
from bridle.distributed.adapter_calls import CalledDevice, check
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine import Engine, Request
from bridle.engine.interfaces import Executor
from bridle.errors import AdapterRefused, UnsupportedFeature
from bridle.launch.launcher import LaunchedShard, launch_shard, shard_arguments
from bridle.lora import AdapterDevice, AdapterPool, find_device, open_adapter, require_device
from bridle.model.loading import load_executor
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from tests.distributed.kit import Host, Said, ask, hosted, said_by
from tests.fakes import tiny_checkpoints
from tests.lora.kit import ALL_LINEAR, write_adapter

MEMORY = 1 << 30
ADAPTERS = (None, "poet", "clerk")


def config_of(family: str) -> ModelConfig:
    return ModelConfig(str(tiny_checkpoints.cached_checkpoint(family)), num_blocks=64, block_size=16, num_threads=1)


def make_pool(device: AdapterDevice, folder: Path) -> AdapterPool:
    pool = AdapterPool(device, item_size=4, device_memory=MEMORY, host_memory=MEMORY)
    for seed, (name, targets) in enumerate((("poet", ("q_proj", "v_proj")), ("clerk", ALL_LINEAR))):
        path = folder / name
        if not path.exists():
            write_adapter(path, device.layers, targets=targets, rank=8, seed=seed)
        files = open_adapter(path)
        pool.check(files)
        pool.add(name, files)
    return pool


def requests() -> list[Request]:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=12, seed=3, n=2, ignore_eos=True, prompt_logprobs=0)
    return [
        Request(f"r{i}", tuple(range(5, 20 + 5 * i)), (greedy, drawn)[i % 2], adapter=ADAPTERS[i % 3]) for i in range(6)
    ]


def run(executor: Executor, folder: Path, between: Callable[[], None] = lambda: None) -> list[Said]:
    """Return the outputs of two runs, with `between` called in between."""
    device = find_device(executor)
    assert device is not None
    engine = Engine(executor, adapters=make_pool(device, folder))
    try:
        first = said_by(engine, requests())
        between()
        return [first, said_by(engine, requests())]
    finally:
        engine.close()


def test_a_shard_says_what_the_model_says_here(tmp_path: Path) -> None:
    """A shard gives a local model's output, even after a lost connection, when it has dropped all adapters."""
    here, behind = load_executor(config_of("llama")), load_executor(config_of("llama"))
    expected = run(here, tmp_path)
    assert expected[0]["r0", 0] != expected[0]["r1", 0]
    with hosted(behind) as host:
        there = host.connect()
        assert there.adapters.layers == require_device(behind).layers

        def lose() -> None:
            assert there.link is not None
            there.link.cut("a test")
            host.wait_free()

        assert run(there, tmp_path, lose) == expected
        assert there.num_losses == 1
        assert behind.adapters is not None and "poet" in behind.adapters


@pytest.mark.slow
def test_the_next_shard_reads_all_adapters_again(tmp_path: Path) -> None:
    config = config_of("llama")
    expected = run(load_executor(config), tmp_path)
    there = launch_shard(config, stands_by=False)
    assert isinstance(there, LaunchedShard)
    assert run(there, tmp_path, there.child.kill) == expected
    assert there.num_losses == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi"])
def test_two_ranks_say_what_one_process_says(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    command = [sys.executable, "-m", "bridle", "shard", *shard_arguments(config), "--shards", "2"]
    assert run(LaunchedShard(command, name="group of two"), tmp_path) == run(load_executor(config), tmp_path)


@pytest.fixture
def host() -> Iterator[Host]:
    with hosted(ScriptedExecutor(num_blocks=8, block_size=4)) as made:
        yield made


def calling(host: Host) -> CalledDevice:
    """Return a device that uses the shard's unary calls, without a stream."""
    return CalledDevice(
        {},
        lambda request: check(ask(host, "LoadAdapter", request, pb.LoadAdapterReply)),
        lambda request: check(ask(host, "UnloadAdapter", request, pb.UnloadAdapterReply)),
    )


def test_what_a_shard_refuses_is_told_in_its_words(host: Host, tmp_path: Path) -> None:
    """A scripted executor supports no adapters, and a real executor checks the files itself."""
    files = open_adapter(write_adapter(tmp_path))
    with pytest.raises(UnsupportedFeature, match="does not support adapters"):
        calling(host).read("poet", files)
    with pytest.raises(UnsupportedFeature):
        calling(host).drop("poet")


def test_other_files_than_the_router_knows_are_refused(host: Host, tmp_path: Path) -> None:
    executor = load_executor(config_of("llama"))
    host.shard.executor = executor
    files = open_adapter(write_adapter(tmp_path, require_device(executor).layers))
    calling(host).read("poet", files)
    write_adapter(tmp_path, require_device(executor).layers, seed=1)
    with pytest.raises(AdapterRefused, match="differ from the files on"):
        calling(host).read("poet", files)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterRefused, match="has no adapter_model"):
        calling(host).read("poet", files)
    executor.close()
