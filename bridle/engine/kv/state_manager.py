"""Slots for the recurrent states of sequences. Slots are shared by reference counts, copied on write, and kept under
block hashes.

A slot holds the state of all recurrent layers after some number of tokens. A state cannot be truncated, so copies of it
are made while tokens are computed. Within a prompt, a state is copied every `state_every` tokens and at the prompt's
last full block. A state is also copied at a *junction*, where the prompt leaves a chain of cached blocks. For a
decoding sequence, the state is copied each time the sequence fills a block. A copy of a state is kept (*frozen*) under
the hash of the KV block where it ends. A prefix match ends where a copy of the state is kept. A sequence that is rolled
back continues from the nearest earlier copy of its state.

These rules hold at all times: 1. A slot is written only if exactly one sequence and no hash refers to it. 2. Every slot
is either free or referenced, by sequences and at most one hash. 3. A slot with a kept copy of a state is never written.

When slots run out, kept copies of states are evicted. States that end within prompts and outputs are evicted first,
then states at junctions and at the ends of prompts and sequences. States of retained conversations are evicted last.
Within each class of states, the least recently used state is evicted first. A store may keep evicted states
(`on_evict`). States within outputs are not stored: there are many, and few are used again. This module only counts
slots; the backend has the states themselves.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from bridle.engine.scheduling.step_plan import PlanRow, StateCopy, StateSave
from bridle.engine.sequence import Sequence
from bridle.engine.sequence_state import RecurrentSlots, SavedSlot, SaveKind
from bridle.errors import InternalError

#: Number of prompt tokens between two copies of the state.
STATE_EVERY = 512
#: The classes of frozen states, in the order of their eviction.
_PASSING, _KEPT, _PINNED = range(3)


class StateManager:
    """Owns `num_slots` slots (0: the model has no recurrent layers). `is_pinned` returns whether a retained
    conversation contains a hash."""

    def __init__(
        self, num_slots: int, block_size: int, is_pinned: Callable[[bytes], bool], state_every: int = STATE_EVERY
    ) -> None:
        self.num_slots = num_slots
        self.is_used = num_slots > 0  # whether sequences have states
        self._block_size = block_size
        self._is_pinned = is_pinned
        self._every = max(state_every // block_size, 1) * block_size
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_refs = [0] * num_slots
        self._frozen: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._kinds: dict[bytes, SaveKind] = {}
        self._tenant_of: dict[bytes, str] = {}  # tenants of frozen states
        self._loading: set[int] = set()  # slots that a store is filling
        # called with slot, hash and tenant before a slot is reused
        self.on_evict: Callable[[int, bytes, str], object] | None = None
        self.num_published = 0
        self._order: tuple[OrderedDict[bytes, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._class_of: dict[bytes, int] = {}
        self._copies: list[StateCopy] = []
        self.num_rewound_tokens = 0  # computed again for lack of a state at the rewound position

    @property
    def num_free(self) -> int:
        """Return the number of slots without a state."""
        return len(self._free)

    @property
    def num_frozen(self) -> int:
        """Return the number of states that are kept under a hash."""
        return len(self._frozen)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._frozen

    # -- needed slots ------------------------------------------------------------------------------------

    def can_write(self, seq: Sequence) -> bool:
        """Return whether `seq` has a slot that nothing else refers to."""
        state = seq.kv.recurrent
        return state is not None and state.slot >= 0 and self._is_exclusive(state.slot)

    def has_room(self, seq: Sequence) -> bool:
        """Return whether `seq` has a slot that nothing else refers to, or can get one."""
        state = seq.kv.recurrent
        slot = -1 if state is None else state.slot
        if slot >= 0 and (self._is_exclusive(slot) or self._is_only_frozen_beside(slot)):
            return True
        return bool(self._free) or self._oldest() is not None

    def _is_exclusive(self, slot: int) -> bool:
        return self._num_refs[slot] == 1

    def _is_only_frozen_beside(self, slot: int) -> bool:
        """Return whether exactly one sequence and one hash refer to the slot."""
        return self._num_refs[slot] == 2 and slot in self._hash_of

    # -- allocation and release --------------------------------------------------------------------------

    def admit(self, seq: Sequence, digest: bytes | None, position: int, junction: int) -> None:
        """Let `seq` continue from the state that is kept under `digest`, which is the state after `position` tokens. If
        `digest` is None, `seq` starts without a state."""
        seq.kv.recurrent = state = RecurrentSlots(junction=junction)
        if digest is not None:
            self._share(state, self._frozen[digest], position)
            self._order[self._class_of[digest]].move_to_end(digest)

    def _share(self, state: RecurrentSlots, slot: int, position: int) -> None:
        self._num_refs[slot] += 1
        state.slot, state.position = slot, position

    def make_writable(self, seq: Sequence) -> None:
        """Give `seq` a slot that it does not share, with a copy of its state. `has_room` must be true."""
        state = _state_of(seq)
        old = state.slot
        if old >= 0 and self._is_exclusive(old):
            return
        if old >= 0 and not self._free and self._is_only_frozen_beside(old) and self._oldest((_PASSING, _KEPT)) is None:
            self._evict(self._hash_of[old])
            return
        state.slot = self._take()
        if old >= 0:
            if state.position:
                self._copies.append(StateCopy(old, state.slot))
            self._release(old)

    def take_copies(self) -> list[StateCopy]:
        """Return the copies of states that the current plan must make. Each copy is returned once."""
        copies, self._copies = self._copies, []
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Make `child` refer to the state of `parent`. The state is copied only when one of the two sequences is
        computed."""
        origin = _state_of(parent)
        child.kv.recurrent = state = RecurrentSlots(position=origin.position, tail=origin.tail)
        if origin.slot >= 0:
            self._share(state, origin.slot, origin.position)
        if origin.base is not None:
            state.base = origin.base
            self._num_refs[origin.base.slot] += 1

    def free(self, seq: Sequence, hashes: Seq[bytes]) -> None:
        """Release the state of `seq`, because `seq` ends or must wait. The copy of the state at its last full block
        stays."""
        state = seq.kv.recurrent
        if state is None:
            return
        self._harvest(seq, hashes)
        if state.tail is not None and self._kinds.get(state.tail) is SaveKind.TAIL:
            self._classify(state.tail, SaveKind.END)
        self._drop_base(state)
        if state.slot >= 0:
            self._release(state.slot)
        seq.kv.recurrent = None

    def _take(self) -> int:
        if not self._free:
            digest = self._oldest()
            if digest is None:
                raise InternalError(f"all {self.num_slots} state slots are in use")
            self._evict(digest)
        slot = self._free.pop()
        self._num_refs[slot] = 1
        return slot

    def _release(self, slot: int) -> None:
        self._num_refs[slot] -= 1
        if not self._num_refs[slot]:
            self._free.append(slot)

    def _drop_base(self, state: RecurrentSlots) -> None:
        if state.base is not None:
            self._release(state.base.slot)
            state.base = None

    # -- rewinding ---------------------------------------------------------------------------------------

    def settle(self, seq: Sequence, hashes: Seq[bytes]) -> None:
        """Set the state of `seq` to the state after its first `num_computed` tokens. If there is no state after exactly
        this number, the nearest earlier state is used, and the tokens after it count as not computed. `hashes` are the
        hashes of the computed blocks of `seq`."""
        state, kv = _state_of(seq), seq.kv
        self._harvest(seq, hashes)
        if state.position == kv.num_computed:
            self._drop_base(state)
            return
        slot, position = self._nearest(state, hashes, kv.num_computed)
        old = state.slot
        self.num_rewound_tokens += kv.num_computed - position
        kv.num_computed = state.position = position
        if slot >= 0:
            self._num_refs[slot] += 1
            state.slot = slot
        elif old >= 0 and self._is_exclusive(old):
            old = -1  # the state is computed again from the first token on
        else:
            state.slot = -1
        if old >= 0:
            self._release(old)
        self._drop_base(state)

    def _nearest(self, state: RecurrentSlots, hashes: Seq[bytes], most: int) -> tuple[int, int]:
        """Return the slot and the position of the newest state after at most `most` tokens; (-1, 0) if there is no
        state."""
        slot, position = -1, 0
        if state.base is not None and state.base.position <= most:
            slot, position = state.base.slot, state.base.position
        number = self.last_frozen(hashes[: most // self._block_size])
        if number * self._block_size > position:
            return self._frozen[hashes[number - 1]], number * self._block_size
        return slot, position

    def last_frozen(self, hashes: Seq[bytes]) -> int:
        """Return the number of the given blocks up to the last block at whose end a state is kept; 0 if there is
        none."""
        return next((number for number in range(len(hashes), 0, -1) if hashes[number - 1] in self._frozen), 0)

    # -- copies ------------------------------------------------------------------------------------------

    def plan(self, seq: Sequence, row: PlanRow, end: int) -> None:
        """Write the slot of the state, and the copies to make of it, into the planned row of `seq`. The row's tokens
        from position `end` on are draft tokens. If no slot is free, no further copy is planned."""
        state = _state_of(seq)
        row.state = state.slot
        for position, kind in self._wanted(seq, state, row, end):
            if (slot := self._spare()) is None:
                break
            state.pending.append(SavedSlot(position, slot, kind))
        if state.pending:
            state.pending.sort(key=lambda save: save.position)
            row.saves = tuple(StateSave(save.position, save.slot) for save in state.pending)
        state.position = row.start + row.num_scheduled

    def _wanted(self, seq: Sequence, state: RecurrentSlots, row: PlanRow, end: int) -> list[tuple[int, SaveKind]]:
        """Return the state copies that the row should make, the most useful ones first."""
        size, start = self._block_size, row.start
        wanted = [(end, SaveKind.BASE)] if row.start + row.num_scheduled > end else []
        if start // size == end // size:
            return wanted  # the row fills no block: true for most decode steps
        places = {num // size * size: SaveKind.PROMPT for num in (seq.num_prompt, seq.num_prompt - 1)}
        places[state.junction] = SaveKind.JUNCTION
        places.setdefault(end // size * size, SaveKind.TAIL)
        for position in range((start // self._every + 1) * self._every, min(end, seq.num_prompt) + 1, self._every):
            places.setdefault(position, SaveKind.PERIODIC)
        inside = [(position, kind) for position, kind in places.items() if start < position <= end]
        return wanted + sorted(inside, key=lambda each: -each[1])

    def _spare(self) -> int | None:
        """Return a slot for a copy of a state: a free slot, or the slot of a kept state that is evicted for the copy.
        If no slot is available, the result is None."""
        if not self._free:
            digest = self._oldest((_PASSING, _KEPT))
            if digest is None:
                return None
            self._evict(digest)
        return self._take()

    def publish(self, seq: Sequence, hashes: Seq[bytes]) -> None:
        """Keep under their hashes the state copies that were made while `seq` was computed up to `num_computed`."""
        self._harvest(seq, hashes)

    def has_news(self, seq: Sequence) -> bool:
        """Return whether `publish` or `settle` may have work to do for `seq`."""
        state = _state_of(seq)
        return bool(state.pending) or state.base is not None or state.position != seq.kv.num_computed

    def _harvest(self, seq: Sequence, hashes: Seq[bytes]) -> None:
        """Keep under their hashes the last step's state copies whose tokens are computed by now."""
        state = _state_of(seq)
        for save in state.pending:  # ordered by position
            number = save.position // self._block_size
            if save.position > seq.kv.num_computed:
                self._release(save.slot)
            elif save.kind is SaveKind.BASE:
                self._drop_base(state)
                state.base = save
            else:
                state.tail = hashes[number - 1]
                self._freeze(state.tail, save, seq.owner_of_block(number - 1))
        state.pending.clear()

    # -- frozen states -----------------------------------------------------------------------------------

    def _freeze(self, digest: bytes, save: SavedSlot, tenant: str) -> None:
        if digest not in self._frozen:
            self.num_published += 1
            self._frozen[digest], self._hash_of[save.slot], self._tenant_of[digest] = save.slot, digest, tenant
            self._classify(digest, save.kind)
            return
        self._release(save.slot)
        if save.kind > self._kinds[digest]:
            self._classify(digest, save.kind)

    def _classify(self, digest: bytes, kind: SaveKind) -> None:
        self._kinds[digest] = kind
        self._file(digest)

    def _file(self, digest: bytes) -> None:
        """Make a kept state the last one of its class to be evicted."""
        old = self._class_of.get(digest)
        if old is not None:
            del self._order[old][digest]
        passing = self._kinds[digest] <= SaveKind.TAIL
        self._class_of[digest] = new = _PINNED if self._is_pinned(digest) else _PASSING if passing else _KEPT
        self._order[new][digest] = None

    def on_pin_change(self, digest: bytes) -> None:
        """Record that a retained conversation now contains this hash, or that no retained conversation contains it any
        more."""
        if digest in self._frozen:
            self._file(digest)

    def _oldest(self, classes: Iterable[int] = (_PASSING, _KEPT, _PINNED)) -> bytes | None:
        """Return the hash of the kept state to evict first among the given classes; None if no state of these classes
        can be evicted."""
        refs, frozen = self._num_refs, self._frozen
        return next((one for number in classes for one in self._order[number] if refs[frozen[one]] == 1), None)

    def _evict(self, digest: bytes) -> None:
        if self.on_evict is not None and (slot := self.lasting(digest)) is not None:
            self.on_evict(slot, digest, self._tenant_of[digest])
        self._unfreeze(digest)

    def _unfreeze(self, digest: bytes) -> None:
        slot = self._frozen.pop(digest)
        del self._hash_of[slot], self._kinds[digest], self._order[self._class_of.pop(digest)][digest]
        del self._tenant_of[digest]
        self._release(slot)

    def forget_content(self) -> None:
        """Forget all states, because the executor was reset. May be called only while no sequence has a state."""
        for digest in list(self._frozen):
            self._unfreeze(digest)
        self._copies.clear()

    # -- states that a store reads and writes ------------------------------------------------------------

    def lasting(self, digest: bytes) -> int | None:
        """Return the slot of a kept state that should be stored. If no state is kept under the hash, or if the state
        lies within an output, the result is None."""
        return None if self._kinds.get(digest, SaveKind.TAIL) is SaveKind.TAIL else self._frozen[digest]

    def take_slot(self) -> int | None:
        """Return a slot that will be filled from a store; `end_load` must follow. If only states of retained
        conversations could be evicted for the slot, the result is None."""
        if (slot := self._spare()) is not None:
            self._loading.add(slot)
        return slot

    def end_load(self, slot: int, digest: bytes | None, tenant: str) -> None:
        """Keep the state that was loaded into a slot under its hash. The `digest` is None if loading failed."""
        self._loading.remove(slot)
        if digest is None:
            self._release(slot)
        else:
            self._freeze(digest, SavedSlot(0, slot, SaveKind.PROMPT), tenant)

    # -- checks ------------------------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise `InternalError` if a rule of this module does not hold. `sequences` must be all active sequences."""
        refs = Counter([*self._frozen.values(), *self._loading])
        for seq in sequences:
            if (state := seq.kv.recurrent) is not None:
                own = [save.slot for save in (*state.pending, state.base) if save is not None]
                refs.update(own + [state.slot] * (state.slot >= 0))
        if [refs[slot] for slot in range(self.num_slots)] != self._num_refs:
            raise InternalError(f"the reference counts of state slots are {self._num_refs}; expected {dict(refs)}")
        if sorted(self._free) != [slot for slot in range(self.num_slots) if not refs[slot]]:
            raise InternalError(
                f"the list of free state slots {sorted(self._free)} does not match the reference counts"
            )
        if self._hash_of != {slot: digest for digest, slot in self._frozen.items()}:
            raise InternalError("the maps from hash to frozen state and from frozen state to hash disagree")
        listed = {digest: number for number, order in enumerate(self._order) for digest in order}
        if listed != self._class_of or not set(listed) == set(self._frozen) == set(self._kinds) == set(self._tenant_of):
            raise InternalError("a frozen state is not in exactly one eviction class")


def _state_of(seq: Sequence) -> RecurrentSlots:
    state = seq.kv.recurrent
    if state is None:
        raise InternalError(f"sequence {seq.id} is scheduled, but has no slot for its recurrent state")
    return state
