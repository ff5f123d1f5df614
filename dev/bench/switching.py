"""PEFT with many adapters, which computes the requests of one adapter at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridle.bench.baselines import BaselineRun, Stopwatch, load_transformers
from bridle.bench.checkpoints import BenchCheckpoint


class SwitchingPeer:
    """A PEFT model with all adapters loaded."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model: Any = model
        self._vocab_size = vocab_size

    @classmethod
    def load(cls, checkpoint: BenchCheckpoint, adapters: Sequence[Path]) -> SwitchingPeer | None:
        """Load the model and its adapters; None if PEFT is not installed."""
        try:
            from peft import PeftModel
        except ImportError:
            return None
        model: Any = PeftModel.from_pretrained(load_transformers(checkpoint), adapters[0], adapter_name="0")
        for number, path in enumerate(adapters[1:], 1):
            model.load_adapter(path, str(number))
        return cls(model.eval(), checkpoint.vocab_size)

    def generate(self, num_adapters: int, num_prompts: int, prompt_tokens: int, num_new: int) -> BaselineRun:
        """Generate `num_new` tokens for at least one prompt of each adapter, and about `num_prompts` prompts in
        total."""
        import torch
        from transformers import GenerationConfig

        rows = max(num_prompts // num_adapters, 1)
        prompts = torch.arange(rows * prompt_tokens).view(rows, prompt_tokens) * 7 % (self._vocab_size - 3) + 3
        how = GenerationConfig(do_sample=False, max_new_tokens=num_new, min_new_tokens=num_new, pad_token_id=0)
        watch, outputs = Stopwatch(), []
        for number in range(num_adapters):
            self._model.set_adapter(str(number))
            with torch.inference_mode():
                found = self._model.generate(
                    input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=how
                )
            outputs += found[:, prompt_tokens:].tolist()
        return watch.stop(outputs)
