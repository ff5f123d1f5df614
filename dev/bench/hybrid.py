"""Speed of models with recurrent layers: prompts, and decoding with 1 and 16 sequences. Prefix hits, forks and
rollbacks are compared with recomputation.

Checkpoints are random, with the shapes of real models. `--load-model` selects some of these models, or folders, and
`--parts` selects `speed` or `reuse`. With `--llama-bench`, llama.cpp is measured too, in turns with bridle, on a GGUF
file of the same weights. The GGUF file is written unless the folder has one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bridle.bench.control import print_table
from bridle.bench.control_programs import GREEDY, KeptExecutor, prompt_of, steps_with
from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.real import FIRST_ID, run_llama_bench
from bridle.bench.settings import BenchSettings
from bridle.config import EngineConfig, ModelConfig
from bridle.controllers import Controller, PythonControllerPool, SequenceView
from bridle.engine import Branch, Decision, Engine, Request
from bridle.engine.interfaces import Executor
from bridle.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

_PARTS = ("speed", "reuse")
_ROWS = (1, 16)
_OUTPUT = GREEDY.with_(max_tokens=1_000)
_BRANCHES = 8
_WRITTEN, _TAKEN_BACK = 40, 6
_DELTA = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_LFM2_LAYERS = "ccaccaccacacacac"  # convolutions and attention
#: Shapes of real models. The last two are for quick trials.
SHAPES: dict[str, dict[str, Any]] = {
    "lfm2-350m": {
        "model_type": "lfm2",
        "vocab_size": 65_536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": len(_LFM2_LAYERS),
        "layer_types": ["conv" if each == "c" else "full_attention" for each in _LFM2_LAYERS],
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
        **_DELTA,
    },
    "nemotron-3-nano-short": {
        "model_type": "nemotron_h",
        "vocab_size": 32_768,
        "hidden_size": 2688,
        "layers_block_type": ["linear_attention", "moe"] * 2 + ["linear_attention", "full_attention", "moe"],
        "intermediate_size": 1856,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
        "time_step_min": 1e-9,  # GGUF files have no field for another value
    },
    "qwen3-next-short": {
        "model_type": "qwen3_next",
        "vocab_size": 32_768,
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "num_experts": 24,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        **_DELTA,
    },
    "falcon-h1-0.5b-short": {
        "model_type": "falcon_h1",
        "vocab_size": 32_784,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
    },
    "jamba-3b-short": {
        "model_type": "jamba",
        "vocab_size": 32_768,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 20,
        "num_key_value_heads": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 1,
        "mamba_dt_rank": 160,
        "mamba_d_state": 16,
    },
    "granite-4-h-350m": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100_352,
        "hidden_size": 768,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "layer_types": ["full_attention" if number in (10, 13, 17, 27) else "linear_attention" for number in range(32)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "position_embedding_type": None,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.246,
        "tie_word_embeddings": True,
    },
    "qwen3.5-small": {
        "model_type": "qwen3_5_text",
        "vocab_size": 8_192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_value_heads": 16,
        **_DELTA,
    },
    "mamba2-small": {
        "model_type": "mamba2",
        "vocab_size": 8_192,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_heads": 8,
        "head_dim": 64,
        "state_size": 128,
    },
}
_QUICK, _FULL = ("qwen3.5-small", "mamba2-small"), ("lfm2-350m", "qwen3.5-0.8b", "nemotron-3-nano-short")


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """Return the estimated seconds of each model: making it, loading it, and some hundred steps."""
    return {name: limits.python(10.0 if settings.quick else 120.0) for name in _names(settings)}


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Measure each model and print its table."""
    figures = {}
    parts_of(settings)
    for name in _names(settings):
        with phases.part(name), _folder_of(name) as folder:
            if settings.llama_bench is not None and not any(folder.glob("*.gguf")):
                _write_gguf(folder)
            figures[name] = _rows_of(folder, settings)
        print_table(console, name, figures[name])
    return figures


def _names(settings: BenchSettings) -> tuple[str, ...]:
    names = settings.models or (_QUICK if settings.quick else _FULL)
    for name in names:
        if name not in SHAPES and not Path(name).is_dir():
            raise InvalidRequest(
                f"no model is called {name!r}; give a folder, or one of {', '.join(SHAPES)}", "load_model"
            )
    return names


@contextmanager
def _folder_of(name: str) -> Iterator[Path]:
    """Yield a folder with the checkpoint called `name`; a folder that was made for it is removed afterwards."""
    if name not in SHAPES:
        yield Path(name)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(SHAPES[name])
    config = AutoConfig.for_model(fields.pop("model_type"), bos_token_id=1, eos_token_id=2, **fields)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="bridle-bench-") as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        yield Path(folder)


def _write_gguf(folder: Path) -> None:
    from bridle.serving.models.export import quantize_model
    from tests.fakes.tiny_checkpoints import save_tokenizer

    if not (folder / "tokenizer.json").exists():
        save_tokenizer(folder)
    quantize_model(str(folder), folder / "model.gguf", "Q8_0")


