"""Runs controllers that are WebAssembly components. The functions of components have typed arguments instead of
pointers. The rest of the runtime uses components and modules through the same interface, `Instance`.

The interface is in `wit/controller.wit`. A component always has its own process, and is forked with it. So the
weaknesses of wasmtime's Python API affect no other guest: slow conversion of long lists, and one global variable for
exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import wasmtime
from wasmtime import component as wc

from bridle.aici.replies import WriteVar
from bridle.aici.runtime.chat_prompt import render_chat
from bridle.aici.runtime.constraints import make_matcher
from bridle.aici.runtime.instance import Instance
from bridle.aici.runtime.loaded_module import LoadedModule
from bridle.aici.runtime.python_frames import whereabouts
from bridle.aici.runtime.scored_choices import add_options, advance_choice, note_choice
from bridle.aici.runtime.storage import parse_command
from bridle.aici.runtime.wasi_components import World, shadow_world
from bridle.aici.runtime.wasm import LOOK_TICKS, GuestFault, backtrace_of, running
from bridle.errors import ControllerError, ControllerTrap

HOST = "bridle:controller/host@0.1.0"
EXPORTS = ("create", "start", "next")
#: Maximum number of core instances, memories and tables of a component, which consists of several parts.
_MAX_PARTS = 64
#: The part of wasmtime's message, after its backtrace, that says why a guest trapped.
_TRAP = re.compile(r"wasm trap: (.*)")
#: Bits of a constraint's status.
_ACCEPTS, _STOPPED, _FAILED = 1, 2, 4


def make_linker(engine: wasmtime.Engine) -> wc.Linker:
    """Return a linker with everything that a controller component may import."""
    linker = wc.Linker(engine)
    linker.add_wasip2()
    shadow_world(linker, _guarded)
    with linker.root() as root, root.add_instance(HOST) as host:
        for name, function in _FUNCTIONS.items():
            host.add_func(name, _guarded(function))
    return linker


@dataclass(frozen=True, slots=True)
class LinkedComponent:
    """A component, and the linker with all functions that the component may import."""

    linker: Any
    component: Any

    def instantiate(self, store: wasmtime.Store) -> Any:
        """Create an instance of the component, as `wasmtime.InstancePre` does for core modules."""
        return self.linker.instantiate(store, self.component)


class ComponentInstance(Instance):
    """An `Instance` of a component. A component can be copied only by forking its process."""

    world: World

    def create(self, budget_ms: float) -> None:
        self._begin()
        self._call("create", [self.argument.decode(errors="replace")], budget_ms, self._check_created)

    def callback(self, name: str, argument: bytes, budget_ms: float) -> bytes:
        self._begin()
        if name == "aici_init_prompt":
            prompt = msgspec.json.encode(msgspec.json.decode(argument)["prompt"])
            return b'{"prompt":' + self._text("start", prompt, budget_ms) + b"}"
        return self._text("next", argument, budget_ms)

    def _text(self, name: str, argument: bytes, budget_ms: float) -> bytes:
        result: str = self._call(name, [argument.decode()], budget_ms)
        limit = self.surroundings.limits.max_result
        if len(result) > limit:
            raise self.broke(GuestFault(f"result of {len(result)} bytes exceeds the limit of {limit}"))
        return result.encode()

    def fork(self, variables: Any = None, spare: Instance | None = None) -> Instance:
        raise self.broke(ControllerError("a component is forked with its process"))

    def become(self, branch: int) -> None:
        super().become(branch)
        self.world.diverge(branch)

    def _check_created(self, result: Any) -> None:
        """Check a `result<_, string>` of the component. Raises `ControllerError` if the result is an error."""
        problem = getattr(result, "payload", result)
        if getattr(result, "tag", "err" if isinstance(result, str) else "ok") == "err":
            raise ControllerTrap(f"create: {problem}")

    def _open(self) -> None:
        limits = self.surroundings.limits
        program = self.program
        store = wasmtime.Store(program.engine)
        store.set_limits(limits.max_memory, 100_000, _MAX_PARTS, _MAX_PARTS, _MAX_PARTS)
        store.set_wasi(wasmtime.WasiConfig())
        program.crossing.arm(store)
        store.set_epoch_deadline(LOOK_TICKS)
        self.world = World(self.surroundings.timer_resolution_ns)
        self._start_budget(limits.max_init_time)
        before, running.guest = running.guest, self
        try:
            instance = program.pre.instantiate(store)
        except Exception as error:
            raise self._explain(error) from None
        finally:
            running.guest = before
        self._store = store
        self._exported = {name: instance.get_func(store, name) for name in EXPORTS}

    def _call(
        self, name: str, arguments: list[Any], budget_ms: float, check: Callable[[Any], None] | None = None
    ) -> Any:
        function = self._exported[name]
        if function is None:
            raise self.broke(ControllerTrap(f"the component does not export {name}"))
        self.failure = None
        self._start_budget(budget_ms)
        self._store.set_epoch_deadline(LOOK_TICKS)
        before, running.guest = running.guest, self
        try:
            result = function(self._store, *arguments)
            function.post_return(self._store)
            if check is not None:
                check(result)
        except Exception as error:
            raise self.broke(self._explain(error)) from None
        finally:
            running.guest = before
        return result

    def _explain(self, error: Exception) -> ControllerError:
        if isinstance(self.failure, ControllerError):
            return type(self.failure)(f"{self.failure}\n{_place(error)}".rstrip())
        if isinstance(error, ControllerError):
            return error
        reason = _TRAP.search(str(error))
        return ControllerTrap(f"{reason[1]}\n{_place(error)}".rstrip() if reason else str(error))


def _place(error: Exception) -> str:
    """Return the source lines at which the guest's program was running, as far as they can be found."""
    return whereabouts() or backtrace_of(str(error))


