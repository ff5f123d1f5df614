"""What every front-end shares: loading, names, validation, admission, and events to outputs."""

from bridle.service.admission import Admission, Ticket
from bridle.service.collect import OutputCollector, best_outputs, collect, raise_first_error
from bridle.service.loading import LoadedModel, load_model, model_name
from bridle.service.registry import ModelRegistry
from bridle.service.requests import (
    build_request,
    check_length,
    check_text,
    check_unicode,
    encode_prompt,
    new_request_id,
    new_seed,
    tokenize,
)
from bridle.service.rewind import REWIND_MARK, Delta, DeltaReader, RewindPolicy, max_rewind_of

__all__ = [
    "REWIND_MARK",
    "Admission",
    "Delta",
    "DeltaReader",
    "LoadedModel",
    "ModelRegistry",
    "OutputCollector",
    "RewindPolicy",
    "Ticket",
    "best_outputs",
    "build_request",
    "check_length",
    "check_text",
    "check_unicode",
    "collect",
    "encode_prompt",
    "load_model",
    "max_rewind_of",
    "model_name",
    "new_request_id",
    "new_seed",
    "raise_first_error",
    "tokenize",
]
