"""What every front-end shares: names of models, loading, validation, admission, and the way from events to outputs."""

from bridle.service.adapter_set import AdapterSet, AdapterSpec, parse_adapter, parse_adapters
from bridle.service.adapters import AdapterInfo, AdapterRegistry
from bridle.service.admission import Admission, Ticket
from bridle.service.collect import OutputCollector, best_outputs, collect, raise_first_error
from bridle.service.control import (
    LOCAL_ADMIN,
    ControlSettings,
    as_control,
    data_folder,
    list_tags,
    tag_module,
    upload_module,
)
from bridle.service.loading import LoadedModel, load_model, model_name
from bridle.service.model_set import AUTO, EngineLoader, ModelSet, add_adapters, build_registry
from bridle.service.prompts import build_request, encode_prompt, tokenize
from bridle.service.registry import ModelRegistry
from bridle.service.requests import check_length, check_text, check_unicode, new_request_id, new_seed
from bridle.service.rewind import REWIND_MARK, Delta, DeltaReader, RewindPolicy, max_rewind_of, split_at_rewinds
from bridle.service.slot import Lease, ModelState

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
