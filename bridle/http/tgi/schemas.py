"""Request bodies of the native routes. Types are strict, and a null field counts as missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bridle.http.fields import ControllerFields, Fields, InnerFields
from bridle.http.openai.sampling_fields import derived_fields
from bridle.http.openai.schemas import Stop
from bridle.sampling import Api
from bridle.serving.lora.adapter_registry import is_address


def base_name(name: str | None) -> str | None:
    """Return the model's name in a request; None means the default model. Clients of text-generation-inference, which
    serves one model, may send the server's address as the name, which means the default model."""
    return None if name is not None and is_address(name) else name


ModelName = Annotated[str | None, AfterValidator(base_name)]


class Grammar(InnerFields):
    """Field `grammar`: the constraint on the output text."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any = None


def _own_source(value: str | None) -> str | None:
    """Refuse a source of adapters. LoRAX fetches adapters from a source that the request sets; here the operator sets
    the source, and a request gives only a name."""
    if value not in (None, "", "hub", "local"):
        raise ValueError("must be hub or local: the server's settings decide where adapters come from, by their names")
    return value


def _no_merging(value: Any) -> Any:
    """Refuse to merge adapters, as LoRAX does for a request. Ignoring the field would return the output of another
    model."""
    if value:
        raise ValueError("adapters are not merged for a request; load one that was merged, and name it in adapter_id")
    return value


if TYPE_CHECKING:
    _Derived = Fields
else:
    _Derived = derived_fields("tgi")


class Parameters(ControllerFields, _Derived):
    """Generation parameters: the fields of text-generation-inference, LoRAX's fields that choose an adapter, and
    bridle's own. Sampling fields that this class does not declare are derived."""

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
    """Body of `POST /generate` and `POST /generate_stream`. `model` chooses one of several models; only `/` and
    `/invocations` read `stream`."""

    inputs: str
    parameters: Annotated[Parameters, BeforeValidator(_parameters)] = Field(default_factory=Parameters)
    stream: bool | None = None
    model: ModelName = None
