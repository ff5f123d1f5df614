"""Computes a file's tokens of texts, its logits, and its greedy continuations with llama.cpp.

    python llamacpp_peer.py REQUEST.json RESULT.npz

The script runs in a Python with llama.cpp's bindings, and imports nothing of bridle, which that Python may lack."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp
import numpy


def continued(llm: llama_cpp.Llama, prompt: list[int], count: int) -> list[int]:
    """Return the `count` most probable tokens after a prompt, chosen greedily."""
    llm.reset()
    llm.eval(prompt)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(llm.scores[llm.n_tokens - 1].argmax()))
        llm.eval(tokens[-1:])
    return tokens


def main(request_path: str, result_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    llm = llama_cpp.Llama(
        request["model"], n_ctx=512, n_batch=512, logits_all=True, n_threads=request["threads"], verbose=False
    )
    tokens = [llm.tokenize(text.encode(), add_bos=True, special=True) for text in request["texts"]]
    found = {"tokens": numpy.array(json.dumps(tokens))}
    for number, page in enumerate(request["pages"]):
        llm.reset()
        llm.eval(page)
        found[f"logits{number}"] = llm.scores[: len(page)].copy()
    found["greedy"] = numpy.array(
        json.dumps([continued(llm, each, request["num_greedy"]) for each in request["prompts"]])
    )
    numpy.savez(result_path, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