def _rows_of(folder: Path, settings: BenchSettings) -> list[dict[str, Any]]:
    from bridle.model import load_executor

    config = ModelConfig(str(folder), device="cpu", dtype="float32", quantization="q8_0", kv_memory=1 << 30)
    executor = load_executor(config)
    try:
        parts = parts_of(settings)
        speeds = _speeds(executor, folder, settings) if "speed" in parts else []
        return speeds + (_reuse(executor, settings) if "reuse" in parts else [])
    finally:
        executor.close()


def _speeds(executor: Executor, folder: Path, settings: BenchSettings) -> list[dict[str, Any]]:
    """Return tokens per second, measured in turns with llama.cpp if there is a GGUF file."""
    length, steps, rounds = scale_of(settings)
    file = next(folder.glob("*.gguf"), None) if settings.llama_bench else None
    rates: dict[str, list[float]] = {}
    for number in range(rounds):
        rates.setdefault("prompt", []).append(length / _first_token(executor, prompt_of(number, length)))
        for count in _ROWS:
            rates.setdefault(f"{count} at once", []).append(count / median(_steps(executor, count, steps)))
        if file is not None:
            for what, rate in zip(
                ("prompt", "1 at once"), run_llama_bench(str(file), length, steps, settings), strict=True
            ):
                rates.setdefault(f"llama-bench, {what}", []).append(rate)
    return [{"measured": what, "tokens/s": round(median(values), 1)} for what, values in rates.items()]


def parts_of(settings: BenchSettings) -> list[str]:
    """Return the parts that `--parts` selects. Raises `InvalidRequest` if no part has such a name."""
    found = [name for name in _PARTS if not settings.parts or any(part in name for part in settings.parts)]
    if not found:
        raise InvalidRequest(f"parts: got {', '.join(settings.parts)}; the parts are {', '.join(_PARTS)}", "parts")
    return found


def scale_of(settings: BenchSettings) -> tuple[int, int, int]:
    """Return the numbers of prompt tokens, decoding steps and rounds."""
    return (128, 8, 1) if settings.quick else (512, 32, 3)


def _engine(executor: Executor) -> Engine:
    return Engine(KeptExecutor(executor), EngineConfig(), pools=[PythonControllerPool(executor.info.vocab_size)])


def _steps(executor: Executor, count: int, steps: int) -> list[float]:
    """Return the seconds of `steps` decoding steps with `count` sequences each."""
    engine = _engine(executor)
    for number in range(count):
        engine.add(Request(f"s{number}", prompt_of(number, 16), _OUTPUT, detokenize=False))
    steps_with(engine, count, 2)
    return steps_with(engine, count, steps)


def _first_token(executor: Executor, prompt: tuple[int, ...]) -> float:
    return _finish(_engine(executor), Request("one", prompt, GREEDY.with_(max_tokens=1), detokenize=False))


def _finish(engine: Engine, *requests: Request) -> float:
    """Return the seconds until all requests are finished."""
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begin


# -- states that are used again ----------------------------------------------------------------------------


class Forking(Controller):
    """Forks one prompt into several sequences, each with one token."""

    def next(self, view: SequenceView) -> Decision:
        if len(view.tokens) == view.num_prompt:
            return Decision.fork(Branch() for _ in range(_BRANCHES))
        return Decision.stop()


class Rewinding(Controller):
    """Samples some tokens, and rolls the last ones back once for each branch."""

    def __init__(self, num_rewinds: int) -> None:
        self.left = num_rewinds

    def next(self, view: SequenceView) -> Decision:
        if len(view.tokens) < view.num_prompt + _WRITTEN:
            return Decision.sample()
        if not self.left:
            return Decision.stop()
        self.left -= 1
        return Decision.splice(_TAKEN_BACK, tuple(range(FIRST_ID, FIRST_ID + _TAKEN_BACK)))


def _reuse(executor: Executor, settings: BenchSettings) -> list[dict[str, Any]]:
    """Return the milliseconds that a reused state saves compared with recomputation."""
    length, _, rounds = scale_of(settings)
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        prompt = prompt_of(number, length)
        engine, first = _engine(executor), GREEDY.with_(max_tokens=1)
        times.setdefault("first token, computed", []).append(_finish(engine, Request("a", prompt, first)))
        times.setdefault("first token, prefix hit", []).append(_finish(engine, Request("b", prompt, first)))
        forks = Request("c", prompt, _OUTPUT, controller=Forking(), detokenize=False)
        times.setdefault(f"{_BRANCHES} forks", []).append(_finish(_engine(executor), forks))
        for number_of in (0, _BRANCHES):
            rewinds = Request("r", prompt[:_TAKEN_BACK], _OUTPUT, controller=Rewinding(number_of), detokenize=False)
            what = f"{_WRITTEN} tokens, {number_of} rewinds of {_TAKEN_BACK}"
            times.setdefault(what, []).append(_finish(_engine(executor), rewinds))
        others = [Request(f"d{i}", prompt_of(9 * i + number, length), first) for i in range(_BRANCHES)]
        times.setdefault(f"{_BRANCHES} prompts", []).append(_finish(_engine(executor), *others))
    return [{"measured": what, "milliseconds": round(1e3 * median(values), 1)} for what, values in times.items()]
