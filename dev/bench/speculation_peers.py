"""Speedup by speculation in other programs, on the same weights and the same task.

The programs are transformers' prompt lookup, its assisted generation with a draft model, and the prompt lookup of
llama.cpp's Python package. Each runs greedily with one sequence, in turns with the same program without draft tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bridle.demo import demo_model_path
from dev.bench.cpu_files import has_llamacpp


def gain(plain: Callable[[], object], drafted: Callable[[], object], num_rounds: int) -> float:
    """Return the speedup of `drafted` over `plain`, measured in turns after one uncounted run of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(num_rounds + 1):
        for run, found in zip((plain, drafted), times, strict=True):
            began = time.perf_counter()
            run()
            if number:
                found.append(time.perf_counter() - began)
    return median(times[0]) / median(times[1])


def prompt_lookup(ids: list[int], num_tokens: int, num_rounds: int) -> dict[str, float]:
    """Return the speedup by prompt lookup on the demo model, by program."""
    model = _transformers_model(demo_model_path())
    found = {"transformers": _transformers_gain(model, ids, num_tokens, num_rounds, prompt_lookup_num_tokens=8)}
    if has_llamacpp():
        with TemporaryDirectory() as folder, _llamacpp(Path(folder)) as (plain, drafted):
            runs = [partial(_continue, each, ids, num_tokens) for each in (plain, drafted)]
            found["llama.cpp"] = gain(runs[0], runs[1], num_rounds)
    return found


def assisted(target: Path, draft: Path, ids: list[int], num_tokens: int, num_rounds: int) -> float:
    """Return the speedup by a draft model in transformers."""
    model, assistant = _transformers_model(target), _transformers_model(draft)
    return _transformers_gain(model, ids, num_tokens, num_rounds, assistant_model=assistant)


def _transformers_model(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def _transformers_gain(model: Any, ids: list[int], num_tokens: int, num_rounds: int, **drafts: Any) -> float:
    import torch

    prompt = torch.tensor([ids])

    def generate(**options: Any) -> None:
        with torch.inference_mode():
            model.generate(prompt, max_new_tokens=num_tokens, do_sample=False, **options)

    return gain(generate, lambda: generate(**drafts), num_rounds)


@contextmanager
def _llamacpp(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the demo model in llama.cpp twice, without and with prompt lookup."""
    import torch
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    from bridle.serving.models.export import quantize_model

    path = folder / "demo.gguf"
    quantize_model("demo", path, "F32")
    common = {"model_path": str(path), "n_ctx": 2_048, "n_threads": torch.get_num_threads(), "verbose": False}
    both = Llama(**common), Llama(**common, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=8))
    try:
        yield both
    finally:
        for each in both:
            each.close()


def _continue(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    model.reset()
    tokens = model.generate(ids, temp=0.0, reset=True)
    return [token for token, _ in zip(tokens, range(num_tokens), strict=False)]
