"""Generators that a benchmark compares: bridle's engine, and transformers' `generate` and continuous batching.

Each generator has the same weights and gets the same prompts. All generators decode greedily and never stop early.
The time to load the model and to start threads is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.roofline import bench_device, wait_for_device
from bridle.config import EngineConfig, ModelConfig, Quantization
from bridle.engine.interfaces import Executor
from bridle.engine.request import Request
from bridle.outputs import Finished, TokenEvent
from bridle.sampling import SamplingParams

Prompts = Sequence[Sequence[int]]
#: Bits of a weight that is quantized while loading.
_BITS = {"q4_0": 4, "int8": 8, "q8_0": 8, "fp8": 8}


@dataclass(slots=True)
class BaselineRun:
    """The result of one generator: its outputs, its wall-clock seconds, and its processor seconds over all threads."""

    outputs: list[list[int]]
    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Measures elapsed and processor time since this object was created. For a GPU, reading the clock first waits until
    the GPU has finished its work."""

    def __init__(self) -> None:
        wait_for_device()
        self._begin, self._cpu_begin = time.perf_counter(), time.process_time()

    def stop(self, outputs: list[list[int]]) -> BaselineRun:
        wait_for_device()
        return BaselineRun(outputs, time.perf_counter() - self._begin, time.process_time() - self._cpu_begin)


class Peer(Protocol):
    """A program that generates. `bits` is the number of bits of a weight in a linear layer."""

    name: str
    bits: int

    def generate(self, prompts: Prompts, num_new: int) -> BaselineRun:
        """Generate `num_new` tokens for each prompt, all prompts at once; return the outputs in the order of the
        prompts."""

    def close(self) -> None:
        """Release the memory of the generator."""


class EnginePeer:
    """Bridle's engine over an executor, called directly, without HTTP and without text."""

    def __init__(
        self, executor: Executor, name: str = "bridle", bits: int = 32, max_num_seqs: int | None = None
    ) -> None:
        from bridle.engine import Engine

        self.name, self.bits = name, bits
        # Prompts are repeated in later rounds, so a prefix cache would give bridle an unfair advantage.
        settings = EngineConfig(enable_prefix_caching=False, max_num_seqs=max_num_seqs)
        self._step_tokens = executor.info.max_num_batched_tokens
        self.engine = Engine(executor, settings)
        self._num_requests = 0
        self._outputs: dict[str, list[int]] = {}

    def generate(self, prompts: Prompts, num_new: int) -> BaselineRun:
        watch = Stopwatch()
        outputs = self._add(prompts, num_new)
        while self.engine.has_work:
            self._step(outputs)
        return watch.stop(list(outputs.values()))

    def start(self, prompts: Prompts, num_new: int, top_p: float | None = None) -> None:
        """Run steps until each of `prompts` has its first output token. Each prompt has `num_new` more tokens to
        sample, greedily or with `top_p`."""
        # The first sequences sample tokens while the last prompt is still computed.
        reading = sum(map(len, prompts)) // self._step_tokens + len(prompts)
        outputs = self._add(prompts, reading + num_new, top_p)
        while not all(outputs.values()):
            self._step(outputs)
        self._outputs = outputs

    def advance(self, num_steps: int) -> list[BaselineRun]:
        """Run further steps after `start`, each sampling one token for each prompt."""
        runs: list[BaselineRun] = []
        while len(runs) < num_steps:
            watch = Stopwatch()
            if self._step(self._outputs) == len(self._outputs):
                runs.append(watch.stop([]))
        return runs

    def advance_at_once(self, num_steps: int) -> BaselineRun:
        """Run further steps as `advance` does, but measure them as a whole, without waiting for a GPU between steps."""
        watch = Stopwatch()
        done = 0
        while done < num_steps:
            done += self._step(self._outputs) == len(self._outputs)
        return watch.stop([])

    def finish(self) -> None:
        """Cancel the requests that a call of `start` began."""
        for request_id in self._outputs:
            self.engine.cancel(request_id)
        while self.engine.has_work:
            self.engine.step()

    def _add(self, prompts: Prompts, num_new: int, top_p: float | None = None) -> dict[str, list[int]]:
        """Add a request for each prompt; return the lists of output tokens, which grow, by request id."""
        sampling = SamplingParams(
            max_tokens=num_new,
            temperature=0.0 if top_p is None else 1.0,
            top_p=1.0 if top_p is None else top_p,
            ignore_eos=True,
        )
        outputs: dict[str, list[int]] = {}
        for prompt in prompts:
            self._num_requests += 1
            request = Request(str(self._num_requests), tuple(prompt), sampling, detokenize=False)
            outputs[request.id] = []
            self.engine.add(request)
        return outputs

    def _step(self, outputs: dict[str, list[int]]) -> int:
        """Run one step of the engine; return the number of sampled tokens."""
        drawn = 0
        for event in self.engine.step():
            if isinstance(event, TokenEvent):
                outputs[event.request_id].append(event.token)
                drawn += 1
            elif isinstance(event, Finished) and event.error is not None:
                raise event.error
        return drawn

    def close(self) -> None:
        self.engine.close()


