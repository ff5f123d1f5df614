"""Finds bridle's own controllers by name, and compiles them before a request needs them.

Bridle's controllers are in the module store with a separate owner, which is not a user. A user's tag or linked
reference of the same name takes precedence. Nothing is downloaded. For the interpreter that takes longest to compile,
the package has machine code for the most common machines. Controllers without such code are compiled in the background,
once for each machine and version of wasmtime, with separate limits and low priority. A request waits a moment for the
compilation, and is then refused with a time to retry.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from bridle.aici.protocol import Auth
from bridle.aici.runtime.compile_cache import CompiledCode, Compilers
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.modules import Compiled, ModuleStore
from bridle.controllers import standard
from bridle.controllers.standard.references import standard_name
from bridle.errors import ControllerUnavailable, Overloaded

_log = logging.getLogger(__name__)
#: The owner of the shipped controllers. No user can have this name, because it contains a space.
OWNER = Auth("shipped with bridle", True)
#: Seconds of compilation after which it is logged.
_WORTH_TELLING = 2.0
#: Name of the controller that is compiled before the others.
_FIRST = "jsctrl"
_RETRY_AFTER = 5.0


@dataclass(slots=True)
class _Preparation:
    """A compilation that is running or has ended."""

    future: Future[Compiled] = field(default_factory=Future)
    began: float = field(default_factory=time.monotonic)


class BuiltinControllers:
    """Finds and compiles the controllers that come with bridle. Thread-safe."""

    def __init__(self, store: ModuleStore, compilers: Compilers, limits: RuntimeLimits) -> None:
        self._store, self._compilers, self._limits = store, compilers, limits
        self._lock = threading.Lock()
        self._under_way: dict[str, _Preparation] = {}

    def resolve(self, reference: str) -> str | None:
        """Store the controller that a reference means, and return its module id; None if bridle has no such
        controller."""
        name = standard_name(reference)
        return None if name is None else self.install(name)

    def restore(self, module: str) -> None:
        """Store one of bridle's controllers by its module id, which may come from another machine's trace."""
        name = _name_of(module)
        if name is not None:
            self.install(name)

    def install(self, name: str) -> str:
        """Store a controller if it is not stored yet. Returns the controller's module id."""
        module = standard.manifest()[name].sha256
        if not self._store.has(module):
            self._store.add(standard.load(name), OWNER)
        return module

    def compiled(self, module: str) -> Compiled:
        """Return the code of any stored module. If a controller of bridle is not compiled yet, wait for
        `max_prepare_wait`, then raise `Overloaded`."""
        name = _name_of(module)
        if name is None:
            return self._compilers.get(module)
        known = self._compilers.cached(module)
        if known is not None and known.path.exists():
            return known
        preparation = self._prepare(name)
        done, _ = wait([preparation.future], self._limits.max_prepare_wait / 1000)
        if done:
            return preparation.future.result()
        seconds = time.monotonic() - preparation.began
        raise Overloaded(
            f"the controller {name} is being compiled for this machine, for {seconds:.0f} s so far. This happens "
            "only once. Try again in a few seconds",
            _RETRY_AFTER,
        )

    def prepare(self, names: Iterable[str]) -> None:
        """Store and compile controllers, one after the other. Compiling takes long for an interpreter, but only the
        first time. Raises the error of the first controller that fails."""
        for name in names:
            if self._compilers.cached(self.install(name)) is None:
                self._prepare(name).future.result()

    def prepare_in_background(self, names: Iterable[str]) -> None:
        """Prepare controllers in a thread. Controllers with machine code come first, then the JavaScript interpreter,
        which the README's first program needs. Errors are logged."""
        known = standard.manifest()

        def run() -> None:
            for name in sorted(names, key=lambda name: (not known[name].code, name != _FIRST)):
                try:
                    self.prepare([name])
                except Exception as error:
                    _log.error("the controller %s cannot be prepared: %s", name, error)

        threading.Thread(target=run, name="prepare", daemon=True).start()

    def _prepare(self, name: str) -> _Preparation:
        """Begin to compile a controller, or return its running compilation."""
        with self._lock:
            preparation = self._under_way.get(name)
            if preparation is None:
                preparation = self._under_way[name] = _Preparation()
                threading.Thread(target=self._compile, args=(name, preparation), name="prepare", daemon=True).start()
        return preparation

    def _compile(self, name: str, preparation: _Preparation) -> None:
        text = "compiling the controller %s for this machine, once"
        told = threading.Timer(_WORTH_TELLING, _log.info, [text, name])
        told.daemon = True
        told.start()
        try:
            module = self.install(name)
            code = self._from_package(name, module)
            if code is None:
                code = self._compilers.compile_ours(self._store.path(module).read_bytes())
            compiled = self._compilers.keep(module, code)
        except BaseException as error:
            preparation.future.set_exception(error)
        else:
            preparation.future.set_result(compiled)
            if code.milliseconds > 1000 * _WORTH_TELLING:
                _log.info("the controller %s is ready after %.1f s", name, code.milliseconds / 1000)
        finally:
            told.cancel()
            with self._lock:
                del self._under_way[name]

    def _from_package(self, name: str, module: str) -> CompiledCode | None:
        try:
            return self._compilers.shipped(module, name)
        except ControllerUnavailable as error:
            _log.warning("%s; the controller %s is compiled on this machine instead", error, name)
            return None


def _name_of(module: str) -> str | None:
    """Return the name of bridle's controller with this module id; None for any other module."""
    return next((name for name, shipped in standard.manifest().items() if shipped.sha256 == module), None)
