"""`RequestLifecycle` for programs that have loaded a model themselves: requests without a server.

    local = InProcessServing(model)
    with run(model.client, local.request("Hello", SamplingParams(max_tokens=8))) as running:
        print(running.read().text)

Controllers, deadlines, policies and checks work as they do in a server. The things that only a server needs are left
out: names of models, admission, API keys, and deadlines while a model loads. This module does not submit requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypedDict, Unpack

from bridle.engine.request import Request, StoppingCriteria
from bridle.multimodal import Source
from bridle.sampling import SamplingParams
from bridle.serving.models.loading import LoadedModel
from bridle.serving.policies.policy_registry import NO_POLICIES
from bridle.serving.requests.prompts import build_request
from bridle.serving.requests.request_builder import EventOptions
from bridle.serving.requests.request_limits import RequestLimits, make_terms
from bridle.serving.requests.steering import NO_CLASSES, PLAIN, Steering, SteersRequests
from bridle.serving.tenancy.keys import LOCAL_USER


class CallOptions(TypedDict):
    """Options that all requests of one call share (see `OwnOptions`)."""

    adapter: str | None
    timeout: float | None
    tenant: str
    terms: RequestLimits


class InProcessServing(SteersRequests):
    """One call in the program that has loaded `model`. Waiting requests of calls are served in the order of `priority`,
    smaller numbers first. Requests end `deadline` seconds after this object was created, or `timeout` seconds after the
    requests began. `user` is the user for whom the program runs. Raises `InvalidRequest` for values that are out of
    range."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        user: str = "",
        priority: int | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
    ) -> None:
        self.model = model
        self.user = user
        self.identity, self.classes = LOCAL_USER, NO_CLASSES
        self.terms = make_terms(priority, deadline, LOCAL_USER)
        self.timeout = timeout

    def bounded(self, doing: str) -> AbstractAsyncContextManager[None]:
        """Set no time limit for the block: a program's deadline ends its requests, but not their preparation."""
        return nullcontext()

    def request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        steering: Steering = PLAIN,
        *,
        adapter: str | None = None,
        stopping: Sequence[StoppingCriteria] = (),
        add_special_tokens: bool = True,
        pictures: Sequence[Source] = (),
        **wanted: Unpack[EventOptions],
    ) -> Request:
        """Return a checked request. Raises the same errors as `build_request`. The policies of `model` apply to the
        request that is built. `pictures` belong to the placeholders of the prompt in order, unless `sights` already has
        their positions."""
        return build_request(
            self.model,
            prompt,
            sampling,
            controller=steering.controller,
            constraint=steering.constraint,
            stopping=stopping,
            add_special_tokens=add_special_tokens,
            pictures=pictures,
            client_tools=steering.client_tools,
            policies=NO_POLICIES if self.model.policies is None else self.model.demands(adapter, self.user),
            **self.options(adapter),
            **wanted,
        )

    def options(self, adapter: str | None = None) -> CallOptions:
        """Return the options that all requests of the call share."""
        return {"adapter": adapter, "timeout": self.timeout, "tenant": self.user, "terms": self.terms}
