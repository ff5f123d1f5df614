"""Compiles constraints to matchers, outside of the engine's thread. A child process tests a grammar first; then this
process compiles the grammar and keeps it in a cache.

Compiling in this process succeeds if it succeeded in the child process, because llguidance keeps no state between
grammars. The compiled matcher stays in its initial state; each request uses a copy, which takes microseconds to make.
Unusable grammars are cached too, so that repeated requests for them cost nothing. The cache of matchers is limited by
the bytes that they really use. Memory that compiling and dropping grammars leaves free is returned to the system.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from bridle.errors import InvalidRequest, Overloaded
from bridle.malloc import return_free_memory
from bridle.structured_output.compile_sandbox import CompileSandbox
from bridle.structured_output.limits import ConstraintLimits
from bridle.structured_output.matcher import Matcher
from bridle.structured_output.spec import Constraint
from bridle.structured_output.validation import usable
from bridle.structured_output.vocabulary import GrammarVocabulary, load_llguidance

#: Minimum number of bytes for which a kept grammar counts, and number of bytes for a refusal.
_MIN_WEIGHT = 160 * 1024
_REFUSAL_WEIGHT = 1024
#: A grammar that needs more than this fraction of the room is not kept, because it would evict all others. The number
#: is the denominator.
_MAX_PART = 4
#: Number of bytes of built and dropped grammars after which free memory is returned to the system.
_LOOSE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """A compiled grammar; for a refused grammar, the type, message and field of its error. The error object itself is
    not kept, because each raise would attach more data to it."""

    result: Matcher | tuple[type[InvalidRequest], str, str | None]
    weight: int

    def future(self) -> Future[Matcher]:
        """Return a future with this result, for one caller."""
        if isinstance(self.result, Matcher):
            return _done(self.result)
        kind, message, param = self.result
        return _done(kind(message, param))


class Compiler:
    """Compiles constraints to matchers for one vocabulary, which is built at first use. Safe from any thread."""

    def __init__(
        self, make_vocabulary: Callable[[], GrammarVocabulary], limits: ConstraintLimits | None = None
    ) -> None:
        self._limits = limits or ConstraintLimits()
        self._make_vocabulary = make_vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._weight = 0
        self._loose = 0
        self._pending: dict[str, Future[Matcher]] = {}
        self._trials = CompileSandbox(self._limits)
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def vocabulary(self) -> GrammarVocabulary:
        """Return the tokenizer's vocabulary in the form that grammars need; it is built on first use."""
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    @property
    def num_cached(self) -> int:
        """Return the number of cached grammars, including refused grammars."""
        return len(self._entries)

    @property
    def cached_bytes(self) -> int:
        """Return the approximate number of bytes of the cached grammars."""
        return self._weight

    def compile(self, constraint: Constraint) -> Future[Matcher]:
        """Return a future with the compiled grammar. Callers must copy the future's matcher, and must never advance the
        matcher itself. The future raises `InvalidRequest` for a grammar that cannot be used, and `Overloaded` if the
        compiler is shut down. Callers must not cancel the future, because other callers may share it."""
        key = constraint.key
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry.future()
            pending = self._pending.get(key)
            if pending is not None:
                return pending
            if self._closed:
                return _done(Overloaded("the compiler of constraints was shut down"))
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._limits.num_compilers, thread_name_prefix="bridle-grammar")
            future = self._pending[key] = self._threads.submit(self._compile, key, constraint)
            return future

    def _compile(self, key: str, constraint: Constraint) -> Matcher:
        try:
            load_llguidance()
            grammar, size = usable(constraint, self._trials)
            weight = max(size, _MIN_WEIGHT) + sys.getsizeof(grammar)
            matcher = Matcher(self.vocabulary, grammar)
            matcher.copy().mask()
        except InvalidRequest as error:
            self._keep(key, _Entry((type(error), str(error), error.param), _REFUSAL_WEIGHT))
            raise
        else:
            self._keep(key, _Entry(matcher, weight))
            return matcher
        finally:
            with self._lock:
                self._pending.pop(key, None)

    def _keep(self, key: str, entry: _Entry) -> None:
        """Cache an entry, and drop the least recently used entries."""
        limits = self._limits
        with self._lock:
            self._loose += entry.weight  # building takes about as much memory again
            if entry.weight <= limits.cache_bytes // _MAX_PART:
                self._entries[key] = entry
                self._weight += entry.weight
            while len(self._entries) > limits.cache_entries or self._weight > limits.cache_bytes:
                _, old = self._entries.popitem(last=False)
                self._weight -= old.weight
                self._loose += old.weight
                del old
            is_much, self._loose = self._loose >= _LOOSE_BYTES, self._loose % _LOOSE_BYTES
        if is_much:
            return_free_memory()

    def close(self) -> None:
        """End the child processes, and drop all cached grammars. Idempotent."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, None
        self._trials.close()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._entries.clear()
            self._weight = 0
        return_free_memory()


def _done(result: Matcher | Exception) -> Future[Matcher]:
    future: Future[Matcher] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future
