"""Request bodies of text-embeddings-inference's routes, with the additional fields that the Hugging Face client
sends."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from bridle.http.fields import InnerFields
from bridle.http.openai.embeddings import TextsBody
from bridle.http.openai.schemas import PROMPTS_SCHEMA, prompts
from bridle.serving.requests.pooling_inputs import AS_FITS, Item

_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}
_PREDICT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, _TEXTS, {"type": "array", "items": _TEXTS}]}


def _direction(value: Any) -> Any:
    if isinstance(value, str) and value.lower() == "left":
        raise ValueError("is 'left'; must be 'right', because texts are truncated only at their end")
    if value is not None and (not isinstance(value, str) or value.lower() != "right"):
        raise ValueError("must be 'right'")
    return value


class _Body(TextsBody):
    truncate: bool | None = None
    truncation_direction: Annotated[Any, BeforeValidator(_direction)] = None

    @property
    def cut(self) -> int | None:
        """Return the token limit to which texts are truncated; None if they are not truncated."""
        return AS_FITS if self.truncate and self.truncate_prompt_tokens is None else self.truncate_prompt_tokens


class EmbedBody(_Body):
    """Body of `POST /embed`: a text, a list of texts, a list of token ids, or a list of such lists."""

    inputs: Annotated[Any, BeforeValidator(lambda value: prompts(value, "inputs")), WithJsonSchema(PROMPTS_SCHEMA)]
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float"] | None = None


class Inputs(InnerFields):
    """A text, and the texts with which it is compared."""

    source_sentence: str
    sentences: list[str] = Field(min_length=1)


class SimilarityBody(_Body):
    """Body of `POST /similarity`."""

    inputs: Inputs
    parameters: dict[str, Any] | None = None


class Classifying(InnerFields):
    """Options that the Hugging Face client sends for classification: the number of labels to return, and the function
    that computes scores from logits."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: int | None = Field(default=None, ge=1)


class Classified:
    """The input of a classification: texts and pairs of texts. `is_batch` says whether the response is a list of
    lists."""

    def __init__(self, items: list[Item], is_batch: bool) -> None:
        self.items = items
        self.is_batch = is_batch


def _classified(value: Any) -> Any:
    """Validate a text, a list of one text or of a pair of texts, or a list of such lists."""
    if isinstance(value, str):
        return Classified([_nonempty(value)], False)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return Classified([_item(value)], False)
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        return Classified([_item(item) for item in value], True)
    raise ValueError("must be a text, a list of one text or of a pair of texts, or a list of such lists")


def _item(texts: list[Any]) -> Item:
    if not all(isinstance(text, str) for text in texts) or not 1 <= len(texts) <= 2:
        raise ValueError(f"has a list of {len(texts)} texts; a list must have one text, or a pair of texts")
    return _nonempty(texts[0]) if len(texts) == 1 else (_nonempty(texts[0]), _nonempty(texts[1]))


def _nonempty(text: str) -> str:
    if not text:
        raise ValueError("has an empty text; a text must have at least one character")
    return text


class PredictBody(_Body):
    """Body of `POST /predict`: a text, a pair of texts, or a list of these. The Hugging Face client sends
    `parameters`."""

    inputs: Annotated[Any, BeforeValidator(_classified), WithJsonSchema(_PREDICT_SCHEMA)]
    raw_scores: bool | None = None
    parameters: Classifying | None = None
