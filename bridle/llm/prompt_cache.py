"""A prompt whose KV a program retains: `LLM.cache`."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridle.chat.cached_prompt import shared_prompt
from bridle.engine.request import Request, Retention
from bridle.errors import InvalidRequest
from bridle.llm.chats import conversation_of
from bridle.serving import OutputCollector
from bridle.serving.prompt_caches import read_ttl

if TYPE_CHECKING:
    from bridle.llm.llm import LLM


class RetainedPrompt:
    """A prompt whose KV stays in the cache, for `ttl` seconds or until `delete`. Use the object in a `with` block, or
    call `delete`. `num_tokens` is the number of retained tokens, which are whole blocks within the limits for retained
    KV."""

    def __init__(self, llm: LLM, request: Request, ttl: float) -> None:
        self.ttl, self.num_tokens = ttl, 0
        self._llm, self._name = llm, f"cache-{secrets.token_hex(12)}"
        self._request = replace(request, retains=(Retention(len(request.prompt), ttl, self._name),))
        self.prefetch()
        if not self.num_tokens:
            config = llm.model.engine
            raise InvalidRequest(
                f"prompt: got {len(request.prompt)} tokens, of which none can be retained. This needs a whole block of "
                f"{llm.model.info.block_size}, memory (max_retained is {config.max_retained}, park_memory is "
                f"{config.park_memory}) and the prefix cache",
                "prompt",
            )

    def prefetch(self) -> int:
        """Read or compute the blocks that are not in memory, and restart `ttl`. Return the number of tokens that were
        already in memory."""
        request = replace(self._request, id=secrets.token_hex(12))
        (output,) = self._llm._calls.run([OutputCollector(request)], use_tqdm=False)
        self.num_tokens = output.usage.retained_tokens
        return output.usage.cached_tokens

    def delete(self) -> None:
        """Stop retaining the prompt."""
        self._llm.model.client.release_retained_kv(self._name)

    def __enter__(self) -> RetainedPrompt:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.delete()


def retain_prompt(llm: LLM, prompt: Any, ttl: float | str, tools: Any, given: dict[str, Any]) -> RetainedPrompt:
    """Retain a text, token ids or the messages of a conversation."""
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
        prompt = list(shared_prompt(llm.model, conversation_of(prompt, {} if tools is None else {"tools": tools})))
    request = llm.request(prompt, max_tokens=1, temperature=0.0, **given)
    return RetainedPrompt(llm, request, read_ttl(ttl))