class BridlePeer(EnginePeer):
    """Bridle's engine with the model of a checkpoint. With `file`, `backend` reads this file instead of the
    checkpoint."""

    def __init__(
        self,
        checkpoint: BenchCheckpoint,
        *,
        quantization: Quantization = "none",
        file: Path | None = None,
        backend: Literal["torch", "llamacpp"] = "torch",
        num_threads: int | None = None,
        capacity: int = 1 << 14,
        max_num_seqs: int | None = None,
    ) -> None:
        from bridle.backends import load_executor

        name, bits = (
            ("bridle", number_bits()) if quantization == "none" else (f"bridle {quantization}", _BITS[quantization])
        )
        config = ModelConfig(
            model=str(file or checkpoint.path),
            backend=backend,
            quantization=quantization,
            num_threads=num_threads,
            kv_memory=capacity * checkpoint.token_bytes,
        )
        super().__init__(load_executor(config), name, bits, max_num_seqs)


class GeneratePeer:
    """transformers' `model.generate` on the whole batch at once; prompts are padded on the left, as its documentation
    recommends."""

    name = "generate"

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        self.bits = 8 * model.dtype.itemsize

    def generate(self, prompts: Prompts, num_new: int) -> BaselineRun:
        import torch

        watch = Stopwatch()
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        attended = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=torch.tensor(padded, device=self.model.device),
                attention_mask=torch.tensor(attended, device=self.model.device),
                generation_config=_greedy(num_new),
            )
        return watch.stop(output[:, width:].tolist())

    def close(self) -> None:
        self.model = None


class ContinuousPeer:
    """transformers' continuous batching; its manager is started before the measurement."""

    name = "continuous"

    def __init__(self, model: Any, *, capacity: int = 1 << 14, max_batch_tokens: int = 512) -> None:
        from transformers import ContinuousBatchingConfig

        self.model: Any = model
        self.bits = 8 * model.dtype.itemsize
        self._config = ContinuousBatchingConfig(
            page_size=32, num_blocks=capacity // 32, max_batch_tokens=max_batch_tokens, allow_block_sharing=False
        )

    def generate(self, prompts: Prompts, num_new: int) -> BaselineRun:
        manager: Any
        session: AbstractContextManager[Any] = self.model.continuous_batching_context_manager(
            generation_config=_greedy(num_new), continuous_batching_config=self._config, timeout=60
        )
        with session as manager:
            watch = Stopwatch()
            names = manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=num_new)
            done: dict[str, list[int]] = {}
            while len(done) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"{self.name} failed: {result.error}")
                    done[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError(f"{self.name} stopped before all requests were finished")
            return watch.stop([done[name] for name in names])

    def close(self) -> None:
        self.model = None


def load_transformers(checkpoint: BenchCheckpoint) -> Any:
    """Return the model as transformers loads it, with the type that bridle uses: float32 on a CPU, bfloat16 on a
    GPU."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if number_bits() == 32 else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype, attn_implementation="sdpa")
    return model.to(bench_device()).eval()


def number_bits() -> int:
    """Return the number of bits of one weight that is not quantized."""
    return 32 if bench_device().type == "cpu" else 16


def _greedy(num_new: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, max_new_tokens=num_new, eos_token_id=-1, pad_token_id=0)
