"""Common code of the methods of `LLM`. The module converts arguments to checked requests and runs the requests to
completion."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bridle.chat.chat_request import ChatRequest
from bridle.controllers.beams import BEAMS, EarlyStopping
from bridle.errors import InvalidRequest
from bridle.llm import arguments, event_loop
from bridle.llm.arguments import Prompt
from bridle.llm.chats import ChatRun, plan_chats
from bridle.llm.kwargs import settle
from bridle.llm.options import ChatOptions, Sampling
from bridle.llm.requests import keep_traces, make_collectors, start_compiling
from bridle.llm.streams import TextStream
from bridle.llm.structured_parse import are_conversations, is_conversation
from bridle.outputs import RequestOutput
from bridle.sampling import DEFAULT_SAMPLING, SamplingParams
from bridle.serving import LoadedModel, OutputCollector, raise_first_error
from bridle.serving.lifecycle.beam_search import beam_search, found_beams
from bridle.serving.lifecycle.request_handle import run_batch
from bridle.serving.requests.sampling_defaults import filled

_log = logging.getLogger(__name__)

#: Empty keyword arguments.
NOTHING: Mapping[str, Any] = MappingProxyType({})
#: Arguments that calls accept in addition to the keywords for sampling and running.
_OWN = ("sampling", "sampling_params", "multi_modal_data", "use_tqdm")


class Calls:
    """Runs the calls of an `LLM` object. `sampling` is the default for calls without sampling parameters. If `sampling`
    is None, the defaults come from the model's folder."""

    def __init__(self, model: LoadedModel, sampling: SamplingParams | None) -> None:
        self.model = model
        self._sampling = sampling

    # -- from arguments to requests --------------------------------------------------------------------------

    def collectors(
        self,
        call: str,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling,
        given: Mapping[str, Any],
        media: Any = None,
    ) -> list[OutputCollector]:
        """Return one collector for each prompt; each collector has a checked request. `given` are the keywords of the
        method that `call` names."""
        self.model.check_process()
        usual = self._sampling or filled(DEFAULT_SAMPLING, self.model.defaults, ())
        wanted, how = settle(call, sampling, usual, given, _OWN)
        return make_collectors(self.model, prompts, wanted, media, how)

    async def chats(self, call: str, messages: Any, sampling: Sampling, given: Mapping[str, Any]) -> list[ChatRun]:
        """Return one `ChatRun` for each conversation. `given` may also have fields of `ChatOptions`."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        options: Any = {name: given[name] for name in ChatOptions.__annotations__ if name in given}
        rest = {name: value for name, value in given.items() if name not in options}
        wanted, how = settle(call, sampling, self.chat_sampling, rest, (*_OWN, *ChatOptions.__annotations__))
        self.model.check_process()
        return await plan_chats(self.model, messages if several else [messages], wanted, options, how)

    async def typed(
        self, prompts: Any, sampling: Sampling, given: dict[str, Any]
    ) -> tuple[list[ChatRequest | None], list[OutputCollector]]:
        """Return requests for prompts, or for the next messages of conversations. Only requests of conversations have a
        `ChatRequest`."""
        wanted = sampling or self.chat_sampling
        if is_conversation(prompts) or are_conversations(prompts):
            chats = await self.chats("parse", prompts, wanted, given)
            return [chat.turn for chat in chats], [OutputCollector(chat.request) for chat in chats]
        collectors = self.collectors("parse", prompts, wanted, given)
        return [None] * len(collectors), collectors

    @property
    def chat_sampling(self) -> SamplingParams:
        """Return the sampling parameters for a chat whose call sets none."""
        return self._sampling or filled(DEFAULT_SAMPLING.with_(max_tokens=None), self.model.defaults, ())

    def stream(
        self, collector: OutputCollector, given: Mapping[str, Any], turn: ChatRequest | None = None
    ) -> TextStream:
        """Submit the request and return its stream. For a conversation, `turn` parses the output. Outside an event
        loop, an unusable constraint raises an error here. Inside an event loop, an unusable constraint raises its error
        later, because compiling it here would block the loop."""
        if not event_loop.in_event_loop():
            for compiling in start_compiling(self.model, [collector]):
                compiling.result()
        return TextStream(
            self.model.client,
            collector.request,
            collector.output.prompt,
            on_finish=lambda output: keep_traces(self.model, [output], given),
            turn=turn,
        )

    def beams(
        self, prompts: Prompt | Sequence[Prompt], beam_width: int, penalty: float, early_stopping: EarlyStopping,
        use_tqdm: bool, given: Mapping[str, Any],
    ) -> list[RequestOutput]:  # fmt: skip
        """Return the most probable texts of each prompt, best first. `given` are the keywords of `LLM.beam_search`."""
        wanted, how = settle("beam_search", None, DEFAULT_SAMPLING, given, ("use_tqdm",))
        self.model.check_process()
        sampling = arguments.as_sampling(wanted)
        plain, beams = beam_search(self.model, sampling, beam_width, penalty, early_stopping)
        if any(how.get(name) for name in ("controller", "controllers", "constraint")):
            raise InvalidRequest("beam search takes no controller and no constraint; leave both out", "constraint")
        outputs = self.run(make_collectors(self.model, prompts, plain, None, {**how, "controller": beams}), use_tqdm)
        for output in outputs:
            raise_first_error(output)
            output.outputs = found_beams(self.model.tokenizer, output, beams, sampling, beam_width)
            del output.storage[BEAMS]
        return outputs

    # -- from requests to outputs ----------------------------------------------------------------------------

    def run(
        self, collectors: list[OutputCollector], use_tqdm: bool, given: Mapping[str, Any] = NOTHING
    ) -> list[RequestOutput]:
        """Return the outputs of all requests, in the order of the requests."""
        for compiling in start_compiling(self.model, collectors):
            compiling.result()
        with event_loop.progress(len(collectors), use_tqdm) as report:
            event_loop.run(run_batch(self.model.client, collectors, report))
        return self._outputs(collectors, given)

    async def run_async(
        self, collectors: list[OutputCollector], given: Mapping[str, Any] = NOTHING
    ) -> list[RequestOutput]:
        """Run the requests in an event loop; return their outputs as `run` does."""
        for compiling in start_compiling(self.model, collectors):
            await asyncio.shield(asyncio.wrap_future(compiling))  # other requests may wait for the same compilation
        await run_batch(self.model.client, collectors, lambda output: None)
        return self._outputs(collectors, given)

    def _outputs(self, collectors: list[OutputCollector], given: Mapping[str, Any]) -> list[RequestOutput]:
        """All outputs. Traced outputs also get their traces. An error in one output is logged and not raised, because
        the other outputs may have taken hours."""
        outputs = [collector.output for collector in collectors]
        errors = [each.error for output in outputs for each in output.outputs if each.error is not None]
        if errors:
            _log.warning("%d outputs of %d requests failed; the first error: %s", len(errors), len(outputs), errors[0])
        keep_traces(self.model, outputs, given)
        return outputs


def one_of(sampling: Sampling, sampling_params: Sampling) -> Sampling:
    """Return the value of an argument that has two names. Raises `InvalidRequest` if both names were given."""
    if sampling is not None and sampling_params is not None:
        raise InvalidRequest("sampling and sampling_params name the same thing; give only one of them", "sampling")
    return sampling if sampling_params is None else sampling_params
