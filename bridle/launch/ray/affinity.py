"""Chooses an engine of a Ray cluster for a request. An engine that has computed the prefix comes first, then an engine
with the adapter, then the engine with the lowest load. An engine with a much higher load than others is skipped. The
module uses neither a clock nor Ray.

An engine reports its load once per second. To the reported load, this module adds the tokens that were sent to the
engine since the report.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bridle.distributed.prefix_router import AWAY, RUNNING_TOKENS, PrefixRouter

Engine = TypeVar("Engine", bound=Hashable)

#: The maximum number of adapters whose engines are remembered.
_MAX_ADAPTERS = 4096
_SLACK_TOKENS, _SLACK_FACTOR = 1024, 1.5


@dataclass(slots=True)
class _Place:
    """The state of an engine. `number` is the number of the engine's last report, and `load` is the reported load in
    tokens. `since` is the number of tokens that were sent to the engine after the report."""

    slot: int
    number: int = -1
    load: float = 0.0
    since: float = 0.0
    is_ready: bool = True


class Places(Generic[Engine]):
    """Chooses among engines that start and stop, at most `max_engines` at a time."""

    def __init__(self, block_size: int, max_engines: int) -> None:
        self._router = PrefixRouter(max_engines, block_size)
        self._places: dict[Engine, _Place] = {}
        self._free = list(range(max_engines - 1, -1, -1))
        self._num_slots = max_engines
        self._homes: OrderedDict[str, set[int]] = OrderedDict()  # adapter: slots of engines that got requests for it

    def keep(self, engines: Collection[Engine]) -> None:
        """Set the engines that exist now. Engines that no longer exist are forgotten, with their prefixes."""
        for gone in self._places.keys() - set(engines):
            slot = self._places.pop(gone).slot
            self._router.forget(slot)
            self._free.append(slot)
            for slots in self._homes.values():
                slots.discard(slot)
        for engine in engines:
            if engine not in self._places and self._free:
                self._places[engine] = _Place(self._free.pop())

    def note_report(self, engine: Engine, report: Mapping[str, Any]) -> None:
        """Record an engine's report: its `number`, its `load` in tokens, and `is_ready`. A repeated report is
        ignored."""
        place = self._places.get(engine)
        if place is None or report.get("number", -1) == place.number:
            return
        place.number, place.load, place.since = report["number"], report["load"], 0.0
        place.is_ready = bool(report["is_ready"])

    def rank(
        self, prompt: Sequence[int], salt: object, adapter: str | None, candidates: Collection[Engine]
    ) -> list[Engine]:
        """Return the candidates, best first. The tokens of the request are added to the load of the best candidate."""
        by_slot = {self._places[engine].slot: engine for engine in candidates if engine in self._places}
        loads = self._loads(by_slot)
        if adapter is not None:
            loads = self._prefer(self._homes.get(adapter, set()), loads)
        choice = self._router.choose(prompt, (salt, adapter), loads)
        if choice is None:
            return list(candidates)
        chosen = by_slot.pop(choice.replica)
        self._places[chosen].since += len(prompt) - choice.num_cached + RUNNING_TOKENS
        if adapter is not None:
            self._note_home(adapter, choice.replica)
        others = sorted(by_slot.values(), key=self._load)
        return [chosen, *others]

    def _load(self, engine: Engine) -> float:
        place = self._places[engine]
        return place.load + place.since

    def _loads(self, by_slot: Mapping[int, Engine]) -> list[float]:
        """Return the load of the engine in each slot. Engines that are not ready get the load `AWAY`, unless no engine
        is ready."""
        loads = [AWAY] * self._num_slots
        ready = {slot: engine for slot, engine in by_slot.items() if self._places[engine].is_ready}
        for slot, engine in (ready or by_slot).items():
            loads[slot] = self._load(engine)
        return loads

    def _prefer(self, slots: set[int], loads: list[float]) -> list[float]:
        """Return the loads with `AWAY` for all slots that are not in `slots`. If the engines in `slots` have much
        higher loads than others, return the loads unchanged."""
        theirs = min((loads[slot] for slot in slots), default=AWAY)
        least = min(loads)
        if theirs == AWAY or theirs > max(_SLACK_FACTOR * least, least + _SLACK_TOKENS):
            return loads
        return [load if slot in slots else AWAY for slot, load in enumerate(loads)]

    def _note_home(self, adapter: str, slot: int) -> None:
        self._homes.setdefault(adapter, set()).add(slot)
        self._homes.move_to_end(adapter)
        while len(self._homes) > _MAX_ADAPTERS:
            self._homes.popitem(last=False)
