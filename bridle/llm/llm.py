"""`LLM`: a model in this process, for scripts and notebooks.

    with LLM("demo") as llm:
        print(llm.generate("The capital of France is")[0].text)

All prompts share one continuous batch and one prefix cache, even those of calls from several threads or tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from bridle.chat.conversation import prompt_text
from bridle.compat.vllm_calls import of_method
from bridle.config import ModelConfig
from bridle.controllers.beams import EarlyStopping
from bridle.engine.request import Request
from bridle.llm import arguments, event_loop, pooling
from bridle.llm.arguments import Prompt
from bridle.llm.calls import one_of
from bridle.llm.chat_session import ChatSession
from bridle.llm.chats import conversation_of, read_chats
from bridle.llm.decisions import ChoiceResult, decision_in
from bridle.llm.kwargs import check_names, settle_runs, takes
from bridle.llm.loaded_model import LoadedModelMixin
from bridle.llm.options import Adapters, ChatCallOptions, ChatOptions, GenerateOptions, Message, Sampling
from bridle.llm.pooling import Classification
from bridle.llm.prompt_cache import RetainedPrompt, retain_prompt
from bridle.llm.scores import TextScore, scores_of
from bridle.llm.streams import Reader, TextStream
from bridle.llm.structured_parse import objects_of, typed_as
from bridle.outputs import RequestOutput
from bridle.sampling import SamplingParams
from bridle.serving import LoadedModel, OutputCollector
from bridle.serving.prompt_caches import DEFAULT_TTL
from bridle.structured_output.spec import Choice
from bridle.tokenizer.content_tokens import encode_prompt

if TYPE_CHECKING:
    from torch import Tensor

    from bridle.control_vectors.directions import Method
    from bridle.llm.vectors import PairPrompt

T = TypeVar("T")


class LLM(LoadedModelMixin):
    """A loaded model. Use the object in a `with` block, or call `close` when done. Safe to use from several threads."""

    @classmethod
    def with_params(cls, sampling: SamplingParams) -> LLMBuilder:
        """Return a builder, for `LLM.with_params(SamplingParams(...)).from_backend("demo")`: the sampling parameters
        come first, then the model."""
        return LLMBuilder(arguments.as_sampling(sampling))

    @classmethod
    def from_backend(cls, backend: str | ModelConfig | LoadedModel = "demo", **settings: Any) -> LLM:
        """Load a model, as the constructor of `LLM` does."""
        return cls(backend, **settings)

    # -- generating ------------------------------------------------------------------------------------------

    @takes(GenerateOptions)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        sampling_params: Sampling = None,
        multi_modal_data: Any = None,
        use_tqdm: bool = True,
        **given: Unpack[GenerateOptions],
    ) -> list[RequestOutput]:
        """Continue all prompts in one batch. Return one output for each prompt, in the order of the prompts.

        A prompt is a text or a list of token ids. `sampling` (vLLM's name: `sampling_params`), `controller`,
        `constraint` and `adapter` are one value for all prompts, or a list with one value for each prompt. Other
        keywords are fields of `RunOptions`, names of a constraint (such as `regex` or `json_schema`), or fields of
        `SamplingParams`. Fields of `SamplingParams` override those in `sampling`. An error in any prompt is raised
        before any request runs. An output that fails later has the `finish_reason` ERROR and its error in `error`. An
        unknown keyword raises a `TypeError`. With `use_tqdm`, a progress bar is shown if stderr is a terminal. An
        interrupt cancels all requests.
        """
        wanted = one_of(sampling, sampling_params)
        collectors = self._calls.collectors("generate", prompts, wanted, given, multi_modal_data)
        return self._calls.run(collectors, use_tqdm, given)

    @takes(GenerateOptions)
    async def generate_async(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        sampling_params: Sampling = None,
        multi_modal_data: Any = None,
        use_tqdm: bool = True,
        **given: Unpack[GenerateOptions],
    ) -> list[RequestOutput]:
        """Run `generate` in an event loop. Cancelling the task cancels its requests."""
        wanted = one_of(sampling, sampling_params)
        collectors = self._calls.collectors("generate_async", prompts, wanted, given, multi_modal_data)
        return await self._calls.run_async(collectors, given)

    @takes(GenerateOptions)
    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **given: Unpack[GenerateOptions],
    ) -> TextStream:
        """Continue one prompt, and read the text while it is generated, with `for` or `async for`. An unusable
        constraint raises an error in this call. In an event loop, which must not be blocked, the error is raised when
        the first piece of text is awaited."""
        (collector,) = self._calls.collectors("stream", [prompt], one_of(sampling, sampling_params), given)
        return self._calls.stream(collector, given)

    def make_control_vector(
        self, pairs: Iterable[tuple[PairPrompt, PairPrompt]], path: str | Path | None = None, *, method: Method = "mean"
    ) -> dict[int, Tensor]:
        """Compute a control vector for each layer from pairs of prompts. The vector is the direction from the second to
        the first prompts, in the hidden states of their last tokens.

        Returns an array float32 [hidden size] for each layer, and writes the vectors to a GGUF file at `path`. A prompt
        is a text or a list of messages. `method` is `mean` or `pca`. No other request may run at the same time. Raises
        `InvalidRequest`.
        """
        from bridle.control_vectors import write_vector
        from bridle.llm.vectors import record_directions

        def run(prompt: PairPrompt) -> object:
            ask: Any = self.generate if isinstance(prompt, str) else self.chat
            return ask(prompt, max_tokens=1, speculate=0, use_tqdm=False)

        found = record_directions(self._vectors, run, list(pairs), method)
        if path is not None:
            write_vector(Path(path), found, self.name)
        return found

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int,
        max_tokens: int = 16,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        use_tqdm: bool = True,
        **given: Any,
    ) -> list[RequestOutput]:
        """Search for the most probable texts with `beam_width` beams. Returns `beam_width` outputs for each prompt,
        best first, each with a `score`, as transformers' `generate(num_beams=...)` does. `early_stopping` True ends a
        search when `beam_width` texts are complete. `early_stopping` False ends a search when no beam can get a better
        score at its present length. `early_stopping` "never" ends a search when no beam can get a better score even at
        the maximum length. `ignore_eos`, `logit_bias`, `allowed_token_ids`, and the run options of `generate` also
        apply. All other options that would change sampling raise an error."""
        given = {"max_tokens": max_tokens, "temperature": 0.0} | given
        return self._calls.beams(prompts, beam_width, length_penalty, early_stopping, use_tqdm, given)

    @overload
    def score(
        self, prompts: Prompt | Sequence[Prompt], *, top: int = ..., use_tqdm: bool = ..., adapter: Adapters = ...,
        timeout: float | None = ..., deadline: float | None = ..., priority: int = ..., tenant: str = ...,
    ) -> list[TextScore]: ...  # fmt: skip

    @overload
    def score(
        self, prompts: str | Sequence[str], others: str | Sequence[str], *, use_tqdm: bool = ...,
        prompt_name: str | None = ..., truncate_prompt_tokens: int | None = ..., adapter: Adapters = ...,
        timeout: float | None = ..., deadline: float | None = ..., priority: int = ..., tenant: str = ...,
    ) -> list[float]: ...  # fmt: skip

    def score(
        self,
        prompts: Any,
        others: str | Sequence[str] | None = None,
        *,
        top: int = 0,
        use_tqdm: bool = True,
        **given: Any,
    ) -> list[TextScore] | list[float]:
        """Return log-probabilities of given texts, token by token. With `top`, the most probable tokens at each
        position are returned too, with their log-probabilities. With `others`, return the similarity of each pair of
        texts, like `/v1/score`. The similarity comes from a cross-encoder, or is the cosine of two vectors. A single
        text is compared with all texts in `others`. Nothing is generated. `adapter`, `timeout` and the other
        `RunOptions` that do not concern sampling apply."""
        if others is not None:
            how = settle_runs("score", given, ("use_tqdm", *pooling.READING))
            return pooling.scores(self._model, prompts, others, how, given, partial(self._calls.run, use_tqdm=use_tqdm))
        how = settle_runs("score", given, ("top", "use_tqdm"))
        return scores_of(self._model, prompts, top, how, partial(self._calls.run, use_tqdm=use_tqdm))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, use_tqdm: bool = True, **given: Any
    ) -> list[list[float]]:
        """Return a vector of length 1 for each text. With `dimensions`, only the first `dimensions` numbers of each
        vector are returned. The closer the dot product of two vectors is to 1, the more similar the model considers the
        texts.

        An embedding model uses the settings in its folder. With `prompt_name`, the model's prompt of that name is put
        before the text. For a generating model, the vector is the hidden state of the last token. Longer texts are cut
        to `truncate_prompt_tokens` (-1: the model's limit). With `normalize` False, vectors keep the length that the
        model gives them. Nothing is generated.
        """
        how = settle_runs("embed", given, ("use_tqdm", "normalize", *pooling.READING))
        return pooling.vectors(
            self._model, prompts, dimensions, how, given, lambda made: self._calls.run(made, use_tqdm)
        )

    def classify(
        self, texts: str | Sequence[str | tuple[str, str]], *, use_tqdm: bool = True, **given: Any
    ) -> list[Classification]:
        """Return the labels that a sequence classifier gives to each text, or to each pair of texts."""
        how = settle_runs("classify", given, ("use_tqdm", *pooling.READING))
        return pooling.labels(self._model, texts, how, given, partial(self._calls.run, use_tqdm=use_tqdm))

    # -- chatting --------------------------------------------------------------------------------------------

    @takes(ChatCallOptions)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling = None,
        *,
        sampling_params: Sampling = None,
        use_tqdm: bool = True,
        **given: Unpack[ChatCallOptions],
    ) -> list[RequestOutput]:
        """Return the next message of one conversation, or of each conversation in a list. Apart from the options for
        chats, this method works like `generate`.

        Each output has a `message`: the reasoning, the content, and the calls of `tools`. `tool_choice` and the other
        options work as in the servers (see `ChatOptions`). Without `sampling`, the only limit on a message is the
        context length. Raises `InvalidRequest` if the model has no chat template and none is given.
        """
        plan = self._calls.chats("chat", messages, one_of(sampling, sampling_params), given)
        chats = event_loop.run(plan)
        return read_chats(chats, self._calls.run([OutputCollector(chat.request) for chat in chats], use_tqdm, given))

    @takes(ChatCallOptions)
    async def chat_async(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling = None,
        *,
        sampling_params: Sampling = None,
        use_tqdm: bool = True,
        **given: Unpack[ChatCallOptions],
    ) -> list[RequestOutput]:
        """Run `chat` in an event loop, with the same keywords. Cancelling the task cancels its requests."""
        chats = await self._calls.chats("chat_async", messages, one_of(sampling, sampling_params), given)
        return read_chats(chats, await self._calls.run_async([OutputCollector(chat.request) for chat in chats], given))

    def decide(
        self, prompt: Prompt | Sequence[Message], choices: Sequence[str], *, use_tqdm: bool = False, **given: Any
    ) -> ChoiceResult:
        """Choose one of the texts `choices` as the continuation of a prompt, or as the next message of a conversation.
        The probability of each choice is returned too. All choices are scored as whole texts, in one or two steps. The
        most probable choice is returned. With a `temperature`, a choice is sampled. Other keywords of this method are
        those of `generate` and `chat`. Raises `UnsupportedFeature` if the given options do not allow scoring."""
        constraint = Choice(choices, scored=True)
        how = {"temperature": 0.0, "max_tokens": None, **given, "constraint": constraint}
        asked: Any = prompt
        is_chat = isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)
        run: Any = self.chat if is_chat else self.generate
        return decision_in(constraint, run(asked, use_tqdm=use_tqdm, **how)[0])

    def request(self, prompt: Prompt, sampling: SamplingParams | None = None, **given: Any) -> Request:
        """Return a checked request that can be passed to `model.client.submit`."""
        (collector,) = self._calls.collectors("request", [prompt], sampling, given)
        return collector.request

    def cache(
        self, prompt: Prompt | Sequence[Message], ttl: float | str = DEFAULT_TTL, *, tools: Any = None, **given: Any
    ) -> RetainedPrompt:
        """Retain the KV of a prompt, or of the beginning of a conversation, for `ttl` seconds (or `5m`, `24h`). A later
        request that continues the prompt then computes only its own tokens. Use the result in a `with` block, or call
        its `delete`. Other keywords of this method are those of `generate`. Raises `InvalidRequest` if the prompt
        exceeds the limits for retained KV."""
        return retain_prompt(self, prompt, ttl, tools, given)

    @takes(ChatCallOptions)
    def session(
        self, system: str | None = None, sampling: SamplingParams | None = None, **given: Unpack[ChatCallOptions]
    ) -> ChatSession:
        """Return a `ChatSession`, a conversation that remembers its turns. See `ChatSession`."""
        return ChatSession(self, system, sampling, **given)

    # -- objects ---------------------------------------------------------------------------------------------

    def parse(
        self, prompts: Any, kind: type[T], sampling: Sampling = None, *, use_tqdm: bool = True, **given: Any
    ) -> Any:
        """Return the continuation of a prompt as an object of the type `kind`: a pydantic model, a dataclass,
        `list[Thing]`, and so on. A list of prompts gives a list of objects. If `prompts` is a conversation or a list of
        conversations, the object is the model's answer.

        The schema of `kind` is the constraint of the output. Without `sampling`, the only limit on an output is the
        context length. Other keywords of this method are those of `generate` and `chat`. Raises `IncompleteOutput` if
        the output was cut off."""
        typed, given = typed_as(kind, given)
        turns, collectors = event_loop.run(self._calls.typed(prompts, sampling, given))
        return objects_of(typed, turns, self._calls.run(collectors, use_tqdm, given), prompts)

    async def parse_async(self, prompts: Any, kind: type[T], sampling: Sampling = None, **given: Any) -> Any:
        """Run `parse` in an event loop."""
        typed, given = typed_as(kind, given)
        turns, collectors = await self._calls.typed(prompts, sampling, given)
        return objects_of(typed, turns, await self._calls.run_async(collectors, given), prompts)

    def parse_stream(
        self, prompt: Any, kind: type[T], sampling: SamplingParams | None = None, **given: Any
    ) -> Reader[T]:
        """Iterate over the object of one prompt or conversation while it is generated, with `for` or `async for`.
        Fields that are not generated yet have their default values, or None. The last object is complete and valid.
        Raises `IncompleteOutput` if the output was cut off."""
        typed, given = typed_as(kind, given)
        turns, collectors = event_loop.run(self._calls.typed(prompt, sampling, given))
        ((turn,), (collector,)) = turns, collectors
        return self._calls.stream(collector, given, turn).objects(typed)

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
        """Return the tokens of a conversation, up to the beginning of the model's next message."""
        check_names("chat_prompt", options, ChatOptions.__annotations__)
        text = prompt_text(self._model, conversation_of(messages, options))
        return encode_prompt(self._model.tokenizer, text)

    @property
    def chat_sampling(self) -> SamplingParams:
        """Return the sampling parameters for a chat whose call sets none."""
        return self._calls.chat_sampling

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names bridle's equivalent of a method of vLLM's `LLM`. Type checkers do not see this
            method, so they report unknown names."""
            advice = of_method(name)
            told = f"LLM has no {name!r}" + (f": {advice}" if advice else "")
            raise AttributeError(told, name=name, obj=self)


class LLMBuilder:
    """The result of `LLM.with_params`: sampling parameters for a model that is not loaded yet."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def from_backend(self, backend: str | ModelConfig | LoadedModel = "demo", **settings: Any) -> LLM:
        """Load the model that `backend` names, with the sampling parameters of `with_params` as its default."""
        return LLM(backend, sampling=self._sampling, **settings)
