"""Tests that faults of a KV store and of its disk only cost time, and change no token."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.errors import ShardUnavailable
from bridle.kv_store.store import list_segments
from tests.engine.programs import VOCAB
from tests.engine.random_labs import SEED
from tests.engine.store_lab import LIMIT, StoreLab, flood, num_cached, prompt_of, run_failing, run_random
from tests.kv_store.kit import DAMAGES, damage
from tests.sources import ROOT


@given(seed=SEED, limit=st.sampled_from([0, 40_000, LIMIT]), waits=st.booleans())
def test_tokens_are_the_same_whatever_the_store_does(
    tmp_path_factory: pytest.TempPathFactory, seed: int, limit: int, waits: bool
) -> None:
    """The store is small, full, empty or filled, files are damaged, another engine uses the same folder, and a device
    is lost. The scripted device checks each position that it reads."""
    folder, random = tmp_path_factory.mktemp("store"), Random(seed)
    options: dict[str, Any] = {"limit": limit, "vocab_size": VOCAB, "num_blocks": random.choice([12, 24, 64])}
    options["num_states"] = random.choice([0, 1, 2, 5, 40])
    neighbour = StoreLab(folder, **options)
    for _ in range(random.randint(1, 3)):
        faults = {random.randrange(40): ShardUnavailable("the device went away")} if random.random() < 0.3 else {}
        lab = StoreLab(folder, faults=faults, **options)
        lab.waits = waits or bool(faults)
        try:
            if faults:
                run_failing(lab)
            else:
                run_random(lab, random, 5)
            run_random(neighbour, random, 2)
        finally:
            lab.engine.close()
        assert sum(size for _, size, _ in list_segments(folder)) <= limit
        for path, _, _ in list(list_segments(folder)):
            if random.random() < 0.3:
                damage(path, random.choice(DAMAGES), random.randrange(1 << 30))
    neighbour.engine.close()


def test_a_full_disk_costs_only_what_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = StoreLab(tmp_path)
    monkeypatch.setattr(os, "pwritev", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    first = lab.run_one(prompt_of(1), max_tokens=4)
    flood(lab)
    lab.settle()
    again = lab.run_one(prompt_of(1), max_tokens=4)
    assert (num_cached(again), again.first.tokens) == (0, first.first.tokens)
    statistics = lab.engine.statistics()
    assert statistics.num_store_drops > 0
    assert statistics.num_stored_blocks == 0
    lab.engine.close()


@given(seed=SEED, share=st.sampled_from([0.05, 0.3, 0.9]))
def test_tokens_are_the_same_while_a_disk_is_full_now_and_then(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float
) -> None:
    """Any call that needs disk space may fail, even within a block. The cleanup after a failed call may fail, too."""
    folder, random, faults = tmp_path_factory.mktemp("store"), Random(seed), Random(seed + 1)

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*given: Any, **further: Any) -> Any:
            if faults.random() < share:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*given, **further)

        return attempt

    def cut(file: int, parts: list[bytes], at: int) -> int:
        return os.pwrite(file, b"".join(map(bytes, parts))[: faults.randrange(1, 300)], at)

    with mock.patch.multiple(
        os,
        pwritev=failing(cut if share < 0.5 else os.pwritev),
        pwrite=failing(os.pwrite),
        ftruncate=failing(os.ftruncate),
    ):
        for _ in range(2):
            lab = StoreLab(folder, vocab_size=VOCAB, num_blocks=12, num_states=random.choice([0, 2]))
            run_random(lab, random, 5)
            lab.engine.close()
    lab = StoreLab(folder, vocab_size=VOCAB, num_blocks=12)
    run_random(lab, random, 5)
    lab.engine.close()


@pytest.mark.parametrize("rounds", [5, pytest.param(500, marks=pytest.mark.slow)])
def test_engines_that_are_killed_at_any_moment_leave_only_right_blocks(tmp_path: Path, rounds: int) -> None:
    """Two engines use one store at the same time, and one survives. `store_rounds` describes the checks."""
    command = [sys.executable, "-m", "tests.engine.store_rounds", tmp_path, str(rounds)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    restored = [int(line) for line in result.stdout.split()]
    assert len(restored) == rounds
    assert sum(restored) > 0
