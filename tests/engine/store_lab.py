"""Engines with a store of KV blocks: one continues after a restart, and one gets random requests."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from random import Random
from typing import Any

from bridle.config import EngineConfig
from bridle.engine.engine import Engine
from bridle.engine.kv.block_manager import block_hash, root_hash
from bridle.engine.kv.stored_blocks import StoredBlocks
from bridle.engine.request import Request
from bridle.kv_store import BlockStore, SegmentStore
from bridle.kv_store.records import ERASED, HEADER_BYTES, read_header, tenant_tag
from bridle.outputs import Event
from tests.engine.programs import VOCAB
from tests.engine.random_labs import random_request
from tests.engine.support import Lab, Replay, check_against_reference, make_request
from tests.waiting import PATIENCE, until

BLOCK = 4
LIMIT = 1 << 20


class StoreLab(Lab):
    """A lab with a store. A step waits for the blocks that are being read, so that few steps have nothing to do."""

    def __init__(self, folder: Path, *, limit: int = LIMIT, waits: bool = True, **options: Any) -> None:
        self.folder, self.limit, self.waits = folder, limit, waits
        super().__init__(block_size=BLOCK, **{"num_blocks": 24, "vocab_size": 50, **options})

    def make_one(self, config: EngineConfig) -> Engine:
        executor = self.connect(self.executor)
        blocks = self.executor.kv_blocks
        self.store = BlockStore(SegmentStore(self.folder, blocks.identity(), self.limit))
        pools = self.pools
        return Engine(executor, config, pools=pools, decoder=self.decoder, clock=self.clock, store=self.store)

    def step(self) -> list[Event]:
        events = super().step()
        stored = self.engine.stored
        assert stored is not None
        self.check_tenants(stored)
        if self.waits:
            until(lambda: all(each.load.is_done for each in stored.loads), "what is being read")
        elif stored.is_loading:
            time.sleep(0.0005)  # a bounded number of steps waits for it
        return events

    def check_tenants(self, stored: StoredBlocks) -> None:
        """Check that each block that was read had been written for the same user."""
        loading = [pair for each in stored.loads for pair in zip(each.missing.keys, each.owners, strict=True)]
        for key, owner in loading:
            segment, position = self.store.store.index.get(key, (None, 0))
            if segment is not None:
                with contextlib.suppress(FileNotFoundError):
                    header = read_header(segment.path.read_bytes()[position : position + HEADER_BYTES])
                    assert header is None or header.tenant in (tenant_tag(owner), ERASED)  # None: damaged

    def hashes(self, tokens: list[int]) -> list[bytes]:
        """Return the hashes of full blocks of tokens, without an adapter and a tenant."""
        found = [root_hash(self.store.store.root, "", "")]
        for start in range(0, len(tokens), BLOCK):
            found.append(block_hash(found[-1], tokens[start : start + BLOCK]))
        return found[1:]

    def settle(self) -> None:
        assert self.store.flush(time.monotonic() + PATIENCE)

    def restart(self) -> StoreLab:
        """Close the engine, and start another engine with the same store."""
        self.engine.close()
        return StoreLab(self.folder, limit=self.limit, num_states=self.executor.info.num_states)


def prompt_of(number: int, length: int = 30) -> list[int]:
    return [(number * 31 + i * i) % 50 for i in range(length)]


def flood(lab: Lab, tenant: str = "others") -> None:
    """Fill the KV cache with prompts of another user."""
    for i in range(4):
        lab.run(make_request([i, *prompt_of(1000 + i, 60)], tenant=tenant, max_tokens=1))


def num_cached(replay: Replay) -> int:
    return replay.first.usage.cached_tokens


def run_random(lab: StoreLab, random: Random, num_requests: int) -> None:
    """Run random requests, each of which must return the output of the reference."""
    requests: list[Request] = []
    for _ in range(num_requests):
        requests.append(random_request(random, max_tokens=random.choice([1, 4, 9])))
        lab.engine.add(requests[-1])
        for _ in range(random.choice([0, 1, 5])):
            lab.step()
    replays = lab.drain()
    for request in requests:
        check_against_reference(lab, request, replays[request.id])


def run_failing(lab: StoreLab) -> None:
    """Run prompts, during which all KV is lost once."""
    prompts = [[i % 3, *(token % VOCAB for token in prompt_of(i % 2, 20))] for i in range(5)]
    requests = [make_request(prompt, max_tokens=6) for prompt in prompts]
    for request, replay in zip(requests, lab.run(*requests), strict=True):
        check_against_reference(lab, request, replay)
