"""A conversation that remembers its turns. A conversation can be streamed, forked, and saved to a file.

    session = llm.session(system="Be brief.")
    print(session.send("My name is Ada."))
    print(session.send("What is my name?"))

A session is plain data. The KV of a session's turns is found again in the prefix cache. To run several sessions in one
batch, use `send_async` in several tasks, or `together`.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridle.chat.conversation import Conversation, look_of
from bridle.errors import InvalidRequest
from bridle.llm import event_loop
from bridle.llm.chats import ChatRun, plan_chats
from bridle.llm.kwargs import settle
from bridle.llm.notebook import page_of_talk
from bridle.llm.options import ChatOptions, Message
from bridle.llm.streams import TextStream
from bridle.outputs import ChatMessage, FinishReason, RequestOutput
from bridle.sampling import SamplingParams
from bridle.serving import OutputCollector, raise_first_error
from bridle.serving.lifecycle.request_handle import run_batch
from bridle.tokenizer.chat_template import prepare
from bridle.traces import Trace

if TYPE_CHECKING:
    from bridle.llm.llm import LLM

FORMAT = "bridle-chat"
VERSION = 1
MAX_FILE_BYTES = 64 << 20

Turn = dict[str, Any]

_PROMPT_OPTIONS = tuple(ChatOptions.__annotations__)
_KEPT_OPTIONS = (*_PROMPT_OPTIONS, "adapter")
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTROLLER)


class ChatSession:
    """One conversation with a model. A turn that fails or is cancelled leaves the conversation unchanged.

    `options` are the options of `LLM.chat`: `tools`, `tool_choice`, `thinking_budget`, `chat_template`, `controller`,
    and so on. If the model calls tools, the calls are in `last_output.message.calls`. Send the results of the model's
    calls as messages of role `tool`. Only one turn of a session may run at a time.
    """

    def __init__(
        self, llm: LLM, system: str | None = None, sampling: SamplingParams | None = None, **options: Any
    ) -> None:
        self.llm = llm
        self.system = system
        chat: dict[str, Any] = {name: options.pop(name) for name in _PROMPT_OPTIONS if name in options}
        default = llm.chat_sampling
        settled, how = settle("session", sampling, default, options, ("system", "sampling", *_PROMPT_OPTIONS))
        if not isinstance(settled, SamplingParams):
            raise InvalidRequest(f"sampling is {settled!r}; must be a SamplingParams", "sampling")
        self.sampling = sampling if settled is default else settled
        self.options: dict[str, Any] = chat | {**how}
        #: The turns so far, oldest first, without the system prompt.
        self.turns: list[Turn] = []
        #: The last output in full: counts, finish reason, log-probabilities.
        self.last_output: RequestOutput | None = None
        #: Traces of answers by their index among the turns, for display in notebooks.
        self._traces: dict[int, Trace] = {}

    @property
    def messages(self) -> list[Turn]:
        """Return the whole conversation in the form that chat templates expect."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(dict(turn) for turn in self.turns)]

    # -- turns -----------------------------------------------------------------------------------------------

    def send(self, said: str | Sequence[Message]) -> str:
        """Send a text or messages; return the content of the model's answer."""
        return self.together([self], [said])[0]

    async def send_async(self, said: str | Sequence[Message]) -> str:
        """Send a text or messages in an event loop, as `send` does."""
        turns = _turns(said)
        return await self._stream(turns, await self._plan(turns)).read_async()

    def stream(self, said: str | Sequence[Message]) -> TextStream:
        """Send a text or messages, and read the content of the answer while it is generated, with `for` or `async for`.
        The turn is kept only if the answer is read to its end."""
        turns = _turns(said)
        return self._stream(turns, event_loop.run(self._plan(turns)))

    def _stream(self, said: list[Turn], chat: ChatRun) -> TextStream:
        def on_finish(output: RequestOutput) -> None:
            chat.read(output)
            self._add(said, output)

        return TextStream(self.llm.model.client, chat.request, on_finish=on_finish, turn=chat.turn)

    @staticmethod
    def together(sessions: Sequence[ChatSession], texts: Sequence[str | Sequence[Message]]) -> list[str]:
        """Run one turn in each of several sessions of the same model, as one batch. Return the answers in the order of
        the sessions. If one turn fails, its error is raised, but the other turns are kept."""
        _check_apart(sessions, texts)
        said = [_turns(text) for text in texts]
        outputs = event_loop.run(_run_all(sessions, said)) if sessions else []
        for session, turns, output in zip(sessions, said, outputs, strict=True):
            session._add(turns, output)
        for output in outputs:
            raise_first_error(output)
        return [_message_of(output).content for output in outputs]

    async def _plan(self, said: list[Turn]) -> ChatRun:
        how: Any = dict(self.options)
        options: Any = {name: how.pop(name) for name in _PROMPT_OPTIONS if name in how}
        sampling, messages = self.sampling or self.llm.chat_sampling, [*self.messages, *said]
        self.llm.model.check_process()
        (chat,) = await plan_chats(self.llm.model, [messages], sampling, options, how)
        return chat

    def _add(self, said: list[Turn], output: RequestOutput) -> None:
        """Add a turn to the conversation, if its output ended normally."""
        if output.outputs[0].finish_reason in _OWN_ENDS:
            self.turns += [*said, _answer(_message_of(output))]
            self.last_output = output
            if output.trace is not None:
                self._traces[len(self.turns) - 1] = output.trace

    # -- the history -----------------------------------------------------------------------------------------

    def fork(self) -> ChatSession:
        """Return an independent copy of the session, to try another continuation. The KV of the common part of both
        sessions is computed only once."""
        twin = ChatSession(self.llm, self.system, self.sampling, **self.options)
        twin.turns = copy.deepcopy(self.turns)
        twin.last_output = self.last_output
        twin._traces = dict(self._traces)
        return twin

    def undo(self) -> None:
        """Remove the last message of the user and the answer to it, if there is one."""
        while self.turns and self.turns.pop()["role"] != "user":
            pass
        self._traces = {at: trace for at, trace in self._traces.items() if at < len(self.turns)}

    def reset(self) -> None:
        """Remove all turns; the system prompt stays."""
        self.turns.clear()
        self._traces.clear()

    def _repr_html_(self) -> str:
        """Return the conversation as HTML for a notebook. The tokens of traced answers are coloured by their origin."""
        begin = len(self.messages) - len(self.turns)
        return page_of_talk(self.messages, {begin + at: trace for at, trace in self._traces.items()})

    # -- files -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the conversation as data that JSON can represent. Options that JSON cannot represent, such as
        controllers, are left out."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.llm.name,
            "system": self.system,
            "turns": copy.deepcopy(self.turns),
            "sampling": None if self.sampling is None else self.sampling.to_dict(),
            "options": {name: self.options[name] for name in _KEPT_OPTIONS if name in self.options},
        }

    def save(self, path: str | Path) -> None:
        """Write the conversation as JSON. An existing file is replaced atomically."""
        path = Path(path)
        draft = path.with_name(path.name + ".part")
        draft.write_text(json.dumps(self.to_dict(), ensure_ascii=False, indent=1), encoding="utf-8")
        draft.replace(path)

    @classmethod
    def from_dict(cls, llm: LLM, data: Any) -> ChatSession:
        """Restore a conversation from data of `to_dict`. The conversation may continue with another model. Raises
        `InvalidRequest` if the data is not from `to_dict`."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InvalidRequest(f"the data is not a saved conversation: its format is not {FORMAT!r}")
        if data.get("version") != VERSION:
            raise InvalidRequest(f"the saved conversation has version {data.get('version')!r}; known is {VERSION}")
        system, options, turns = data.get("system"), data.get("options") or {}, data.get("turns") or []
        if not (system is None or isinstance(system, str)) or not set(options) <= set(_KEPT_OPTIONS):
            raise InvalidRequest("the system prompt or the options of the saved conversation are not valid")
        session = cls(llm, system, _sampling(data.get("sampling")), **options)
        if turns:
            pictures, tokenizer = llm.model.pictures, llm.model.tokenizer
            look = None if pictures is None else look_of(pictures, tokenizer, Conversation(turns))
            prepare(turns, look, tokenizer.chat_template.text)  # raises an error if this is no list of messages
        session.turns = [dict(turn) for turn in turns]
        return session

    @classmethod
    def load(cls, llm: LLM, path: str | Path) -> ChatSession:
        """Restore a conversation from a file that `save` wrote. Raises `InvalidRequest` if the file is not from
        `save`."""
        size = Path(path).stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} has {size} bytes; a saved conversation has at most {MAX_FILE_BYTES}")
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{path} is not JSON: {error}") from error
        return cls.from_dict(llm, data)


async def _run_all(sessions: Sequence[ChatSession], said: Sequence[list[Turn]]) -> list[RequestOutput]:
    chats = await asyncio.gather(*(each._plan(turns) for each, turns in zip(sessions, said, strict=True)))
    collectors = [OutputCollector(chat.request) for chat in chats]
    await run_batch(sessions[0].llm.model.client, collectors, lambda output: None)
    for chat, collector in zip(chats, collectors, strict=True):
        chat.read(collector.output)
    return [collector.output for collector in collectors]


def _turns(said: str | Sequence[Message]) -> list[Turn]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else [dict(message) for message in said]


def _message_of(output: RequestOutput) -> ChatMessage:
    return output.message or ChatMessage(content=output.text)


def _answer(message: ChatMessage) -> Turn:
    """Return a message of the model in the form that chat templates expect."""
    turn: Turn = {"role": "assistant", "content": message.content}
    if message.thoughts:
        turn["reasoning_content"] = message.thoughts
    if message.calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return turn


def _check_apart(sessions: Sequence[ChatSession], texts: Sequence[object]) -> None:
    if len(sessions) != len(texts):
        raise InvalidRequest(f"got {len(texts)} texts for {len(sessions)} sessions; give one text for each", "texts")
    if len({id(session) for session in sessions}) < len(sessions):
        raise InvalidRequest("a session was given twice, but runs one turn at a time; fork it", "sessions")
    if len({id(session.llm.model) for session in sessions}) > 1:
        raise InvalidRequest("the sessions use different models; they cannot share a batch", "sessions")


def _sampling(fields: Any) -> SamplingParams | None:
    if fields is None:
        return None
    try:
        bias = {int(token): value for token, value in fields.get("logit_bias", {}).items()}
        return SamplingParams(**{**fields, "logit_bias": bias})
    except (TypeError, AttributeError, ValueError) as error:
        raise InvalidRequest(f"the sampling parameters of the saved conversation are not valid: {error}") from error
