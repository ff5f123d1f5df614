"""Handles requests of the side channel: uploads, tags, instantiation. Concurrent requests are answered in any order."""

from __future__ import annotations

import base64
import binascii
import itertools
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from bridle.aici.protocol import Auth, Discard, GetModule, GetTags, Instantiate, MkModule, SetTags, auth_of, trace_of
from bridle.aici.replies import ModuleData, PreResult, PromptResult, SeqResult, StorageCommand, TagsData
from bridle.aici.runtime import messages as m
from bridle.aici.runtime.builtin_controllers import BuiltinControllers
from bridle.aici.runtime.compile_cache import Compilers
from bridle.aici.runtime.github import Downloads
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.aici.runtime.modules import ModuleStore
from bridle.aici.runtime.pool import WorkerPool
from bridle.aici.runtime.registry import Registry
from bridle.aici.runtime.storage import RequestState, SharedVariables
from bridle.aici.runtime.tags import is_module_id
from bridle.aici.runtime.vocabulary import RuntimeVocabulary
from bridle.aici.runtime.worker_handle import WorkerHandle
from bridle.errors import ControllerTimeout, InvalidRequest

#: Time limit of an instantiation, as a multiple of its CPU limit. The limit is extended if the worker got less
#: processor time.
_PATIENCE = 20.0


@dataclass(frozen=True, slots=True)
class SideOptions:
    """Options of the side channel. If `isolation` is `tenant`, all requests of a tenant share workers; if it is
    `request`, each request has its own processes. `fork` is `copy` or `process`."""

    isolation: str = "tenant"
    fork: str = "copy"
    is_restricted: bool = False