def make_instance(program: LoadedModule) -> type[Instance]:
    """Return the instance class for a module: `ComponentInstance` for components, else `Instance`."""
    return ComponentInstance if program.facts.is_component else Instance


# -- functions of the host ---------------------------------------------------------------------------------


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a host function so that its exception is stored as `guest.failure`, where the caller finds it."""

    def call(_store: Any, *arguments: Any) -> Any:
        guest = running.guest
        try:
            return function(guest, *arguments)
        except Exception as error:
            guest.failure = error
            raise

    return call


def _log(guest: ComponentInstance, text: str) -> None:
    guest.log.write(text.encode())


def _token_bytes(guest: ComponentInstance, token: int) -> bytes:
    vocabulary = guest.surroundings.vocabulary
    if token >= vocabulary.size:
        raise GuestFault(f"token {token} is outside the vocabulary of {vocabulary.size} tokens")
    return bytes(vocabulary.tokens[token])


def _tokenize(guest: ComponentInstance, data: str | bytes) -> list[int]:
    limits = guest.surroundings.limits
    guest.spent_tokenizing += len(data)
    if guest.spent_tokenizing > limits.max_tokenize_total:
        raise GuestFault(f"the callback tokenized more than {limits.max_tokenize_total} characters, the limit")
    return guest.surroundings.vocabulary.tokenize(data.encode() if isinstance(data, str) else bytes(data), 2)


def _allow(guest: ComponentInstance, tokens: list[int]) -> int:
    size = guest.surroundings.vocabulary.size
    row = bytearray(4 * ((size + 31) // 32))
    for token in tokens:
        if token >= size:
            raise GuestFault(f"token {token} is outside the vocabulary of {size} tokens")
        row[token >> 3] |= 1 << (token & 7)
    return guest.add_mask(bytes(row))


def _allow_bits(guest: ComponentInstance, bits: str) -> int:
    size = 4 * ((guest.surroundings.vocabulary.size + 31) // 32)
    try:
        row = bytes.fromhex(bits)
    except ValueError:
        raise GuestFault("allow-bits: the text is not hexadecimal") from None
    return guest.add_mask(row[:size].ljust(size, b"\0"))


def _allow_all(guest: ComponentInstance) -> int:
    return guest.add_mask(b"\xff" * (4 * ((guest.surroundings.vocabulary.size + 31) // 32)))


def _mask_bits(guest: ComponentInstance, mask: int) -> str:
    if not 0 < mask <= len(guest.masks):
        raise GuestFault(f"mask {mask} was not created in this callback, which created {len(guest.masks)} masks")
    return guest.masks[mask - 1].hex()


def _storage(guest: ComponentInstance, command: str) -> str:
    limit = guest.surroundings.limits.max_storage_commands
    guest.num_commands += 1
    if guest.num_commands > limit:
        raise GuestFault(f"the callback ran more than {limit} storage commands, the limit")
    parsed = parse_command(command.encode())
    reply = guest.variables.execute(parsed)
    if isinstance(parsed, WriteVar):
        guest.writes.append(parsed)
    return reply.decode()


def _constraint_new(guest: ComponentInstance, kind: str, spec: str) -> Any:
    limits = guest.surroundings.limits
    if len(guest.constraints) >= limits.max_constraints or len(spec) > limits.max_constraint_spec:
        raise GuestFault(
            f"a controller may have at most {limits.max_constraints} constraints, with at most "
            f"{limits.max_constraint_spec} characters each"
        )
    matcher = make_matcher(guest.surroundings.vocabulary, kind, spec)
    if matcher.is_error():
        return matcher.get_error()
    guest.next_constraint += 1
    guest.constraints[guest.next_constraint] = matcher
    note_choice(guest, guest.next_constraint, kind, spec)
    return guest.next_constraint


def _matcher(guest: ComponentInstance, handle: int) -> Any:
    if handle not in guest.constraints:
        raise GuestFault(f"unknown constraint {handle}")
    return guest.constraints[handle]


def _constraint_allow(guest: ComponentInstance, handle: int) -> int:
    size = 4 * ((guest.surroundings.vocabulary.size + 31) // 32)
    mask: bytes = _matcher(guest, handle).compute_bitmask()
    if not mask.strip(b"\0"):
        return 0
    return add_options(guest, handle, guest.add_mask(mask[:size].ljust(size, b"\0")))


def _constraint_commit(guest: ComponentInstance, handle: int, tokens: list[int]) -> int:
    accepted = int(_matcher(guest, handle).try_consume_tokens(tokens))
    advance_choice(guest, handle, tokens[:accepted])
    return accepted


def _constraint_rollback(guest: ComponentInstance, handle: int, count: int) -> bool:
    guest.choices.pop(handle, None)
    return bool(_matcher(guest, handle).rollback(count))


def _constraint_status(guest: ComponentInstance, handle: int) -> int:
    matcher = _matcher(guest, handle)
    if matcher.is_error():
        return _STOPPED | _FAILED
    return _ACCEPTS * int(matcher.is_accepting()) | _STOPPED * int(matcher.is_stopped())


def _constraint_free(guest: ComponentInstance, handle: int) -> None:
    guest.constraints.pop(handle, None)
    guest.choices.pop(handle, None)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "log": _log,
    "has-capability": lambda guest, name: name in guest.surroundings.capabilities,
    "sequence-id": lambda guest: guest.seq_id,
    "vocab-size": lambda guest: guest.surroundings.vocabulary.size,
    "eos-token": lambda guest: guest.surroundings.vocabulary.eos,
    "token-bytes": _token_bytes,
    "tokenize": _tokenize,
    "tokenize-bytes": _tokenize,
    "render-chat": lambda guest, conversation: render_chat(guest, conversation.encode()).decode(),
    "allow": _allow,
    "allow-bits": _allow_bits,
    "allow-all": _allow_all,
    "mask-bits": _mask_bits,
    "storage": _storage,
    "constraint-new": _constraint_new,
    "constraint-allow": _constraint_allow,
    "constraint-commit": _constraint_commit,
    "constraint-rollback": _constraint_rollback,
    "constraint-ff": lambda guest, handle: list(_matcher(guest, handle).compute_ff_tokens()),
    "constraint-status": _constraint_status,
    "constraint-error": lambda guest, handle: _matcher(guest, handle).get_error() or "",
    "constraint-free": _constraint_free,
}
