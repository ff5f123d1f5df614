"""The agents of `bridle bench agents` over llama.cpp, with the same weights, and with the prompt cache of llama.cpp's
Python server.

That server handles one request at a time, continues from its current context, and keeps the states of earlier prompts
in memory. The server's HTTP package is not needed: this module calls the same llama.cpp objects as the server.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.control_guests import write_tokenizer
from dev.bench.agents_work import AgentWork, tokens_of
from dev.bench.cpu_files import has_llamacpp, write_file

NAME = "client, llama.cpp's server"
#: Positions of one pass. Each stored state has scores for this number of positions, so a larger number would take
#: gigabytes.
_BATCH = 64


def is_there() -> bool:
    """Return whether llama.cpp is installed, so that it can be measured."""
    return has_llamacpp()


class _Server:
    """One llama.cpp context, with stored states of earlier prompts of up to `capacity` bytes in total."""

    def __init__(self, path: Path, num_ctx: int, threads: int, capacity: int) -> None:
        from llama_cpp import Llama, LlamaRAMCache

        options = {"n_ctx": num_ctx, "n_threads": threads, "n_threads_batch": threads, "n_batch": _BATCH}
        self._model = Llama(str(path), **options, verbose=False)
        self._cache = LlamaRAMCache(capacity)
        self.num_computed = 0

    def complete(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """Return `count` tokens after a prompt, and the seconds until the first of them."""
        model, began, first = self._model, time.perf_counter(), 0.0
        with_state = self._cache._find_longest_prefix_key(tuple(prompt))
        if with_state is not None:
            held = model.longest_token_prefix(model._input_ids.tolist(), prompt)
            if model.longest_token_prefix(with_state, prompt) > held:
                model.load_state(self._cache[prompt])
        reused = model.longest_token_prefix(model._input_ids.tolist(), prompt[:-1])
        said: list[int] = []
        for token in model.generate(prompt, temp=0.0, reset=True):
            first = first or time.perf_counter() - began
            said.append(token)
            if len(said) == count:
                break
        self.num_computed += len(prompt) - reused + count - 1
        self._cache[(*prompt, *said[:-1])] = model.save_state()
        return said, first

    def close(self) -> None:
        self._model.close()


def run(checkpoint: BenchCheckpoint, folder: Path, work: AgentWork, is_scarce: bool, threads: int) -> dict[str, Any]:
    """Run the agents in turns, because the server handles one request at a time. The prompt cache has the same capacity
    as bridle's KV cache."""
    write_tokenizer(checkpoint.path, checkpoint.vocab_size)
    path = write_file(checkpoint, folder, "F16")
    room = work.agents * (work.total + work.other) * (1 if is_scarce else work.calls + 1)
    capacity = room * checkpoint.token_bytes // 2  # numbers of 16 bits
    server = _Server(path, max(work.total, work.other) + 64, threads, capacity)
    firsts: list[float] = []
    paid = others = 0
    said = [list(tokens_of(number, work.context)) for number in range(work.agents)]
    try:
        for call in range(work.calls + 1):
            for number in range(work.agents):
                answer, first = server.complete(said[number], work.answer)
                said[number] += answer
                paid += len(said[number])
                if call:
                    firsts.append(first)
                if call == work.calls:
                    continue
                if is_scarce:
                    before = server.num_computed
                    server.complete(list(tokens_of(1_000_000 + number * 1_000 + call, work.other)), 1)
                    others += server.num_computed - before
                said[number] += tokens_of(500_000 + number * 1_000 + call, work.result)
    finally:
        server.close()
    computed = server.num_computed - others
    twice = computed - work.agents * (work.total - 1)
    return {
        "first_token_seconds": median(firsts),
        "first_token_steps": None,
        "computed_tokens": computed,
        "computed_twice": twice,
        "paid_tokens": paid,
        "park_hits": 0,
        "preemptions": 0,
    }
