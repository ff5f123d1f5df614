"""The controllers that come with bridle, as a runtime offers them: found by name, compiled before anybody asks.

They lie in the store under an owner of their own, who is nobody. A tag that somebody set and a reference that was
linked by hand come before them; nothing is ever downloaded for them.
"""

from __future__ import annotations

from bridle.aici.protocol import Auth
from bridle.aici.runtime.compilers import Compilers
from bridle.aici.runtime.modules import ModuleStore
from bridle.controllers import standard
from bridle.controllers.standard.names import standard_name

#: Owns what is shipped. No user can have this name: it contains a space.
OWNER = Auth("shipped with bridle", True)


class Shipped:
    """Thread-safe."""

    def __init__(self, store: ModuleStore, compilers: Compilers) -> None:
        self._store, self._compilers = store, compilers

    def resolve(self, reference: str) -> str | None:
        """The module that a reference means, stored; None if it means none of ours."""
        name = standard_name(reference)
        return None if name is None else self.install(name)

    def install(self, name: str) -> str:
        """Store a controller unless it is there; gives its module id."""
        module = standard.manifest()[name].sha256
        if not self._store.has(module):
            self._store.add(standard.load(name), OWNER)
        return module

    def prepare(self, name: str) -> None:
        """Store and compile a controller. Takes long for an interpreter; cheap if that was done before."""
        self._compilers.get(self.install(name))
