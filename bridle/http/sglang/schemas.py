"""SGLang's body of `/generate`, and its conversion to a body of `/v1/completions`.

Sampling parameters are converted from SGLang's names, which `bridle.compat` knows. Unsupported fields that would change
the output are refused; the error names the field.
"""

from __future__ import annotations

import json
from typing import Any

from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.http.fields import Fields
from bridle.http.openai.schemas import CompletionBody, SamplingFields
from bridle.safe_repr import short_repr

#: SGLang's default limit of output tokens.
DEFAULT_MAX_TOKENS = 128
_MAX_ID_CHARS = 200
#: Fields of completions that `sampling_params` must not have: the body itself has them, or SGLang has no such field.
_BESIDE = frozenset(CompletionBody.model_fields) - frozenset(SamplingFields.model_fields) | frozenset(
    {"model", "adapter", "stream", "stream_options", "priority", "deadline", "trace", "rewind"}
)
Flag = bool | list[bool] | None
Count = int | list[int] | None


class SglangBody(Fields):
    """Body of `POST /generate` with `text` or `input_ids`. If a field is a list with one value for each prompt, all
    values must be equal."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: Flag = None
    logprob_start_len: Count = None
    top_logprobs_num: Count = None
    return_text_in_logprobs: bool | None = None
    token_ids_logprob: Any = None
    adapter: str | list[str | None] | None = None
    priority: int | None = None
    deadline: float | None = None
    model: str | None = None
    trace: bool | str | None = None

    @property
    def is_batch(self) -> bool:
        """Return whether the response is a list, because the body has a list of prompts."""
        given = self.text if self.text is not None else self.input_ids
        return isinstance(given, list) and (given is self.text or not given or isinstance(given[0], list))

    @property
    def num_top_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None if no log-probabilities are requested."""
        return (
            (_one("top_logprobs_num", self.top_logprobs_num) or 0)
            if _one("return_logprob", self.return_logprob)
            else None
        )

    @property
    def logprobs_from(self) -> int | None:
        """Return the position of the first prompt token whose log-probability is requested; None if the prompt's are
        not requested."""
        start: int | None = _one("logprob_start_len", self.logprob_start_len)
        if self.num_top_logprobs is None or start is None or start == -1:
            return None
        if start < 0:
            raise InvalidRequest(f"logprob_start_len is {start}; must be at least 0, or -1", "logprob_start_len")
        return start

    def id_of(self, number: int, default: str) -> str:
        """Return the id of the output for a prompt: the client's id, or else an id derived from the request's id."""
        rid = self.rid
        if isinstance(rid, list):
            return rid[number]
        return f"{rid or default}_{number}" if self.is_batch else rid or default

    def completion(self, usual: int | None = DEFAULT_MAX_TOKENS) -> CompletionBody:
        """Return the request as a body of completions. `usual` is the default token limit. Raises `InvalidRequest`, and
        `ValidationError` for invalid fields."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("the body must have one of text and input_ids", "text")
        if self.token_ids_logprob:
            raise UnsupportedFeature(
                "token_ids_logprob is not supported; use top_logprobs_num for the most likely tokens",
                "token_ids_logprob",
            )
        beside = {"stream": self.stream, "model": self.model, "priority": self.priority, "deadline": self.deadline}
        prompt = self.text if self.text is not None else self.input_ids
        body = CompletionBody.model_validate(
            {"max_tokens": usual}
            | self._sampling()
            | beside
            | {"prompt": prompt, "adapter": _one("lora_path", self.adapter), "trace": self.trace}
        )
        self._check_ids(len(body.prompt))
        return body

    def _sampling(self) -> dict[str, Any]:
        given = dict(_one("sampling_params", self.sampling_params) or {})
        outside = sorted(_BESIDE & given.keys())
        if outside:
            raise InvalidRequest(f"sampling_params has the unknown parameter {outside[0]!r}", outside[0])
        if given.get("structural_tag") is not None:
            given["structured_outputs"] = {"structural_tag": _tag(given.pop("structural_tag"))}
        length = given.pop("max_new_tokens", None)
        return given if length is None else given | {"max_tokens": length}

    def _check_ids(self, num_prompts: int) -> None:
        ids = [self.rid] if isinstance(self.rid, str) else self.rid or []
        if isinstance(self.rid, list) and len(ids) != num_prompts:
            raise InvalidRequest(f"rid has {len(ids)} request ids for {num_prompts} prompts", "rid")
        for each in ids:
            if len(each) > _MAX_ID_CHARS:
                raise InvalidRequest(f"a request id in rid has {len(each)} characters; at most {_MAX_ID_CHARS}", "rid")


def _one(name: str, value: Any) -> Any:
    """Return the single value of a field. If the field is a list with one value for each prompt, all values must be
    equal."""
    if not isinstance(value, list):
        return value
    if any(each != value[0] for each in value):
        raise UnsupportedFeature(
            f"{name} has different values for the prompts; send the prompts in separate requests", name
        )
    return value[0] if value else None


def _tag(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"structural_tag is {short_repr(value)}; must be JSON", "structural_tag") from error
