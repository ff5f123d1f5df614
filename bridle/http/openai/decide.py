"""`POST /v1/decide`: chooses one of several texts as the continuation of a prompt, and returns the probability of each
text."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle.chat.chat_request import prepare_chat
from bridle.chat.conversation import Conversation
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.fields import Fields
from bridle.http.middleware.json_body import BoundedRoute
from bridle.http.middleware.request_context import run_while_connected
from bridle.http.openai.responses_common import usage_shape
from bridle.http.openai.schemas import MAX_MESSAGES, JsonObjects, Prompts, objects, texts
from bridle.http.state import json_response, serving_of
from bridle.sampling import SamplingParams
from bridle.sampling_values import MAX_SCORED
from bridle.serving import raise_first_error
from bridle.serving.lifecycle.generation import Generation
from bridle.serving.lifecycle.request_lifecycle import RequestLifecycle
from bridle.serving.outputs.option_scores import option_scores
from bridle.serving.requests.steering import Steering
from bridle.structured_output.spec import Choice

router = APIRouter(route_class=BoundedRoute)


class DecideBody(Fields):
    """Body of `POST /v1/decide`. Each of the `options` is scored as the continuation of a `prompt`, or of the
    `messages` of a conversation. At temperature 0, the default, the most probable option is chosen."""

    model: str | None = None
    adapter: str | None = None
    priority: int | None = None
    deadline: float | None = None
    prompt: Prompts | None = None
    messages: Annotated[JsonObjects | None, objects("messages", MAX_MESSAGES)] = None
    options: Annotated[list[str], texts("options")]
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    constraint_report: bool | None = None

    def sampling(self) -> SamplingParams:
        """Return the parameters for sampling one of the options. Raises `InvalidRequest`."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "constraint_report")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(max_tokens=None, **given)

    def choice(self) -> Choice:
        """Return the constraint under which the engine scores all options. Raises `InvalidRequest`."""
        if not 1 <= len(self.options) <= MAX_SCORED:
            raise InvalidRequest(
                f"options has {len(self.options)} texts; must have between 1 and {MAX_SCORED}. Send the options in "
                "several requests, and compare their logprobs.",
                "options",
            )
        return Choice(self.options, scored=True)


@router.post("/v1/decide", summary="Choose one of several texts, with the probability of each")
async def decide(body: DecideBody, request: Request) -> Response:
    try:
        return json_response(await run_while_connected(request.receive, _answer(body, serving_of(request))))
    except InvalidRequest as error:
        if error.param in ("choice", "constraint"):  # the field's names on other routes
            error.param = "options"
        raise


async def _answer(body: DecideBody, serving: RequestLifecycle) -> dict[str, Any]:
    sampling, choice = body.sampling(), body.choice()
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("the body must have exactly one of prompt and messages", "prompt")
    prompts: list[Any] = body.prompt or []
    if len(prompts) > 1:
        raise InvalidRequest(
            f"prompt: got {len(prompts)} prompts; a decision has one prompt. Send one request for each prompt.",
            "prompt",
        )
    await serving.acquire_model(
        body.model, body.adapter, priority=body.priority, deadline=body.deadline, must_name=True
    )
    steering = Steering(constraint=choice)
    if body.messages is not None:
        conversation = Conversation(body.messages, variables=body.chat_template_kwargs or {})
        turn = await prepare_chat(serving, conversation, sampling, steering)
        if turn.steering.controller is not None or turn.steering.constraint is not choice:
            raise UnsupportedFeature(
                "messages: options cannot be scored, because the model reasons before it answers. Turn reasoning off "
                "with "
                "chat_template_kwargs, or send a prompt.",
                "messages",
            )
        generation = await serving.prepare([turn.prompt], turn.sampling, steering, run=True, **turn.events)
    else:
        tokens = await serving.tokens(prompts)
        generation = await serving.prepare(tokens, sampling, steering, texts=prompts, run=True)
    return _shape(generation, choice)


def _shape(generation: Generation, choice: Choice) -> dict[str, Any]:
    """Return the JSON response for a finished generation."""
    output = generation.parts[0].collector.output
    raise_first_error(output)
    scores = option_scores(choice, output)
    chosen = next(each for each in scores if each.text == output.text)
    return {
        "id": f"decide-{generation.story.id}",
        "object": "decision",
        "created": int(time.time()),
        "model": generation.served_name,
        "choice": chosen.text,
        "probability": chosen.probability,
        "options": [each.to_dict() for each in scores],
        "usage": usage_shape(generation.usage),
    }