class SideOps:
    """Thread-safe handlers of requests. The handlers raise `BridleError`; the caller turns the error into a reply."""

    def __init__(
        self,
        store: ModuleStore,
        compilers: Compilers,
        shipped: BuiltinControllers,
        downloads: Downloads,
        pool: WorkerPool,
        registry: Registry,
        vocabulary: RuntimeVocabulary,
        limits: RuntimeLimits,
        options: SideOptions,
    ) -> None:
        self._store, self._compilers, self._shipped, self._downloads = store, compilers, shipped, downloads
        self._pool, self._registry, self._vocabulary = pool, registry, vocabulary
        self._limits, self._options = limits, options
        self._requests = itertools.count(1)

    # -- modules -------------------------------------------------------------------------------------------

    def mk_module(self, request: MkModule) -> ModuleData:
        """Compile a module, then store it. A module that does not compile is not stored."""
        self._check_unrestricted("uploading")
        limit = self._limits.max_module_bytes
        if len(request.binary) > (limit + 2) // 3 * 4 + 4:
            raise InvalidRequest(f"the module has more than {limit} bytes, the limit", "binary")
        try:
            wasm = base64.b64decode(request.binary, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"the field binary is not base64: {error}", "binary") from None
        return self.install(wasm, auth_of(request))

    def install(self, wasm: bytes, auth: Auth) -> ModuleData:
        """Store and compile a module. A repeated call for the same module is cheap."""
        module = self._store.identify(wasm)
        compiled = self._compilers.cached(module) if self._store.has(module) else None
        if compiled is not None:
            self._store.add(wasm, auth)
            return ModuleData(module, len(wasm), compiled.size, 0)
        code = self._compilers.compile(wasm)
        self._store.add(wasm, auth)
        compiled = self._compilers.keep(module, code)
        return ModuleData(module, len(wasm), compiled.size, code.milliseconds)

    def set_tags(self, request: SetTags) -> TagsData:
        self._check_unrestricted("tagging")
        return TagsData(self._store.set_tags(request.module_id, request.tags, auth_of(request)))

    def get_tags(self, request: GetTags) -> TagsData:
        return TagsData(self._store.tags())

    def get_module(self, request: GetModule) -> ModuleData:
        module = self._resolve(request.module_id, may_download=False)
        compiled = self._compilers.cached(module)
        return ModuleData(module, self._store.size(module), 0 if compiled is None else compiled.size, 0)

    def _check_unrestricted(self, what: str) -> None:
        if self._options.is_restricted:
            raise InvalidRequest(f"{what} is not allowed: the runtime was started with --restricted")

    # -- instances -----------------------------------------------------------------------------------------

    def instantiate(self, request: Instantiate, dialect: str) -> Any:
        """Create an instance. The data of the reply depends on the engine's dialect: 1, 1b or 2."""
        auth = auth_of(request)
        argument = request.argument
        if len(argument) > self._limits.max_argument:
            raise InvalidRequest(f"module_arg has {len(argument)} characters; at most {self._limits.max_argument}")
        prompt = self._prompt(request.prompt)
        module = self._resolve(request.module_id)
        variables = SharedVariables(self._limits)
        state = RequestState(next(self._requests), request.req_id, auth.user, module, variables, trace_of(request))
        created = self._create(state, argument, prompt, dialect=dialect)
        return self._reply(created, dialect, module)

    def discard(self, request: Discard) -> dict[str, Any]:
        """Drop an instance that will never be used."""
        self._registry.discard(request.req_id)
        return {}

    def _resolve(self, name: str, *, may_download: bool = True) -> str:
        if is_module_id(name):
            self._shipped.restore(name)
            return self._store.resolve(name)
        if not self._store.is_named(name) and (module := self._shipped.resolve(name)) is not None:
            return module
        if name.startswith("gh:") and may_download:
            return self._downloads.resolve(name, self.install)
        return self._store.resolve(name)

    def _prompt(self, prompt: list[int] | str) -> list[int]:
        if isinstance(prompt, str):
            prompt = list(self._vocabulary.encode("<s> " + prompt if prompt else "<s>"))
        if len(prompt) > self._limits.max_prompt:
            raise InvalidRequest(f"the prompt has {len(prompt)} tokens; at most {self._limits.max_prompt}")
        size = self._vocabulary.size
        if prompt and max(prompt) >= size:
            raise InvalidRequest(f"prompt token {max(prompt)} is outside the vocabulary of {size} tokens", "prompt")
        return prompt

    def _create(self, state: RequestState, argument: str, prompt: list[int], *, dialect: str) -> m.Created:
        """Create an instance in a worker. Code that can no longer be loaded is compiled again."""
        created = self._try_create(state, argument, prompt, dialect)
        if created.is_unreadable:
            self._compilers.reject(state.module)
            created = self._try_create(state, argument, prompt, dialect)
        if created.is_refused or created.is_unreadable:
            raise InvalidRequest(created.error, "module_id")
        return created

    def _try_create(self, state: RequestState, argument: str, prompt: list[int], dialect: str) -> m.Created:
        compiled = self._shipped.compiled(state.module)
        facts = self._registry.facts(compiled.facts)
        if facts.problem:
            raise InvalidRequest(f"the module is not a controller: {facts.problem}", "module_id")
        splits = self._options.fork == "process" or not facts.is_copyable
        alone = splits or self._options.isolation == "request"
        with self._registry.reserve(state) as key:
            message = m.Create(
                self._pool.new_rid(),
                key,
                state.id,
                str(compiled.path),
                state.module,
                compiled.facts.encode(),
                argument,
                prompt,
                first_pre=dialect == "1b",
                keep_logs=dialect == "1",
            )
            worker = self._pool.lease(state, key, alone=alone)
            try:
                created = self._ask(worker, message)
            except BaseException:
                worker.notify(m.Drop([key], "instantiation failed"))
                self._pool.release(worker, key)
                raise
            if created.error:
                self._pool.release(worker, key)
            else:
                self._registry.add(key, state, worker, splits)
        return created

    def _ask(self, worker: WorkerHandle, message: m.Create) -> m.Created:
        patience = self._limits.max_init_time / 1000 * _PATIENCE
        future, begin = worker.call(message.rid, message), worker.process.cpu_seconds()
        used = 0.0
        while True:
            try:
                reply, _ = future.result(patience)
                break
            except TimeoutError:
                before, used = used, worker.process.cpu_seconds() - begin
                if before < used < patience:  # the worker computes, but the machine is busy
                    continue
                worker.calls.pop(message.rid, None)
                raise ControllerTimeout(f"starting the controller took longer than {patience:g} s") from None
        created: m.Created = reply
        return created

    def _reply(self, created: m.Created, dialect: str, module: str) -> Any:
        if dialect == "1":
            if created.error:
                raise InvalidRequest(f"{created.logs}{created.error}")
            return {}
        result: PreResult | PromptResult | None = None
        if not created.error:
            result = created.pre if dialect == "1b" else PromptResult(created.prompt)
        storage = [StorageCommand(write=write) for write in created.storage]
        told = module if dialect == "2" else UNSET
        return SeqResult(created.error, result, storage, created.logs, created.micros, module_id=told)
