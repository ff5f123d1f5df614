"""Conversations of the Python API. Requests are created and outputs are parsed in the same way as in the servers.

`bridle.chat` handles chat templates, tools, reasoning and budgets. This module converts calls to requests of
`bridle.chat`, and sets the `message` of outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bridle.chat.chat_request import ChatRequest, prepare_chat
from bridle.chat.conversation import Conversation, continued
from bridle.engine.request import Request
from bridle.llm.options import ChatOptions, Message, RunOptions
from bridle.llm.requests import PromptSpec, each_of
from bridle.outputs import RequestOutput
from bridle.sampling import SamplingParams
from bridle.serving import LoadedModel


@dataclass(frozen=True, slots=True)
class ChatRun:
    """One conversation that is ready to run: the request for its next message, and the parser of its output."""

    model: LoadedModel
    request: Request
    turn: ChatRequest

    def read(self, output: RequestOutput) -> None:
        """Parse the finished outputs."""
        found = []
        for each in output.outputs:
            each.message = self.turn.message(each)
            found.append((replace(each), each.message))
            ending = next(filter(each.text.endswith, self.turn.ends), "")
            each.text = each.text.removesuffix(ending)
        self.turn.keep(self.model, self.request, found)


async def plan_chats(
    model: LoadedModel,
    conversations: Sequence[Sequence[Message]],
    sampling: SamplingParams | Sequence[SamplingParams],
    options: ChatOptions,
    how: RunOptions,
) -> list[ChatRun]:
    """Return a checked request for each conversation, without submitting it. Raises the first error of any
    conversation."""
    ones = each_of(model, sampling, how, len(conversations))
    asked = [conversation_of(messages, options) for messages in conversations]
    return await asyncio.gather(*(_plan(model, each, one) for each, one in zip(asked, ones, strict=True)))


async def _plan(model: LoadedModel, conversation: Conversation, one: PromptSpec) -> ChatRun:
    turn = await prepare_chat(one.serving, conversation, one.sampling, one.steering)
    steered = replace(one, sampling=turn.sampling, steering=turn.steering)
    return ChatRun(model, steered.request(turn.prompt, turn.events), turn)


def conversation_of(messages: Sequence[Message], options: ChatOptions) -> Conversation:
    """Return a conversation with the given messages, and with its options for the answer."""
    tools = options.get("tools")
    asked, begun = continued(messages, options.get("continue_final_message"), options.get("add_generation_prompt"))
    return Conversation(
        asked,
        tools,
        options.get("tool_choice"),
        options.get("parallel_tool_calls"),
        options.get("thinking_budget"),
        options.get("thinking_budget_message"),
        variables=options.get("chat_template_kwargs") or {},
        template=options.get("chat_template"),
        prefill=begun,
        tool_prompt=options.get("tool_prompt"),
        # Custom templates may expect tools in another shape than OpenAI's.
        reads_calls=all(isinstance(tool, Mapping) and "function" in tool for tool in tools or ()),
    )


def read_chats(chats: Sequence[ChatRun], outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return the finished outputs of conversations after parsing them."""
    for chat, output in zip(chats, outputs, strict=True):
        chat.read(output)
    return outputs
