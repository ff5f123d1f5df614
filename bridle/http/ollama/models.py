"""Routes of Ollama's API that describe models: `/api/version`, `/api/tags`, `/api/ps` and `/api/show`.

A model's description comes from the headers of its files, which are read once, or from the engine if the model has no
local files.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from bridle import __version__
from bridle.errors import BridleError
from bridle.http.ollama.bodies import OllamaRoute, described, read_body, served_name
from bridle.http.ollama.ndjson import Row, timestamp
from bridle.http.ollama.options import DEFAULTS
from bridle.http.ollama.schemas import NameBody
from bridle.http.state import HttpState, http_state, json_response
from bridle.model.description import ModelDescription, describe
from bridle.model.hub_lookup import local_path
from bridle.model.library import find_entry, installed_entries, installed_path
from bridle.serving import LoadedModel
from bridle.serving.models.model_slot import Slot

#: The version of Ollama whose API this server has; some clients require a minimum version.
OLLAMA_VERSION = "0.12.6"
#: The expiry of a model that stays loaded until memory is needed.
_NEVER = "9999-12-31T23:59:59Z"
_MAX_TEXT = 1 << 16
#: The GGUF metadata keys for the licence; `_BASES` has the keys for the base model.
_LICENCES = ("general.license", "general.license.name", "license")
_BASES = ("general.repo_url", "general.source.repo_url", "general.base_model.0.repo_url")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

router = APIRouter(route_class=OllamaRoute)


@router.get("/api/version", summary="The version (Ollama's API)")
async def version(request: Request) -> Response:
    return json_response({"version": OLLAMA_VERSION, "bridle": __version__})


@router.get("/api/tags", summary="List the models, loaded or not (Ollama's API)")
async def tags(request: Request) -> Response:
    http = http_state(request)
    names = await http.registry.all_names()
    rows = await asyncio.to_thread(_tag_rows, [(name, http.registry.slot_of(name)) for name in names])
    rows += [_adapter_row(base, name) for base, name in await http.registry.all_adapters()]
    return json_response({"models": rows})


def _tag_rows(slots: list[tuple[str, Slot]]) -> list[Row]:
    return [_tag_row(name, slot) for name, slot in slots]


def _tag_row(name: str, slot: Slot) -> Row:
    card = _card_of(slot)
    modified = card.modified or (0.0 if slot.model is None else float(slot.model.created))
    size = card.num_bytes or (0 if slot.model is None else slot.model.num_bytes)
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(modified),
        "size": size,
        "digest": card.digest,
        "details": _details(card.found),
    }


def _adapter_row(base: str, name: str) -> Row:
    details = _details(None) | {"parent_model": base, "format": "adapter"}
    digest = hashlib.sha256(f"{base}:{name}".encode()).hexdigest()
    shared = {"modified_at": timestamp(0.0), "size": 0, "digest": digest}
    return {"name": name, "model": name, **shared, "details": details}


@router.get("/api/ps", summary="List the models in memory (Ollama's API)")
async def ps(request: Request) -> Response:
    http = http_state(request)
    slots = [slot for slot in http.registry.slots if slot.model is not None]
    rows = await asyncio.to_thread(_tag_rows, [(slot.name, slot) for slot in slots])
    expiries = [http.registry.keep_alive.expires_at(slot) for slot in slots]
    memories = [_memory(slot, at) for slot, at in zip(slots, expiries, strict=True)]
    return json_response({"models": [row | memory for row, memory in zip(rows, memories, strict=True)]})


def _memory(slot: Slot, expires: float | None) -> Row:
    until = _NEVER if expires is None else timestamp(expires)
    model = slot.model
    if model is None:  # the model was unloaded meanwhile
        return {"size": 0, "size_vram": 0, "expires_at": _NEVER, "context_length": 0}
    on_gpu = model.num_bytes if model.info.device.startswith("cuda") else 0
    context = model.max_sequence_tokens
    return {"size": model.num_bytes, "size_vram": on_gpu, "expires_at": until, "context_length": context}


@router.post("/api/show", summary="Describe one model (Ollama's API)", openapi_extra=described(NameBody))
async def show(request: Request) -> Response:
    body, http = await read_body(NameBody, request), http_state(request)
    name = served_name(http.registry, body.required()) or ""
    slot = http.registry.slot_of(http.registry.choose(name).model)
    return json_response(await asyncio.to_thread(_shown, http, slot, name))


def _shown(http: HttpState, slot: Slot, name: str) -> Row:
    card, model = _card_of(slot), slot.model
    entry = find_entry(slot.name)
    template = (card.found.template if card.found is not None else None) or ""
    if model is not None:
        template = model.tokenizer.chat_template.text or template
    defaults = DEFAULTS if model is None else {**DEFAULTS, **model.defaults}
    return {
        **_origin(slot, card.found, None if entry is None else entry.licence),
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in defaults.items()),
        "template": template[:_MAX_TEXT],
        "details": _details(card.found),
        "model_info": _model_info(card.found, model),
        "capabilities": _capabilities(card.found, model),
        "modified_at": timestamp(card.modified),
    }


def _origin(slot: Slot, found: ModelDescription | None, licence: str | None) -> Row:
    """Return the licence and the hub id of a model, if known. The licence and the hub id are looked up in bridle's list
    of models, in the file's metadata and in the model's name."""
    told = {} if found is None else found.metadata
    licence = licence or next((str(told[key]) for key in _LICENCES if told.get(key)), None)
    name = "" if slot.config is None else slot.config.model
    base = next((str(told[key]) for key in _BASES if told.get(key)), "")
    hub = name if _HUB_ID.fullmatch(name) and not Path(name).exists() else base.removeprefix("https://huggingface.co/")
    return ({"license": licence} if licence else {}) | ({"hub_id": hub} if hub else {})


def _model_info(found: ModelDescription | None, model: LoadedModel | None) -> dict[str, Any]:
    """Return the fields of `model_info` that clients read, such as `llama.context_length`."""
    info: dict[str, Any] = {}
    if found is not None:
        arch = found.architecture
        info |= {
            "general.architecture": arch,
            "general.parameter_count": found.num_parameters,
            f"{arch}.context_length": found.context,
            f"{arch}.embedding_length": found.embedding_length,
        }
        info = {**found.metadata, **info}
    if model is not None:
        arch = info.setdefault("general.architecture", "unknown")
        info[f"{arch}.context_length"] = model.max_sequence_tokens
    return info


def _is_short(value: Any) -> bool:
    return isinstance(value, (int, float, bool)) or (isinstance(value, str) and len(value) <= 500)


def _capabilities(found: ModelDescription | None, model: LoadedModel | None) -> list[str]:
    if model is None:
        return ["completion"] if found is None else found.capabilities
    if model.info.task != "generate":
        return ["embedding"]
    known = [] if found is None else found.capabilities
    text = model.tokenizer.chat_template.text or ""
    further = {"tools": "tools" in text, "thinking": "<think>" in text, "vision": "image" in model.modalities}
    return list(dict.fromkeys(["completion", *known, *(name for name, has in further.items() if has)]))


def _details(found: ModelDescription | None) -> Row:
    if found is None:
        unknown = dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), "")
        return {**unknown, "families": []}
    return {
        "parent_model": "",
        "format": found.format,
        "family": found.architecture,
        "families": [found.architecture],
        "parameter_size": found.parameter_size,
        "quantization_level": found.quantization,
        "context_length": found.context,
        "embedding_length": found.embedding_length,
    }


@dataclass(frozen=True, slots=True)
class _Card:
    """Metadata of a model's files. `digest` identifies this version of the files."""

    found: ModelDescription | None
    num_bytes: int
    modified: float
    digest: str


def _card_of(slot: Slot) -> _Card:
    """Return the metadata of a model's files; empty metadata if the model has no local files."""
    model = None if slot.config is None else slot.config.model
    try:
        path = None if model is None else local_path(model)
        if path is not None:
            return _read_card(path, path.stat().st_mtime_ns)
    except (OSError, BridleError):
        pass
    return _Card(None, 0, 0.0, hashlib.sha256(slot.name.encode()).hexdigest())


@lru_cache(maxsize=256)
def _read_card(path: Path, modified: int) -> _Card:
    """Read the metadata of the files at `path`. `modified` is the time of the files' last change, in nanoseconds."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    num_bytes = sum(each.stat().st_size for each in files)
    entry = next((each for each in installed_entries() if installed_path(each) == path), None)
    digest = hashlib.sha256(f"{path.name}:{num_bytes}:{modified}".encode()).hexdigest()
    found = describe(path)
    found = replace(found, metadata={key: value for key, value in found.metadata.items() if _is_short(value)})
    return _Card(found, num_bytes, modified / 1e9, digest if entry is None else entry.sha256)
