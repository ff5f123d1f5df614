"""`GET /v1/status`: the current work of the server, for `bridle top` and for scripts. Only admins may use the route,
because the response names users and their requests. The response contains no text of prompts or outputs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import bridle
from bridle.http.metrics.metrics import numbers_of
from bridle.http.middleware.identity import check_admin
from bridle.http.state import HttpState, http_state, json_response
from bridle.serving.lifecycle.request_record import RequestRecord
from bridle.serving.models.model_slot import Slot

if TYPE_CHECKING:
    from bridle.aici.client import RuntimePool

#: The maximum number of requests that are listed; of further requests only their number is given.
MAX_REQUESTS = 100

router = APIRouter()


@router.get("/v1/status", summary="What the server is doing right now (admins)")
async def status(request: Request) -> Response:
    check_admin(request)
    return json_response(status_of_server(http_state(request)))


def status_of_server(http: HttpState) -> dict[str, Any]:
    """Return the models, their engines, and the running requests, oldest first."""
    admission = http.admission
    stories = sorted(http.live.values(), key=lambda story: story.began)
    return {
        "version": bridle.__version__,
        "time": time.time(),
        "uptime": round(time.time() - http.started, 1),
        "is_draining": http.is_draining,
        "in_flight": {
            "requests": admission.num_requests,
            "max_requests": admission.max_requests,
            "prompt_tokens": admission.num_tokens,
            "max_prompt_tokens": admission.max_tokens,
            "refused": admission.num_refused,
        },
        "default_max_tokens": http.default_max_tokens,
        "front_ends": [] if http.writers is None else http.writers.status(),
        "models": [_model(slot) for slot in http.registry.slots],
        "num_requests": len(stories),
        "requests": [_request(story) for story in stories[:MAX_REQUESTS]],
    }


def _model(slot: Slot) -> dict[str, Any]:
    row: dict[str, Any] = {"name": slot.name, "state": slot.state.value, "failures": slot.num_faults}
    model = slot.model
    if model is None:
        return row
    statistics = model.client.statistics()
    row |= {
        "is_healthy": model.client.is_healthy,
        "device": model.info.device,
        "block_size": model.info.block_size,
        "max_num_seqs": model.info.max_num_seqs,
        "adapters": [adapter.name for adapter in model.adapters.list()],
        "control": _control(model.control),
        "policy_control": _control(model.policy_control),
        "kv_blocks": dict(statistics.tenant_blocks),
        "engine": dict(numbers_of(statistics)),
    }
    return row


def _control(runtime: RuntimePool | None) -> dict[str, Any] | None:
    return None if runtime is None else {"is_up": runtime.is_ready, "restarts": runtime.num_restarts}


def _request(story: RequestRecord) -> dict[str, Any]:
    now = time.monotonic()
    computed, cached = story.prompt_counts
    return {
        "id": story.id,
        "route": story.route,
        "user": None if story.identity is None else story.identity.user,
        "model": story.model,
        "adapter": story.adapter,
        "controller": story.controller,
        "constraint": story.constraint,
        "priority": story.terms.priority,
        "deadline": None if (end := story.terms.end()) is None else round(end - now, 3),
        "state": story.state,
        "age": round(now - story.began, 3),
        "prompt_tokens": story.num_prompt,
        "computed_prompt_tokens": computed,
        "cached_prompt_tokens": cached,
        "output_tokens": story.num_tokens,
    }
