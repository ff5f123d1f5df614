"""Two processes that share a model give the output of one process. Models that cannot be split are refused."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bridle.config import ModelConfig
from bridle.engine import Engine, Request
from bridle.engine.interfaces import Executor
from bridle.errors import UnsupportedModel
from bridle.launch import group
from bridle.launch.launcher import LaunchedShard, shard_arguments
from bridle.model.loading import load_executor
from bridle.model.tensor_parallel import _split, read_plan
from bridle.outputs import Embedded, TokenEvent
from bridle.sampling import SamplingParams
from tests.fakes import tiny_checkpoints
from tests.waiting import PATIENCE


def config_of(family: str) -> ModelConfig:
    return ModelConfig(str(tiny_checkpoints.cached_checkpoint(family)), num_blocks=64, block_size=16, num_threads=1)


def launch_group(config: ModelConfig) -> LaunchedShard:
    command = [sys.executable, "-m", "bridle", "shard", *shard_arguments(config), "--shards", "2"]
    return LaunchedShard(command, name="group of two")


def requests() -> list[Request]:
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=16, seed=3, n=2, ignore_eos=True)
    return [Request(f"r{i}", tuple(range(5, 20 + 9 * i)), (greedy, drawn)[i % 2]) for i in range(4)]


def tokens_of(engine: Engine) -> dict[tuple[str, int], list[int]]:
    for request in requests():
        engine.add(request)
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                found.setdefault((event.request_id, event.index), []).append(event.token)
    return found


def vectors_of(executor: Executor) -> list[list[float]]:
    engine = Engine(executor)
    try:
        for number in range(3):
            prompt = tuple(range(5, 9 + 20 * number))
            engine.add(Request(f"e{number}", prompt, SamplingParams(max_tokens=1), embeds=True))
        found: dict[str, list[float]] = {}
        while engine.has_work:
            found |= {event.request_id: list(event.vector) for event in engine.step() if isinstance(event, Embedded)}
        return [found[name] for name in sorted(found)]
    finally:
        engine.close()


def run(executor: Executor) -> dict[tuple[str, int], list[int]]:
    engine = Engine(executor)
    try:
        return tokens_of(engine)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "qwen3_5_text"])
def test_two_ranks_say_what_one_process_says(family: str) -> None:
    there = launch_group(config_of(family))
    assert run(there) == run(load_executor(config_of(family)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_two_ranks_embed_as_one_process_does(family: str) -> None:
    """Embeddings are equal except for rounding, because the parts are added in another order."""
    found, wanted = vectors_of(launch_group(config_of(family))), vectors_of(load_executor(config_of(family)))
    assert len(found) == 3
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_ranks_size_their_pools_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each rank runs its part of the largest step with a trial pool. All ranks get the pool size of the rank with the
    least memory."""
    alone = replace(config_of("llama"), num_blocks=None, block_size=4, max_model_len=64, step_tokens=16, step_seqs=4)
    command, lost = group._command, SimpleQueue[str]()
    monkeypatch.setattr(
        group, "_command", lambda config, *place: command(replace(config, max_kv_memory=1 << 16), *place)
    )
    monkeypatch.setattr(group, "Members", partial(group.Members, on_loss=lost.put))
    caplog.set_level(logging.DEBUG, logger="bridle")
    monkeypatch.setattr("bridle.logs.shown", {"BRIDLE_LOG_LEVEL": "debug"})  # for child processes
    try:
        executor = group.load_group(alone, 2)
        info, found = executor.info, run(executor)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert lost.empty()
    told = re.findall(r"the largest step \((.*)\) takes .* holds (\d+) tokens", caplog.text + capfd.readouterr().err)
    assert told == [("16 prompt tokens, 4 sequences", str(info.num_blocks * 4))] * 2
    here = load_executor(alone)
    assert 16 <= info.num_blocks < here.info.num_blocks
    assert found == run(here)


@pytest.mark.slow
def test_the_death_of_a_rank_restarts_the_group() -> None:
    config = config_of("llama")
    there = launch_group(config)
    engine = Engine(there)
    try:
        assert there.child.pid is not None
        rank0 = psutil.Process(there.child.pid)
        (rank1,) = rank0.children()
        os.kill(rank1.pid, signal.SIGKILL)
        psutil.wait_procs([rank0], timeout=PATIENCE)
        assert tokens_of(engine) == run(load_executor(config))  # waits for the next group
        assert there.num_losses == 1
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "count", "why"),
    [
        ("gpt2", 2, "has no tensor-parallel plan"),
        ("mixtral", 2, "has the unsupported style"),
        ("llama", 3, "2 key-value heads, which 3 shards cannot share"),
        ("llama", 4, "2 key-value heads, which 4 shards cannot share"),
    ],
)
def test_what_cannot_be_shared_is_refused(family: str, count: int, why: str) -> None:
    from transformers import AutoConfig

    settings: Any = AutoConfig.from_pretrained(tiny_checkpoints.cached_checkpoint(family))
    with pytest.raises(UnsupportedModel, match=why):
        read_plan(settings, count)


@pytest.mark.parametrize("bias", [True, False])
def test_parts_add_up(bias: bool) -> None:
    whole, rows = nn.Linear(12, 8, bias=bias), torch.randn(5, 12)
    outputs = [_split("x", whole, "split", rank, 2)(rows) for rank in range(2)]
    assert torch.allclose(torch.cat(outputs, dim=1), whole(rows), atol=1e-6)
    weights: list[Any] = [_split("x", whole, "sum", rank, 2).weight for rank in range(2)]
    shares = [part @ weight.T for part, weight in zip(rows.chunk(2, dim=1), weights, strict=True)]
    assert torch.allclose(shares[0] + shares[1] + (whole.bias if bias else 0), whole(rows), atol=1e-6)


@pytest.mark.parametrize(("shape", "action"), [((12, 9), "split"), ((9, 12), "sum")])
def test_layers_that_do_not_divide_are_refused(shape: tuple[int, int], action: str) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be split into 2 parts"):
        _split("x", nn.Linear(*shape), action, 0, 2)


def test_a_plan_is_the_librarys_own() -> None:
    plan = {"layers.*.self_attn.q_proj": "colwise"}
    settings: Any = SimpleNamespace(model_type="x", base_model_tp_plan=plan, num_attention_heads=4)
    assert read_plan(settings, 2) == plan
