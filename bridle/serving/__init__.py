"""Common parts of all front ends: names of models, loading, validation, admission, and outputs from events."""

from bridle.serving.controller_runtime import (
    LOCAL_ADMIN,
    ControlSettings,
    as_control,
    data_folder,
    list_tags,
    tag_module,
    upload_module,
)
from bridle.serving.lora.adapter_registry import AdapterInfo, AdapterRegistry
from bridle.serving.lora.lora_config import AdapterSet, AdapterSpec, parse_adapter, parse_adapters
from bridle.serving.models.loading import LoadedModel, load_model, model_name
from bridle.serving.models.model_registry import ModelRegistry
from bridle.serving.models.model_slot import Lease, ModelState
from bridle.serving.models.served_models import AUTO, EngineLoader, ModelSet, add_adapters, build_registry
from bridle.serving.outputs.output_collector import OutputCollector, best_outputs, collect, raise_first_error
from bridle.serving.outputs.stream_deltas import (
    REWIND_MARK,
    Delta,
    DeltaReader,
    RewindPolicy,
    max_rewind_of,
    split_at_rewinds,
)
from bridle.serving.requests.prompts import build_request, encode_prompt, tokenize
from bridle.serving.requests.request_builder import check_length, check_text, check_unicode, new_request_id, new_seed
from bridle.serving.tenancy.admission import Admission, Ticket

__all__ = [
    "AUTO",
    "LOCAL_ADMIN",
    "REWIND_MARK",
    "AdapterInfo",
    "AdapterRegistry",
    "AdapterSet",
    "AdapterSpec",
    "Admission",
    "ControlSettings",
    "Delta",
    "DeltaReader",
    "EngineLoader",
    "Lease",
    "LoadedModel",
    "ModelRegistry",
    "ModelSet",
    "ModelState",
    "OutputCollector",
    "RewindPolicy",
    "Ticket",
    "add_adapters",
    "as_control",
    "best_outputs",
    "build_registry",
    "build_request",
    "check_length",
    "check_text",
    "check_unicode",
    "collect",
    "data_folder",
    "encode_prompt",
    "list_tags",
    "load_model",
    "max_rewind_of",
    "model_name",
    "new_request_id",
    "new_seed",
    "parse_adapter",
    "parse_adapters",
    "raise_first_error",
    "split_at_rewinds",
    "tag_module",
    "tokenize",
    "upload_module",
]
