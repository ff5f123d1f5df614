"""Request bodies of text-generation-inference's routes. Types are strict, and a null field counts as missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bridle.http.fields import ControllerFields, Fields, InnerFields
from bridle.http.openai.sampling_fields import derived_fields
from bridle.http.openai.schemas import Stop
from bridle.sampling import Api
from bridle.serving.lora.adapter_registry import is_address


def base_name(name: str | None) -> str | None:
    """Return the model's name in a request; None means the default model. Clients of text-generation-inference may send
    the server's address as the name, which also means the default model."""
    return None if name is not None and is_address(name) else name


ModelName = Annotated[str | None, AfterValidator(base_name)]


class Grammar(InnerFields):
    """The field `grammar`: the constraint on the output text."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any = None


def _own_source(value: str | None) -> str | None:
    """Refuse a request that sets the source of an adapter, as in LoRAX. Here the operator sets the source, and a
    request only names an adapter."""
    if value not in (None, "", "hub", "local"):
        raise ValueError(
            "must be hub or local; in both cases the server's settings decide where the adapter of a name comes from"
        )
    return value


def _no_merging(value: Any) -> Any:
    """Refuse a request to merge adapters, which LoRAX supports. Ignoring the field would return the output of another
    model."""
    if value:
        raise ValueError(
            "adapters cannot be merged for a request; load a merged adapter, and give its name in adapter_id"
        )
    return value


if TYPE_CHECKING:
    _Derived = Fields
else:
    _Derived = derived_fields("tgi")


class Parameters(ControllerFields, _Derived):
    """Generation parameters: text-generation-inference's fields, LoRAX's fields that choose an adapter, and bridle's
    own fields. Further sampling fields are derived from `SamplingParams`."""

    api: ClassVar[Api] = "tgi"

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: Stop = ()
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None
    adapter_source: Annotated[str | None, AfterValidator(_own_source)] = None
    adapter_parameters: Annotated[Any, AfterValidator(_no_merging)] = None

    priority: int | None = None
    deadline: float | None = None
    min_p: float | None = None
    min_new_tokens: int | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    constraint: dict[str, Any] | None = None
    trace: bool | str | None = None


def _parameters(value: Any) -> Any:
    return {} if value is None else value


class GenerateBody(Fields):
    """Body of `POST /generate` and `POST /generate_stream`. `model` chooses one of several models. Only the routes `/`
    and `/invocations` read `stream`."""

    inputs: str
    parameters: Annotated[Parameters, BeforeValidator(_parameters)] = Field(default_factory=Parameters)
    stream: bool | None = None
    model: ModelName = None
