"""Tests of the whole runtime with thousands of random modules. Every upload, start and step gets an answer. Only the
processes that should end do so, and the next controller works normally. `BRIDLE_FUZZ_MODULES` is the number of modules.
"""

from __future__ import annotations

import base64
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import wasmtime

from tests.aici.conftest import VOCAB_SIZE, Start
from tests.aici.guests import END, guest2, sample
from tests.aici.llm_side import Llm
from tests.aici.module_generator import make_module

LIMITS = ("--wasm-max-step-time", "40", "--wasm-max-timeout-steps", "2", "--wasm-max-init-time", "40")
GOOD = guest2([sample([65], VOCAB_SIZE), END])
MANY = int(os.environ.get("BRIDLE_FUZZ_MODULES", "2000"))
_STEPS = 4


@pytest.mark.parametrize("count", [40, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(7_200)])])
def test_generated_modules_harm_nobody_else(start: Start, tmp_path: Path, count: int) -> None:
    llm = start("--cap-fork", "--cap-backtrack", "--cap-ff-tokens", *LIMITS, store=tmp_path)
    pid = llm.process.pid
    llm.main(op="ping")
    nursery = sorted(llm.descendants())[:2]
    seen: Counter[str] = Counter()
    for seed in range(count):
        seen[try_module(llm, seed)] += 1
        if seed % 50 == 49:
            check_health(llm, 10 * count + seed)
    check_health(llm, 20 * count)
    assert llm.process.pid == pid and sorted(llm.descendants())[:2] == nursery
    assert min(seen["refused"], seen["failed at start"], seen["ran"], seen["failed"]) > count // 60, seen


def try_module(llm: Llm, seed: int) -> str:
    """Upload and start a module, run a few steps, and return the outcome."""
    reply = llm.side(op="mk_module", binary=base64.b64encode(make_module(seed)).decode())
    if reply["type"] != "ok":
        return check_error(seed, reply["error"], "refused")
    req_id, reply = llm.instantiate(reply["data"]["module_id"])
    if reply["type"] != "ok" or reply["data"]["error"]:
        return check_error(seed, reply.get("error") or reply["data"]["error"], "failed at start")
    op: dict[str, Any] = {"id": seed, "req_id": req_id}
    outcome = "ran"
    for _ in range(_STEPS):
        answer = llm.settle(llm.mid(op), seed, limit=20)
        if answer["error"]:
            outcome = check_error(seed, answer["error"], "failed")
            break
        branches = answer["result"]["branches"]
        if len(branches) != 1:
            break
        tokens = [65] if branches[0]["sample_mask"] is not None else branches[0]["splices"][0]["ff_tokens"]
        op = {"id": seed, "tokens": tokens[:8], "sampled": tokens[0] if len(tokens) == 1 else None}
    llm.mid(freed=(seed,))
    return outcome


def check_error(seed: int, error: str, outcome: str) -> str:
    """Check that an error has a text, and is not an internal error of bridle."""
    assert error.strip(), seed
    assert "internal error" not in error and "Worker: the process died" not in error, (seed, error)
    return outcome


def check_health(llm: Llm, seq: int) -> None:
    """Check that a valid controller still works."""
    answer = llm.start(llm.upload(GOOD), seq)
    assert answer["error"] == "" and answer["result"]["branches"][0]["sample_mask"] == 0
    llm.mid(freed=(seq,))


def test_the_generator_is_worth_it() -> None:
    """The generator gives the same modules for a seed, and many of them are valid."""
    modules = [make_module(seed) for seed in range(200)]
    assert modules == [make_module(seed) for seed in range(200)]
    engine = wasmtime.Engine()
    valid = 0
    for module in modules:
        try:
            wasmtime.Module.validate(engine, module)
            valid += 1
        except wasmtime.WasmtimeError:
            pass
    assert 80 < valid < 190
