"""Loads a tiny model with three adapters, and PEFT's model to compare with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from bridle.config import ModelConfig
from bridle.engine.interfaces import HistoryLookup
from bridle.engine.scheduling.step_plan import (
    PlanRow,
    SampleBatch,
    StepPlan,
    StepResult,
)
from bridle.lora import AdapterPool, open_adapter, require_device
from bridle.model.executor import LocalExecutor
from bridle.model.loading import load_executor
from bridle.model.sampler import StandardSampler
from tests.fakes import tiny_checkpoints
from tests.waiting import PATIENCE

MEMORY = 1 << 30
GAP = 1e-4
ALL_DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: What PEFT is asked to adapt, three ways per family.
TARGETS: dict[str, tuple[list[str], ...]] = {
    "llama": (["q_proj", "v_proj"], ALL_DENSE, ["up_proj", "o_proj"]),
    "mistral": (["q_proj", "v_proj"], ALL_DENSE, ["k_proj", "down_proj"]),
    "qwen2": (["q_proj", "v_proj"], ALL_DENSE, ["gate_proj"]),
    "phi": (["q_proj", "v_proj"], ["q_proj", "k_proj", "dense", "fc1", "fc2"], ["fc2"]),
    "phi3": (["qkv_proj"], ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ["gate_up_proj"]),
    "gpt_neox": (["query_key_value"], ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], ["dense"]),
    "gpt2": (["c_attn"], ["c_attn", "c_proj", "c_fc"], ["c_fc"]),
    "gemma2": (["q_proj", "v_proj"], ALL_DENSE, ["o_proj"]),
}

#: The same with recurrent layers.
RECURRENT_TARGETS: dict[str, tuple[list[str], ...]] = {
    "lfm2": (["in_proj", "q_proj"], ["in_proj", "out_proj", "q_proj", "w1", "w2"], ["q_proj"]),
}


def load_base(family: str) -> Any:
    path = tiny_checkpoints.cached_checkpoint(family)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def save_adapters(family: str, folder: Path) -> list[Path]:
    """Save three different adapters with PEFT; return their folders."""
    few, many, some = (TARGETS | RECURRENT_TARGETS)[family]
    is_transposed = family == "gpt2"
    configs = [
        LoraConfig(r=4, lora_alpha=8, target_modules=few, fan_in_fan_out=is_transposed),
        LoraConfig(
            r=6,
            lora_alpha=5,
            target_modules=many,
            use_rslora=True,
            rank_pattern={many[-1]: 16},
            alpha_pattern={many[0]: 9},
            fan_in_fan_out=is_transposed,
        ),
        LoraConfig(r=8, target_modules=some, layers_to_transform=[1], fan_in_fan_out=is_transposed),
    ]
    paths = []
    for number, config in enumerate(configs):
        model = get_peft_model(load_base(family), config)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        path = folder / f"{family}-{number}"
        model.save_pretrained(path)
        paths.append(path)
    return paths


class Oracle:
    """PEFT's own model, which applies one adapter at a time."""

    def __init__(self, family: str, paths: Sequence[Path]) -> None:
        self.model: Any = PeftModel.from_pretrained(load_base(family), paths[0], adapter_name="0")
        for number, path in enumerate(paths[1:], 1):
            self.model.load_adapter(path, str(number))

    def logits(self, tokens: Sequence[int], adapter: str | None) -> Tensor:
        """Return PEFT's logits [len(tokens), V] with an adapter, or without one."""
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode():
            if adapter is None:
                with self.model.disable_adapter():
                    return self.model(input_ids=ids).logits[0]  # type: ignore[no-any-return]
            self.model.set_adapter(adapter, inference_mode=True)
            return self.model(input_ids=ids).logits[0]  # type: ignore[no-any-return]

    def check_greedy(self, prompt: Sequence[int], tokens: Sequence[int], adapter: str | None) -> None:
        """Check that each token is the most probable one, unless the two best logits are nearly equal."""
        logits = self.logits([*prompt, *tokens[:-1]], adapter)[len(prompt) - 1 :]
        best = logits.topk(2, -1)
        for number, token in enumerate(tokens):
            if best.values[number, 0] - best.values[number, 1] > GAP:
                assert token == best.indices[number, 0], f"token {number} of {adapter} differs"


