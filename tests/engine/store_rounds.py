"""Rounds with two engines on one store. Each engine runs in its own process, and SIGKILL ends it at a random moment.

After one engine was killed, a third engine runs in parallel to the surviving one. Each engine checks all tokens that it
computes, and that all blocks that it reads belong to the right user. Files are damaged between rounds. Each round
prints the number of tokens whose KV the third engine has read from the store.

    python -m tests.engine.store_rounds FOLDER ROUNDS
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

from bridle.distributed.child_process import die_with_parent
from bridle.kv_store.store import list_segments
from tests.engine.programs import VOCAB
from tests.engine.store_lab import StoreLab, run_random
from tests.kv_store.kit import DAMAGES, damage

LIMIT = 60_000


def start(folder: Path, seed: int, work: Callable[[StoreLab, Random], None]) -> int:
    """Start an engine in its own process. Returns its id. The process ends with 1 if a check fails."""
    parent = os.getpid()
    if process := os.fork():
        return process
    die_with_parent(parent)
    code, random = 1, Random(seed)
    try:
        options = {"num_blocks": random.choice([12, 24]), "num_states": random.choice([0, 0, 3, 40])}
        work(StoreLab(folder, limit=LIMIT, vocab_size=VOCAB, **options), random)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def work_on(lab: StoreLab, random: Random) -> None:
    """Compute requests until the process is killed."""
    while True:
        run_random(lab, random, 3)


def check(lab: StoreLab, random: Random) -> None:
    """Compute some requests, and print the number of tokens that were read from the store."""
    run_random(lab, random, 4)
    print(lab.engine.statistics().num_restored_tokens, flush=True)
    lab.engine.close()


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL, "a check has failed"


def main(folder: Path, rounds: int) -> None:
    die_with_parent(os.getppid())
    random = Random(7)
    for _ in range(rounds):
        one, other = (start(folder, random.randrange(1 << 30), work_on) for _ in range(2))
        time.sleep(random.uniform(0, 0.4))
        kill(one)
        third = start(folder, random.randrange(1 << 30), check)
        assert os.waitstatus_to_exitcode(os.waitpid(third, 0)[1]) == 0, "a check has failed"
        kill(other)
        assert sum(size for _, size, _ in list_segments(folder)) <= LIMIT
        for path, _, _ in list(list_segments(folder)):
            if random.random() < 0.1:
                damage(path, random.choice(DAMAGES), random.randrange(1 << 30))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
