"""The control vectors of one loaded model, by name. The directions under a name may be replaced at any time. Requests
that have begun keep the earlier directions until they end. Each set of directions therefore has its own key in addition
to the vector's name. All methods are safe from any thread; only `add` may take long.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.errors import InternalError, InvalidRequest, UnknownControlVector
from bridle.safe_repr import short_repr

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bridle.control_vectors.files import Directions

MAX_VECTORS = 256
_MAX_MIXES = 32
_MAX_SHOWN = 20
_TINY = 1e-30
_NAME = re.compile(r"[A-Za-z0-9][\w.:+\-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ControlVectorInfo:
    """The current state of a control vector. `layers` are the layers after which the vector adds a direction.
    `num_users` is the number of requests that use the vector's directions."""

    name: str
    source: str
    layers: tuple[int, ...]
    num_users: int


@dataclass(slots=True)
class _Entry:
    name: str
    source: str
    directions: Directions
    num_users: int = 0


class ControlVectors:
    """Control vectors for a model of `num_layers` layers whose hidden states are rows of `hidden_size` values of type
    `dtype` on `device`. If `device` is None, the model is in another process, which gets the directions by key. The
    process of this object then imports torch only to read a file."""

    def __init__(
        self, num_layers: int, hidden_size: int, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> None:
        self.num_layers, self.hidden_size = num_layers, hidden_size
        self._dtype, self._device = dtype, device
        self._names: dict[str, str] = {}  # from names to keys
        self._entries: dict[str, _Entry] = {}  # by key; includes entries in use whose name was removed
        self._mixes: OrderedDict[tuple[tuple[str, float], ...], Mapping[int, Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        #: Called with the output of each layer of all steps, while vectors are made.
        self.recorder: Callable[[int, Tensor], None] | None = None

    @property
    def is_local(self) -> bool:
        """Return whether the model is in this process."""
        return self._device is not None

    # -- adding and removing -------------------------------------------------------------------------------------

    def add(self, name: str, source: str | Path) -> ControlVectorInfo:
        """Read a file and let requests use it as `name`. An earlier vector with this name is replaced. Raises
        `InvalidRequest`."""
        from bridle.control_vectors.files import read_vector

        if _NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"control vector name: got {short_repr(name)}; it may have letters, digits and . _ - : +, beginning "
                "with a letter or digit",
                "name",
            )
        return self.put(name, read_vector(Path(source).expanduser()), str(source))

    def put(self, name: str, directions: Directions, source: str = "") -> ControlVectorInfo:
        """Add directions that are already in memory; `add` reads directions from a file."""
        directions = {layer: values for layer, values in directions.items() if layer < self.num_layers}
        self._check_fits(directions, source)
        digest = hashlib.blake2b(digest_size=16)
        for layer, values in sorted(directions.items()):
            digest.update(layer.to_bytes(8, "little") + values.float().contiguous().numpy().tobytes())
        key = f"{name}#{digest.hexdigest()}"
        with self._lock:
            if name not in self._names and len(self._names) >= MAX_VECTORS:
                raise InvalidRequest(
                    f"control vectors: {MAX_VECTORS} are loaded, which is the maximum; remove one first", "name"
                )
            old = self._names.get(name)
            self._entries.setdefault(key, _Entry(name, source, directions)).source = source
            self._names[name] = key
            if old is not None:
                self._drop_unused(old)
            return self._info(name)

    def _check_fits(self, directions: Directions, source: str) -> None:
        sizes = {values.shape[0] for values in directions.values()}
        if sizes != {self.hidden_size}:
            raise InvalidRequest(
                f"control vector: {source or 'it'} has directions of {sorted(sizes)} values; this model needs "
                f"{self.hidden_size} (its hidden size), for layers 1 to {self.num_layers - 1}",
                "source",
            )

    def restore(self, other: ControlVectors) -> None:
        """Replace all vectors of this store by the vectors of another store for the same model."""
        names = {info.name: info.source for info in other.list()}
        for info in self.list():
            if info.name not in names:
                self.remove(info.name)
        for name, source in names.items():
            self.put(name, other.directions(name), source)

    def remove(self, name: str) -> None:
        """Remove a name. Requests that use the vector keep it until they end. Raises `UnknownControlVector`."""
        with self._lock:
            key = self._key_of(name)
            del self._names[name]
            self._drop_unused(key)

    def list(self) -> tuple[ControlVectorInfo, ...]:
        """Return the current state of all vectors, in the order in which they were added."""
        with self._lock:
            return tuple(map(self._info, self._names))

    def get(self, name: str) -> ControlVectorInfo:
        """Return the current state of one vector. Raises `UnknownControlVector`."""
        with self._lock:
            self._key_of(name)
            return self._info(name)

    def directions(self, name: str) -> Directions:
        """Return the current directions of a vector, which new requests get. Raises `UnknownControlVector`."""
        with self._lock:
            return self._entries[self._key_of(name)].directions

    # -- requests ------------------------------------------------------------------------------------------------

    def check(self, names: Iterable[str]) -> None:
        """Raise `UnknownControlVector` unless requests may use all named vectors."""
        with self._lock:
            for name in names:
                self._key_of(name)

    def check_probe(self, name: str, layer: int | None) -> None:
        """Raise `InvalidRequest` unless the vector has a direction for this layer (None: the last layer)."""
        known = self.directions(name)
        if (self.num_layers - 1 if layer is None else layer) not in known:
            raise InvalidRequest(
                f"probes: got {short_repr(name)} at layer {self.num_layers - 1 if layer is None else layer}; "
                f"the vector has directions for layers {', '.join(map(str, known))}. Send one of these, as NAME@LAYER.",
                "probes",
            )

    def open(self, names: Iterable[str]) -> dict[str, str]:
        """Return the keys of a new request's control vectors, by name. The store keeps the vectors of a request until
        `leave`. Raises `UnknownControlVector`, and keeps no vector, if a name is unknown."""
        with self._lock:
            keys = {name: self._key_of(name) for name in names}
            for key in keys.values():
                self._entries[key].num_users += 1
        return keys

    def leave(self, keys: Iterable[str]) -> None:
        """Release the vectors with these keys, because a request that used them has ended."""
        with self._lock:
            for key in keys:
                self._entries[key].num_users -= 1
                self._drop_unused(key)

    # -- steps ---------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        """Return whether the store has a vector with this key."""
        return key in self._entries

    def held(self, key: str) -> Directions:
        """Return the directions stored under a key. Raises `InternalError` if the store does not have the key."""
        try:
            return self._entries[key].directions
        except KeyError:
            raise InternalError(f"control vector {key!r} is not loaded") from None

    def hold(self, key: str, directions: Directions) -> None:
        """Store directions under a key that another process chose, until `drop` or `clear`."""
        with self._lock:
            self._entries[key] = _Entry("", "", directions)

    def drop(self, key: str) -> None:
        """Remove the directions stored under a key; unknown keys are ignored."""
        with self._lock:
            self._entries.pop(key, None)
            self._mixes.clear()

    def clear(self) -> None:
        """Remove all vectors."""
        with self._lock:
            for known in (self._entries, self._names, self._mixes):
                known.clear()

    def mixed(self, mix: tuple[tuple[str, float], ...]) -> Mapping[int, Tensor]:
        """Return the sum of scaled directions [hidden] for each layer, which is added to the layer's output. `mix`
        holds pairs of a vector's key and its scale."""
        with self._lock:
            found = self._mixes.get(mix)
            if found is None:
                found = self._mixes[mix] = self._mix(mix)
                if len(self._mixes) > _MAX_MIXES:
                    self._mixes.popitem(last=False)
            else:
                self._mixes.move_to_end(mix)
            return found

    def unit(self, key: str, layer: int | None) -> tuple[int, Tensor]:
        """Return a layer's number and the vector's direction for this layer, float32 [hidden], scaled to length 1.
        `layer` None means the last layer."""
        at = self.num_layers - 1 if layer is None else layer
        values = self._entries[key].directions[at]
        return at, (values / values.norm().clamp_min(_TINY)).to(device=self._device)

    def _mix(self, mix: tuple[tuple[str, float], ...]) -> Mapping[int, Tensor]:
        total: dict[int, Tensor] = {}
        for key, scale in mix:
            for layer, values in self._entries[key].directions.items():
                scaled = values * scale
                total[layer] = total[layer] + scaled if layer in total else scaled
        return {layer: values.to(device=self._device, dtype=self._dtype) for layer, values in total.items()}

    # -- helpers, with the lock held -----------------------------------------------------------------------------

    def _info(self, name: str) -> ControlVectorInfo:
        entry = self._entries[self._names[name]]
        return ControlVectorInfo(name, entry.source, tuple(entry.directions), entry.num_users)

    def _drop_unused(self, key: str) -> None:
        entry = self._entries[key]
        if not entry.num_users and self._names.get(entry.name) != key:
            del self._entries[key]
            self._mixes.clear()

    def _key_of(self, name: str) -> str:
        try:
            return self._names[name]
        except KeyError:
            names = list(self._names)
            known = ", ".join(map(repr, names[:_MAX_SHOWN])) or "none"
            more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
            raise UnknownControlVector(
                f"control_vectors: got {short_repr(name)}; known are {known}{more}. Load it first, or choose another.",
                "control_vectors",
            ) from None