class Loaded:
    """An executor with three adapters on its device, and PEFT's model with the same adapters."""

    def __init__(self, family: str, folder: Path, **settings: Any) -> None:
        paths = save_adapters(family, folder)
        self.oracle = Oracle(family, paths)
        config = ModelConfig(str(tiny_checkpoints.cached_checkpoint(family)), num_threads=1, block_size=4, **settings)
        self.executor = load_executor(config)
        self.pool = AdapterPool(require_device(self.executor), item_size=4, device_memory=MEMORY, host_memory=MEMORY)
        for number, path in enumerate(paths):
            files = open_adapter(path)
            self.pool.check(files)
            self.pool.add(str(number), files)

    def place_all(self) -> None:
        for number in range(3):
            self.pool.fetch(str(number)).result(PATIENCE)
            require_device(self.executor).place(str(number))

    def await_all(self) -> None:
        """Run steps until all adapters are on the device: a waiting adapter does not evict others."""
        keys, end = ("0", "1", "2"), time.monotonic() + PATIENCE
        while len(self.pool.begin_step(keys)) < len(keys):
            assert time.monotonic() < end
            time.sleep(0.001)

    def close(self) -> None:
        self.pool.close()
        self.executor.close()


def all_logits(
    executor: LocalExecutor, prompts: Sequence[Sequence[int]], adapters: Sequence[str | None]
) -> list[Tensor]:
    """Return the logits [len(prompt), V] of each prompt with its adapter, all in one step."""
    rows, block = [], 0
    for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        num_blocks = -(-len(prompt) // 4)
        blocks = tuple(range(block, block + num_blocks))
        block += num_blocks
        size = len(prompt)
        rows.append(PlanRow(number, 0, size, size, new_tokens=tuple(prompt), new_blocks=blocks, adapter=adapter))
    executor.reset()
    executor.forward(StepPlan(1, rows))
    executor.sample(SampleBatch(1))
    logits = executor.logits
    assert logits is not None
    executor.reset()
    return list(logits.split([len(prompt) for prompt in prompts]))


class Drawing:
    """A pending result of sampling, whose tokens are on the device if `has_tokens`."""

    def __init__(self, result: StepResult, *, has_tokens: bool) -> None:
        self._result = result
        if has_tokens:
            self.tokens = torch.tensor(result.tokens)

    def take(self) -> StepResult:
        return self._result


class LateSampler:
    """A standard sampler with asynchronous results: it samples at once and returns the tokens later."""

    def __init__(self, *, has_tokens: bool = True) -> None:
        self._sampler, self._has_tokens = StandardSampler(), has_tokens

    def __call__(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> StepResult:
        return self._sampler(logits, batch, history)

    def draw(self, logits: Any, batch: SampleBatch, history: HistoryLookup) -> Drawing:
        return Drawing(self(logits, batch, history), has_tokens=self._has_tokens)


class LateHere(LocalExecutor):
    """An executor on a CPU that claims to be asynchronous. `num_named` counts the rows whose last token was not yet
    known to the host."""

    is_async = True
    num_named = 0

    def forward(self, plan: StepPlan) -> None:
        self.num_named += sum(row.new_tokens[-1:] < (0,) for row in plan.rows if row.new_tokens)
        super().forward(plan)


def load_late(config: ModelConfig, *, has_tokens: bool = True) -> LateHere:
    executor = load_executor(config, sampler=LateSampler(has_tokens=has_tokens))
    executor.__class__ = LateHere
    assert isinstance(executor, LateHere)
    return executor
