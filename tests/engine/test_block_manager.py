"""Property tests of KV blocks, checked on real contents: each sequence always reads back its own tokens.

The test's state machine acts as scheduler and device. The state machine makes the copies that the block manager orders,
and writes a digest of the whole prefix to each computed position. So a wrongly shared block, a missed copy or a stale
cache entry is read back as a wrong digest.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bridle.engine.kv.block_manager import BlockManager
from bridle.engine.sequence import Sequence
from bridle.testing.kv import PagedKV
from bridle.testing.logits import ScriptedModel
from tests.engine.support import make_sequence

MODEL = ScriptedModel(4)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
PICK = st.integers(0, 1 << 16)


def digests(seq: Sequence) -> list[int]:
    """Return the digests of a sequence's correct KV. The digests depend on the tenant, because tenants must not share
    blocks."""
    return MODEL.extend(MODEL.root(f"{seq.request.adapter}/{seq.request.tenant}"), seq.tokens)


class Blocks(RuleBasedStateMachine):
    """A state machine with random operations on sequences in a small block pool."""

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        max_parked=st.integers(0, 14),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, max_parked: int) -> None:
        self.blocks = BlockManager(
            num_blocks, block_size, enable_prefix_caching=caching, max_parked=max_parked, park_seconds=10.0
        )
        self.now = 0.0
        self.parked: list[str] = []  # or once were
        self.kv = PagedKV(num_blocks, block_size)
        self.live: list[Sequence] = []
        self.num_made = 0

    def pick(self, number: int) -> Sequence:
        return self.live[number % len(self.live)]

    @rule(
        tokens=TOKENS,
        adapter=st.sampled_from([None, None, "a"]),
        tenant=st.sampled_from(["", "", "t"]),
        repeat=PICK,
    )
    def new(self, tokens: list[int], adapter: str | None, tenant: str, repeat: int) -> None:
        if self.live and repeat % 2:  # the prompt of somebody else
            tokens = list(self.pick(repeat).tokens)
        self.num_made += 1
        seq = make_sequence(self.num_made, tokens, adapter=adapter, tenant=tenant)
        self.adopt(seq)
        self.live.append(seq)

    def adopt(self, seq: Sequence) -> None:
        num_cached = self.blocks.match_prefix(seq)
        assert num_cached % self.blocks.block_size == 0
        assert num_cached < len(seq.tokens)
        free, num_shared = self.blocks.num_free, num_cached // self.blocks.block_size
        num_missing = self.blocks.blocks_for(len(seq.tokens)) - num_shared
        if self.blocks.admit(seq):
            assert seq.kv.num_computed == num_cached and len(seq.kv.block_table) == num_shared
            assert free - num_shared <= self.blocks.num_free <= free and num_missing <= self.blocks.num_free
        else:
            assert not seq.kv.block_table and num_missing + num_shared > free == self.blocks.num_free

    @precondition(lambda self: self.live)
    @rule(number=PICK, num_tokens=st.integers(1, 9))
    def compute(self, number: int, num_tokens: int) -> None:
        seq = self.pick(number)
        start, end = seq.kv.num_computed, min(seq.kv.num_computed + num_tokens, len(seq.tokens))
        needed, free = self.blocks.num_needed(seq, end), self.blocks.num_free
        if needed > free or start == end:
            return
        copies = self.blocks.allocate(seq, end)
        assert self.blocks.num_free == free - needed
        assert len(seq.kv.block_table) * self.blocks.block_size >= end
        self.kv.copy(copies)
        self.check_writable(seq, start, end)
        self.kv.write(seq.kv.block_table, start, seq.tokens[start:end], digests(seq)[start:end])
        seq.kv.num_computed = end
        self.blocks.publish(seq)

    def check_writable(self, seq: Sequence, start: int, end: int) -> None:
        """Check that only blocks with a single owner are written. A wrong write would show in later digests."""
        size = self.blocks.block_size
        written = set(seq.kv.block_table[start // size : -(-end // size)])
        for other in self.live:
            assert other is seq or not written & set(other.kv.block_table)

    @precondition(lambda self: self.live)
    @rule(number=PICK, tokens=TOKENS)
    def append(self, number: int, tokens: list[int]) -> None:
        seq = self.pick(number)
        for token in tokens[: seq.max_len - len(seq.tokens)]:
            seq.tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        parent = self.pick(number)
        free, copied = self.blocks.num_free, self.blocks.num_copied
        self.num_made += 1
        child = parent.fork(self.num_made, 1, 1)
        self.blocks.fork(parent, child)
        self.live.append(child)
        assert (self.blocks.num_free, self.blocks.num_copied) == (free, copied)
        assert child.kv.block_table == parent.kv.block_table

    @precondition(lambda self: self.live)
    @rule(number=PICK, num_tokens=st.integers(0, 9))
    def rewind(self, number: int, num_tokens: int) -> None:
        seq = self.pick(number)
        seq.truncate(max(len(seq.tokens) - num_tokens, 1))
        self.blocks.truncate(seq)
        assert seq.kv.num_computed <= len(seq.tokens) - 1
        assert len(seq.kv.block_table) <= self.blocks.blocks_for(len(seq.tokens))

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def preempt_and_resume(self, number: int) -> None:
        seq = self.pick(number)
        exclusive, free = self.blocks.num_exclusive(seq), self.blocks.num_free
        self.blocks.free(seq)
        assert self.blocks.num_free == free + exclusive
        seq.kv.forget()
        self.adopt(seq)

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def finish(self, number: int) -> None:
        seq = self.pick(number)
        self.blocks.free(seq)
        self.live.remove(seq)

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def finish_and_park(self, number: int) -> None:
        seq = self.pick(number)
        exclusive, free = self.blocks.num_exclusive(seq), self.blocks.num_free
        self.blocks.park(seq, self.now)
        self.parked.append(seq.request.id)
        self.blocks.free(seq)
        self.live.remove(seq)
        assert self.blocks.num_free == free + exclusive  # what is parked is free

    @precondition(lambda self: self.parked)
    @rule(number=PICK)
    def unpark(self, number: int) -> None:
        free = self.blocks.num_free
        self.blocks.parking.release(self.parked.pop(number % len(self.parked)))
        assert self.blocks.num_free == free

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        free = self.blocks.num_free
        until = self.blocks.parking.expire(self.now)
        assert self.blocks.num_free == free
        assert (until is None) == (len(self.blocks.parking) == 0)
        assert until is None or self.now < until <= self.now + 10.0

    @rule(tokens=TOKENS)
    def renew(self, tokens: list[int]) -> None:
        self.blocks.renew(make_sequence(0, tokens), self.now)

    @rule()
    def lose_device(self) -> None:
        for seq in self.live:
            self.blocks.free(seq)
            seq.forget_mirror()
        self.blocks.forget_content()
        self.kv.clear()
        assert self.blocks.num_cached == len(self.blocks.parking) == 0
        assert self.blocks.num_free == self.blocks.num_blocks

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(self.live)
            assert self.blocks.num_cached <= self.blocks.num_free

    @invariant()
    def contents_are_right(self) -> None:
        for seq in getattr(self, "live", ()):
            held = self.kv.read(seq.kv.block_table, seq.kv.num_computed)
            assert held.tokens.tolist() == seq.tokens[: seq.kv.num_computed]
            assert held.digests.tolist() == digests(seq)[: seq.kv.num_computed]

    def teardown(self) -> None:
        for seq in getattr(self, "live", ()):
            self.blocks.free(seq)
        if hasattr(self, "blocks"):
            self.blocks.check_integrity([])
            assert self.blocks.num_free == self.blocks.num_blocks


TestBlocks = Blocks.TestCase


# -- examples that the machine reaches too rarely --------------------------------------------------------


def compute_all(blocks: BlockManager, seq: Sequence) -> int:
    """Compute every token, and return the number of copies."""
    copies = blocks.allocate(seq, len(seq.tokens))
    seq.kv.num_computed = len(seq.tokens)
    blocks.publish(seq)
    return len(copies)


def test_second_sequence_finds_all_full_blocks_but_the_last_token() -> None:
    blocks = BlockManager(8, 4)
    first = make_sequence(1, [5] * 8)
    compute_all(blocks, first)
    assert blocks.match_prefix(make_sequence(2, [5] * 8)) == 4  # the last token must go through the model
    assert blocks.match_prefix(make_sequence(3, [5] * 9)) == 8
    assert blocks.match_prefix(make_sequence(4, [5] * 9, tenant="other")) == 0
    assert blocks.match_prefix(make_sequence(5, [5] * 9, adapter="a")) == 0


def test_scored_tokens_are_not_skipped() -> None:
    blocks = BlockManager(8, 4)
    compute_all(blocks, make_sequence(1, [5] * 8))
    scored = make_sequence(2, [5] * 8, prompt_logprobs=0)
    assert blocks.match_prefix(scored) == 0


def test_last_sibling_to_write_keeps_the_shared_block() -> None:
    blocks = BlockManager(8, 4)
    parent = make_sequence(1, [1, 2, 3, 4, 5])
    compute_all(blocks, parent)
    children = [parent.fork(i, i, i) for i in (2, 3)]
    for child in children:
        blocks.fork(parent, child)
    num_copies = []
    for seq in (children[0], parent, children[1]):
        seq.tokens.append(7)
        num_copies.append(compute_all(blocks, seq))
    assert num_copies == [1, 1, 0]
    assert blocks.num_copied == 2
    blocks.check_integrity([parent, *children])


def test_rewind_into_an_own_published_block_takes_no_other() -> None:
    blocks = BlockManager(2, 4)  # no block to spare
    seq = make_sequence(1, [1, 2, 3, 4, 5, 6, 7, 8])
    compute_all(blocks, seq)
    seq.truncate(2)
    blocks.truncate(seq)
    for token in [9] * 6:
        seq.tokens.append(token)
    assert blocks.num_needed(seq, 8) == 1 == blocks.num_free
    assert compute_all(blocks, seq) == 0
    blocks.free(seq)
    assert blocks.match_prefix(make_sequence(2, [1, 2, 3, 4, 5])) == 0  # overwritten, so no longer offered
    assert blocks.match_prefix(make_sequence(3, [1, 2, 9, 9, 9])) == 4


def test_rewind_into_a_published_block_of_others_copies_it() -> None:
    blocks = BlockManager(8, 4)
    seq = make_sequence(1, [1, 2, 3, 4, 5])
    compute_all(blocks, seq)
    other = make_sequence(2, [1, 2, 3, 4, 6])
    assert blocks.admit(other) and other.kv.num_computed == 4
    seq.truncate(2)
    blocks.truncate(seq)
    seq.tokens.append(9)
    assert blocks.num_needed(seq, 3) == 1
    assert compute_all(blocks, seq) == 1
    assert blocks.match_prefix(make_sequence(3, [1, 2, 3, 4, 5])) == 4
    blocks.check_integrity([seq, other])


def test_cache_survives_while_plain_blocks_last() -> None:
    blocks = BlockManager(3, 2)
    old = make_sequence(1, [1, 1])
    compute_all(blocks, old)
    blocks.free(old)
    other = make_sequence(2, [2, 2, 2, 2])
    compute_all(blocks, other)
    assert blocks.num_evicted == 0
    assert blocks.match_prefix(make_sequence(3, [1, 1, 1])) == 2
    other.tokens.append(3)
    compute_all(blocks, other)
    assert blocks.num_evicted == 1
    assert blocks.match_prefix(make_sequence(4, [1, 1, 1])) == 0
