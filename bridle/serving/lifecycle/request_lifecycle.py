"""The lifecycle of a request in any API: limits, admission, a lease on the model, tokens, and checked requests.

    with ExitStack() as held:
        serving = RequestLifecycle(host, RequestRecord(id=new_request_id()), held)
        model = await serving.acquire_model("llama")
        tokens = await serving.tokens(["Hello"])
        generation = await serving.prepare(tokens, SamplingParams(max_tokens=8))
        await generation.run()

Errors in a request are raised before any request is submitted. Resources are released when `held` is closed. If a
client disconnects, its front end cancels the task that waits here. This module uses no wire format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Unpack

from bridle.controllers.beams import BeamSearch
from bridle.controllers.composition import compose
from bridle.controllers.python import Controller
from bridle.engine.input_processor import check_task
from bridle.engine.request import Request
from bridle.errors import EngineClosed, InvalidRequest
from bridle.malloc import return_free_memory
from bridle.outputs import RequestOutput
from bridle.sampling import MAX_SEED, SamplingParams
from bridle.serving.lifecycle.generation import Generation, SubRequest
from bridle.serving.lifecycle.request_record import RequestRecord, Tracing
from bridle.serving.models.loading import LoadedModel
from bridle.serving.models.model_registry import ModelRegistry
from bridle.serving.models.model_slot import Slot
from bridle.serving.policies import NO_POLICIES, Applied, PolicyContext, PolicyRegistry
from bridle.serving.prompt_caches import PromptCaches
from bridle.serving.requests.prompts import tokenize_all
from bridle.serving.requests.request_builder import EventOptions, check_sampling, make_request
from bridle.serving.requests.request_limits import make_terms
from bridle.serving.requests.sampling_defaults import limited
from bridle.serving.requests.steering import PLAIN, Steering, SteersRequests
from bridle.serving.requests.text_params import resolve_text_params
from bridle.serving.tenancy.admission import Admission, Ticket
from bridle.serving.tenancy.keys import LOCAL_USER, Identity
from bridle.serving.tenancy.loop_throttle import LoopThrottle
from bridle.serving.tracing.trace_header import traces_of
from bridle.serving.tracing.trace_store import UNDER_POLICY, TraceStore, Wish

_CLOSING = "the server is shutting down and takes no new requests"
_GLANCE = 0.2  # seconds between two checks for parked conversations
_CROWD = 16  # peak number of requests after which free memory is returned to the system
#: Called with the thing that is waited for, `loading` or `loaded`, and the name of its adapter, or None for the model.
Notice = Callable[[str, str | None], None]


@dataclass(slots=True)
class AppState:
    """State that all front ends of a process share: models, capacity, and whether new requests are accepted. `live` has
    the running requests by id. `tracing` exports the spans of requests, if it is set. One call may have at most
    `max_prompts` prompts and `max_choices` choices. While the host `is_draining`, new requests are refused. If the host
    `awaits_parked` conversations, requests that continue a retained conversation are still accepted. `idle` is an event
    that is set while no request is running. `num_crowd` is the highest number of concurrent requests since the server
    was last idle. `turns` limits the time for clients that are refused or send nothing. All front ends share this
    limit, because they share one event loop. `classes` are the operator's controller classes, by name. `traces` stores
    traces for clients and the operator. `policies` are the operator's policies. A request without a limit on its output
    gets `default_max_tokens` (None: the default of its API). `prompt_caches` are the prompt caches of all clients."""

    registry: ModelRegistry
    admission: Admission
    tracing: Tracing | None = None
    max_prompts: int = 128
    max_choices: int = 256
    live: dict[str, RequestRecord] = field(default_factory=dict)
    is_draining: bool = False
    awaits_parked: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    num_crowd: int = 0
    turns: LoopThrottle = field(default_factory=LoopThrottle)
    classes: Mapping[str, type[Controller]] = field(default_factory=dict)
    traces: TraceStore = field(default_factory=TraceStore)
    policies: PolicyRegistry = field(default_factory=PolicyRegistry)
    default_max_tokens: int | None = None
    prompt_caches: PromptCaches = field(default_factory=PromptCaches)

    def __post_init__(self) -> None:
        self.admission.longest_prompt = self.registry.longest_prompt

    def check_open(self) -> None:
        """Raise `EngineClosed` while the server is shutting down, unless the server awaits retained conversations."""
        if self.is_draining and not (self.awaits_parked and self.num_parked):
            raise EngineClosed(_CLOSING)

    @property
    def num_parked(self) -> int:
        """Return the number of conversations of all models with retained KV, except those that clients retain for
        longer."""
        counts = (model.client.statistics() for model in self.registry)
        return sum(getattr(each, "num_parked", 0) - getattr(each, "num_retained", 0) for each in counts)

    async def wait_drained(self) -> None:
        """Wait until the running requests have ended. If the host awaits retained conversations, wait for them too."""
        await self.idle.wait()
        while self.awaits_parked:
            await asyncio.sleep(_GLANCE)  # conversations are counted as parked a moment after their request has ended
            if not (self.num_parked or self.admission.num_requests):
                return

    def on_request_end(self) -> None:
        """Record the end of a request. The reservations of the request are released. After a peak of requests, free
        heap memory is returned to the system when all requests have ended."""
        self.num_crowd = max(self.num_crowd, self.admission.num_requests)
        if self.admission.num_requests == 0 and self.num_crowd >= _CROWD:
            self.num_crowd = 0
            asyncio.get_running_loop().run_in_executor(None, return_free_memory)
        if self.is_draining and self.admission.num_requests == 0:
            self.idle.set()


@dataclass(slots=True)
class RequestLifecycle(SteersRequests):
    """One call of a client. `load_timeout` is the time to wait for a model and an adapter. `request_timeout` is the
    time that the requests may run. `load_timeout` and `request_timeout` are in seconds. `model` and `adapter` are set
    after they are acquired. `bounded` enforces the request's deadline inside a block."""

    host: AppState
    story: RequestRecord
    exit_stack: ExitStack
    load_timeout: float | None = None
    request_timeout: float | None = None
    trace: Wish = "no"
    adapter: str | None = None
    identity: Identity = field(init=False)
    user: str = field(init=False)
    classes: Mapping[str, type[Controller]] = field(init=False)
    model: LoadedModel = field(init=False)
    ticket: Ticket = field(init=False)
    bounded: Callable[[str], AbstractAsyncContextManager[None]] = field(init=False)
    _is_late: bool = False  # the call began while the host was draining

    def __post_init__(self) -> None:
        self.identity, self.bounded = self.story.identity or LOCAL_USER, self.story.terms.bounded
        self.user, self.classes = self.identity.user, self.host.classes

    # -- acquiring the model -------------------------------------------------------------------------------------

    async def acquire_model(
        self,
        name: str | None,
        adapter: str | None = None,
        *,
        num_prompts: int = 1,
        n: int = 1,
        priority: int | None = None,
        deadline: float | None = None,
        notice: Notice | None = None,
        generates: bool = True,
        must_name: bool = False,
    ) -> LoadedModel:
        """Acquire admission for `num_prompts` prompts, and the model and adapter that a request names, until the end of
        the call. `name` may also be the name of an adapter. A call for text needs a model that `generates`. If the
        server has several models, a request `must_name` one of them if its API has a field for the name.

        Waits for loading. Raises `InvalidRequest` (or its subclasses such as `UnknownModel`, `UnknownAdapter` and
        `AdapterRefused`), `Overloaded`, `ModelUnavailable`, `DeadlineExceeded`, and `EngineClosed` while the host is
        shutting down.
        """
        host, story, identity = self.host, self.story, self.identity
        host.check_open()
        self._is_late = host.is_draining
        story.terms = make_terms(priority, deadline, identity, story.began)
        self.bounded = story.terms.bounded
        chosen = host.registry.choose(name, adapter, must_name=must_name)
        slot = host.registry.slot_of(chosen.model)
        story.model = slot.name
        if num_prompts > host.max_prompts:
            raise InvalidRequest(f"prompt has {num_prompts} prompts; at most {host.max_prompts}", "prompt")
        if num_prompts * n > host.max_choices:
            message = f"{num_prompts} prompts with n = {n} make {num_prompts * n} choices; at most {host.max_choices}"
            raise InvalidRequest(message, "n")
        self.ticket = host.admission.admit(num_prompts, identity.user, identity.limits)
        self.exit_stack.callback(self.ticket.release)
        host.live[story.id] = story
        self.exit_stack.callback(host.live.pop, story.id, None)
        async with story.terms.bounded("its model was loaded"):
            await self._load(slot, chosen.adapter, notice)
        if generates:
            check_task(self.model.info, embeds=False)
        return self.model

    async def acquire_model_for_metadata(self, name: str | None) -> LoadedModel:
        """Return the model that a request names, for work that needs no admission. The name of an adapter stands for
        its model. A model that is not loaded needs admission first."""
        registry = self.host.registry
        slot = registry.slot_of(registry.choose(name).model)
        if slot.model is None:
            return await self.acquire_model(name, generates=False)
        await self._load(slot)
        return self.model

    async def _load(self, slot: Slot, adapter: str | None = None, notice: Notice | None = None) -> None:
        """Acquire the model and the adapter, and keep both loaded."""
        registry, say = self.host.registry, notice or _say_nothing
        is_loaded = slot.model is not None
        if not is_loaded:
            say("loading", None)
        self.model = await registry.hold(slot, self.exit_stack, self.load_timeout)
        if adapter:
            is_ready = registry.adapters.is_ready(self.model, adapter)
            if is_loaded and not is_ready:
                say("loading", adapter)
            self.adapter = self.story.adapter = await registry.adapters.fetch(self.model, adapter, self.load_timeout)
            if is_loaded and not is_ready:
                say("loaded", adapter)
        if not is_loaded:
            say("loaded", None)

    # -- preparing the requests ----------------------------------------------------------------------------------

    async def tokens(
        self, prompts: Sequence[str | Sequence[int]], truncate: int | None = None, add_special_tokens: bool = True
    ) -> list[tuple[int, ...]]:
        """Return the checked tokens of the prompts of a call. `truncate` keeps only the last `truncate` tokens of each
        prompt."""
        async with self.bounded("its prompts were tokenized"):
            return await tokenize_all(self.model, prompts, truncate, add_special_tokens)

    async def prepare(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        steering: Steering = PLAIN,
        *,
        texts: Sequence[str | Sequence[int]] = (),
        apart: bool = False,
        at_once: int | None = None,
        run: bool = False,
        **wanted: Unpack[EventOptions],
    ) -> Generation:
        """Check the call and build its generation, which is submitted later. The prompts are checked tokens; `texts`
        are the texts from which they were made. The choices of a prompt are forks of one request. With a controller or
        with `apart`, each choice is a separate request, which can be repeated with its seed alone. At most `at_once`
        requests run at the same time."""
        if self._is_late and not wanted.get("continues"):  # a parked conversation may still be continued
            raise EngineClosed(_CLOSING)
        has_policies = self.host.policies.current.policies and not wanted.get("embeds")
        policies = await self._policies() if has_policies else NO_POLICIES
        may_trace = self.trace != "no" or self.host.traces.share > 0
        if may_trace and self._settle_trace(policies) and not wanted.get("embeds"):
            wanted["trace"] = True
        if steering.constraint is not None:
            async with self.bounded("its constraint was compiled"):
                await self.model.try_constraint(steering.constraint)
        check_sampling(self.model, sampling)
        if sampling.has_texts:
            sampling = await self.model.in_text_thread(resolve_text_params, self.model, sampling)
        num_copies = sampling.n if apart or steering.controller is not None else 1
        if num_copies > 1:
            sampling = sampling.with_(n=1)
        parts: list[SubRequest] = []
        for number, tokens in enumerate(prompts):
            if number:
                await asyncio.sleep(0)  # a call with many prompts must not block other tasks
            request = self._request(number * num_copies, tokens, sampling, steering, num_copies, policies, wanted)
            text = texts[number] if number < len(texts) else None
            first = SubRequest(number * num_copies, request, steering.rewind, text if isinstance(text, str) else None)
            first.tells_trace = self.trace == "told"
            parts += [first, *(_choice(first, self.story.id, copy) for copy in range(1, num_copies))]
        name = self.adapter or self.model.name
        keep = self._keep if wanted.get("trace") else None
        generation = Generation(self.model, name, self.story, self.ticket, self.exit_stack, parts, at_once, keep)
        if run:
            await generation.run()
        return generation

    def _settle_trace(self, policies: Applied) -> bool:
        """Decide whether the call is traced. The call is traced for the operator, or if the client asks for a trace and
        no policy forbids it."""
        if self.trace != "no":
            # a trace would show the text that was rolled back
            is_refused = policies.guard is not None and not self.identity.is_admin
            self.trace = "no" if is_refused else self.trace
            self.story.traced = UNDER_POLICY if is_refused else self.trace
        return self.trace != "no" or self.host.traces.is_chosen(self.story.id)

    async def _policies(self) -> Applied:
        """Return the operator's policies for this call. Later changes of the policies do not affect the call."""
        story, current = self.story, self.host.policies.current
        asking = PolicyContext.of(self.model.name, self.adapter, self.identity, story.route)
        if current.may_take_long:
            applied = await self.model.in_text_thread(current.select, asking, self.model)
        else:
            applied = current.select(asking, self.model)
        story.policies, story.tells_policies = applied.labels, applied.has_header
        self.host.policies.count(applied.policies)
        return applied

    def _keep(self, outputs: list[RequestOutput]) -> None:
        """Store the traces of a finished generation."""
        traces = traces_of(self.model, outputs)
        self.host.traces.keep(self.story.id, self.identity.user, traces, is_wanted=self.trace != "no")

    def limit(self, usual: int | None = None) -> int | None:
        """Return the output limit of a request that sets none. The result is None if the operator has set a default;
        else it is `usual`, the API's default."""
        return usual if self.host.default_max_tokens is None else None

    def _request(
        self,
        number: int,
        tokens: tuple[int, ...],
        sampling: SamplingParams,
        steering: Steering,
        num_copies: int,
        policies: Applied,
        wanted: EventOptions,
    ) -> Request:
        """Return a checked request for one prompt. All copies of the request have the same place in the order of
        service."""
        story, desk, controller = self.story, self.model.tools, steering.controller
        # An unset limit is the operator's, or else the checkpoint's, as far as the prompt leaves room.
        length = self.host.default_max_tokens or self.model.defaults.get("max_tokens")
        if length is not None:
            sampling = limited(sampling, length, self.model.max_sequence_tokens - len(tokens))
        request = make_request(
            self.model,
            tokens,
            sampling,
            controller if steering.constraint is None else compose(controller, steering.constraint),
            request_id=f"{story.id}-{number}",
            adapter=self.adapter,
            timeout=self.request_timeout,
            tenant=self.identity.user,
            terms=story.terms,
            metadata={} if story.span is None else {"traceparent": story.span.traceparent},  # for other processes
            tools=None if desk is None else desk.names_for(self.identity.user, self.identity.is_admin),
            client_tools=steering.client_tools,
            policies=policies,
            **wanted,
        )
        num_outputs = controller.width if isinstance(controller, BeamSearch) else num_copies
        most = request.sampling.max_tokens  # None: the model decides when its output ends
        most = None if most is None else most * request.sampling.n * num_outputs
        caches = self.host.prompt_caches
        size = self.model.info.block_size
        shared = None
        if self.identity.group:
            shared = caches.shared_prefix(self.identity, self.model.name, self.adapter, request.prompt, size)
        return replace(request, place=self.ticket.charge(len(tokens) * num_copies, most), shared=shared)


def _say_nothing(what: str, adapter: str | None) -> None:
    """Do nothing, for clients that get no notices while they wait."""


def _choice(first: SubRequest, call_id: str, copy: int) -> SubRequest:
    """Return another choice for a prompt. The choice is a separate request, whose seed is derived from the seed of the
    first choice."""
    number = first.number + copy
    seed = ((first.request.sampling.seed or 0) + copy) % MAX_SEED
    request = replace(first.request, id=f"{call_id}-{number}", sampling=first.request.sampling.with_(seed=seed))
    part = SubRequest(number, request, first.policy, first.text, shares=first)
    part.tells_trace = first.tells_trace
    return part
