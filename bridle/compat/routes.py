"""Routes of other servers, and their equivalents in bridle.

The table does not say which routes exist in bridle, because the server's application has that list.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridle.compat.schema import System, systems_of
from bridle.compat.vendor_fields import JUDGED, TEXT

_HEARD = "send a chat with `input_audio` to a model that reads sound"

_DROPPED = "cached KV is dropped when memory is needed"
_LEAVES = "a client that disconnects ends its request; no route ends other requests"
_PAUSES = "/v1/pause and /v1/resume"
_LOOK = "traces of requests, /metrics and `bridle top` show the work of the server"
_REPLACED = "the server starts and replaces replicas and shards; Ray Serve scales them"
_WEIGHTS = "weights are not changed while they are served: load the new ones under another name"


@dataclass(frozen=True, slots=True)
class Route:
    """A route of another server. If bridle lacks the route, `why` names the alternative; otherwise `but` says how
    bridle's route differs."""

    systems: tuple[System, ...]
    path: str
    why: str = ""
    but: str = ""


def _routes(systems: str, paths: str, why: str = "") -> list[Route]:
    return [Route(systems_of(systems), path, why) for path in paths.split()]


ROUTES: tuple[Route, ...] = (
    Route(("vLLM", "SGLang", "llama.cpp", "TGI", "Ray"), "/v1/chat/completions"),
    Route(("vLLM", "SGLang", "llama.cpp", "TGI", "Ray"), "/v1/completions"),
    Route(("vLLM", "SGLang", "llama.cpp", "TGI", "Ray"), "/v1/models"),
    Route(("vLLM", "SGLang", "llama.cpp", "Ray"), "/v1/embeddings"),
    Route(("vLLM", "SGLang", "llama.cpp"), "/v1/responses"),
    Route(("vLLM", "SGLang", "llama.cpp"), "/v1/messages"),
    Route(("vLLM", "SGLang", "llama.cpp", "TGI"), "/health"),
    Route(("vLLM", "SGLang", "llama.cpp", "TGI"), "/metrics"),
    Route(("vLLM", "SGLang", "TGI"), "/ping"),
    Route(("vLLM",), "/version"),
    Route(("vLLM",), "/v1/load_lora_adapter"),
    Route(("vLLM",), "/v1/unload_lora_adapter"),
    Route(("vLLM", "llama.cpp", "TGI", "Ray"), "/tokenize"),
    Route(("vLLM", "llama.cpp", "Ray"), "/detokenize"),
    Route(("vLLM", "Ray"), "/v1/score"),
    Route(("vLLM", "SGLang", "llama.cpp"), "/v1/rerank"),
    Route(("vLLM", "SGLang"), "/v1/classify"),
    Route(("vLLM",), "/classify"),
    Route(("vLLM",), "/rerank"),
    Route(("vLLM",), "/pooling", "/v1/embeddings pools as the model's folder says, /v1/classify gives logits"),
    Route(("vLLM", "Ray"), "/v1/audio/transcriptions", _HEARD),
    Route(("SGLang", "TGI"), "/generate"),
    Route(("vLLM",), "/generate", but="with the bodies of SGLang and TGI; /v1/completions takes vLLM's `prompt`"),
    Route(("SGLang",), "/flush_cache", "cached prefixes are dropped when memory is needed"),
    Route(("SGLang",), "/get_model_info", "/info and /v1/models have this information"),
    Route(("llama.cpp",), "/completion", "/v1/completions takes its fields, /generate streams its way"),
    Route(("llama.cpp",), "/infill", "fill-in-the-middle is only on Ollama's /api/generate"),
    Route(("llama.cpp",), "/props", "/info says it"),
    Route(("llama.cpp",), "/slots", "/v1/status and `bridle top` show what runs"),
    Route(("llama.cpp",), "/apply-template", "/chat_tokenize gives the tokens"),
    Route(("TGI",), "/generate_stream"),
    Route(("TGI",), "/info"),
    Route(("TGI",), "/chat_tokenize"),
    Route(("vLLM", "SGLang", "TGI"), "/invocations"),
    *_routes("vLLM SGLang llama.cpp", "/v1/messages/count_tokens"),
    *_routes("vLLM SGLang", "/v1/responses/{response_id}"),
    *_routes("SGLang", "/ /tokenize /detokenize /classify /v1/score /v1/models/{model:path}"),
    *_routes("TGI", "/"),
    *_routes("Ray", "/v1/models/{model:path}"),
    *_routes("vLLM", "/score /v2/rerank /docs"),
    *_routes("llama.cpp", "/rerank"),
    *_routes("vLLM", "/v2/embed", "/v1/embeddings and /embed"),
    *_routes("SGLang", "/encode", "/v1/embeddings and /embed"),
    *_routes("SGLang", "/v1/tokenize /v1/detokenize", "/tokenize and /detokenize"),
    *_routes("vLLM", "/generative_scoring", "/v1/score with a cross-encoder; `LLM.score` for texts"),
    *_routes("vLLM SGLang", "/v1/decisions /v1/systemone", "`choice` on /v1/completions, and its log-probabilities"),
    *_routes("vLLM", "/v1/chat/completions/batch", "`bridle run-batch` answers files of requests"),
    *_routes("vLLM", "/inference/v1/abort_requests", _LEAVES),
    *_routes("vLLM", "/inference/v1/generate", "/v1/completions takes token ids; /generate streams them"),
    *_routes(
        "vLLM",
        "/v1/chat/completions/render /v1/chat/completions/derender /v1/completions/render /v1/completions/derender "
        "/v1/messages/render /v1/responses/render /cohere/v2/chat/render",
        "/chat_tokenize and /tokenize give the tokens",
    ),
    *_routes("vLLM", "/cohere/v2/chat", "/v1/chat/completions"),
    *_routes("vLLM SGLang", "/v1/responses/{response_id}/cancel", "a client that leaves ends its request"),
    *_routes("vLLM SGLang", "/v1/realtime", TEXT),
    *_routes("vLLM", "/v1/audio/translations", _HEARD),
    *_routes("SGLang llama.cpp", "/v1/audio/transcriptions", _HEARD),
    *_routes("llama.cpp", "/audio/transcriptions", _HEARD),
    *_routes(
        "llama.cpp",
        "/chat/completions /completions /embedding /embeddings /models /responses /reranking /v1/reranking /v1/health "
        "/models/load /models/unload",
        "use the path with or without /v1: /v1/chat/completions, /v1/models/load, /health",
    ),
    *_routes(
        "llama.cpp",
        "/chat/completions/input_tokens /v1/chat/completions/input_tokens /responses/input_tokens "
        "/v1/responses/input_tokens",
        "/chat_tokenize and /v1/messages/count_tokens count",
    ),
    *_routes("llama.cpp", "/models/sse", "/v1/status says what is loaded"),
    *_routes("llama.cpp", "/v1/chat/completions/control", "`thinking_budget` limits reasoning in advance"),
    *_routes(
        "llama.cpp",
        "/v1/stream /v1/streams/lookup",
        "a stream is one connection; send the request again, its prefix is cached",
    ),
    *_routes("llama.cpp", "/slots/:id_slot", "/v1/status and `bridle top` show what runs"),
    *_routes("llama.cpp", "/lora-adapters", "/v1/adapters; a request names its `adapter`"),
    *_routes("llama.cpp", "/tools /cors-proxy", "tools are the operator's: --tools FILE (docs/tools.md)"),
    *_routes("vLLM SGLang", "/server_info", "/info says it"),
    *_routes("vLLM", "/tokenizer_info", "/info says it"),
    *_routes("SGLang", "/get_server_info /model_info", "/info says it"),
    *_routes("vLLM", "/load", "/v1/status and /metrics have this information"),
    *_routes("SGLang", "/v1/loads", "/v1/status and /metrics have this information"),
    *_routes("vLLM SGLang", "/ready", "/health/ready"),
    *_routes("vLLM", "/readyz", "/health/ready"),
    *_routes("SGLang", "/health_generate", "/health/ready"),
    *_routes(
        "TGI",
        "/v2 /v2/health/live /v2/health/ready /v2/models/:model_name/versions/:model_version "
        "/v2/models/:model_name/versions/:model_version/infer /v2/models/:model_name/versions/:model_version/ready",
        "KServe's own protocol is not supported; /health/ready and /generate are",
    ),
    *_routes("TGI", "/vertex", "/predict and /invocations are here, /generate everywhere"),
    *_routes("SGLang", "/load_lora_adapter /unload_lora_adapter", "/v1/load_lora_adapter and /v1/unload_lora_adapter"),
    *_routes("SGLang", "/load_lora_adapter_from_tensors", "adapters are read from folders and the hub"),
    *_routes(
        "SGLang", "/parse_function_call /separate_reasoning", "/v1/chat/completions separates calls and reasoning"
    ),
    *_routes("SGLang", "/open_session /close_session", "send the whole conversation: its KV is found again"),
    *_routes("SGLang", "/abort_request /slow_down", _LEAVES),
    *_routes("vLLM", "/abort_requests", _LEAVES),
    *_routes("SGLang", "/pause_generation /continue_generation", _PAUSES),
    *_routes("vLLM", "/pause /resume /is_paused", _PAUSES),
    *_routes("vLLM", "/sleep /wake_up /is_sleeping /release_kv_cache_memory", "/v1/models/unload and /v1/models/load"),
    *_routes("SGLang", "/release_memory_occupation /resume_memory_occupation", "/v1/models/unload and /v1/models/load"),
    *_routes("vLLM", "/reset_prefix_cache /reset_mm_cache /reset_encoder_cache /kv_event_sources", _DROPPED),
    *_routes(
        "SGLang",
        "/hicache/storage-backend /hicache/storage-backend/clear /get_hicache_l3_cache_layout /freeze_gc",
        _DROPPED,
    ),
    *_routes("vLLM SGLang", "/start_profile /stop_profile", _LOOK),
    *_routes("vLLM", "/collective_rpc", _LOOK),
    *_routes(
        "SGLang",
        "/configure_logging /set_trace_level /dumper/{method} /set_internal_state "
        "/start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record",
        _LOOK,
    ),
    *_routes("vLLM", "/fault_tolerance/apply /fault_tolerance/status /get_world_size", _REPLACED),
    *_routes("vLLM SGLang", "/is_scaling_elastic_ep /scale_elastic_ep", _REPLACED),
    *_routes(
        "SGLang",
        "/pd_role_switch /register_transfer_engine_info /get_transfer_engine_info "
        "/remote_instance_transfer_engine_info /get_remote_instance_transfer_engine_info",
        _REPLACED,
    ),
    *_routes(
        "SGLang",
        "/begin_weight_update /end_weight_update /update_weights_from_disk /update_weights_from_distributed "
        "/update_weights_from_ipc /update_weights_from_tensor /init_weights_update_group "
        "/destroy_weights_update_group /init_weights_send_group_for_remote_instance "
        "/send_weights_to_remote_instance /get_weights_by_name /weights_checker",
        _WEIGHTS,
    ),
    *_routes(
        "vLLM",
        "/start_weight_update /finish_weight_update /start_draft_weight_update /update_weights "
        "/init_weight_transfer_engine /shutdown_weight_transfer_engine /weight_info /weight_checker",
        _WEIGHTS,
    ),
    *_routes("vLLM SGLang", "/update_weight_version", _WEIGHTS),
    *_routes(
        "SGLang",
        "/add_external_corpus /list_external_corpora /remove_external_corpus",
        "drafts come from the text itself or a smaller model",
    ),
    *_routes("AICI", "/v1/run /v1/controllers /v1/controllers/tags /v1/models /v1/completions"),
    *_routes("AICI", "/ws-http-tunnel/info", "requests are plain HTTP"),
    *_routes("OpenAI", "/v1/chat/completions /v1/completions /v1/embeddings /v1/models"),
    *_routes("OpenAI", "/v1/responses /v1/responses/{response_id}"),
    *_routes("OpenAI", "/v1/batches /v1/batches/{batch_id} /v1/batches/{batch_id}/cancel"),
    *_routes("OpenAI", "/v1/conversations /v1/conversations/{conversation_id}"),
    *_routes("OpenAI", "/v1/conversations/{conversation_id}/items"),
    *_routes("OpenAI", "/v1/conversations/{conversation_id}/items/{item_id}"),
    *_routes("OpenAI", "/v1/files /v1/files/{file_id} /v1/files/{file_id}/content"),
    *_routes("OpenAI", "/v1/audio/speech", TEXT),
    *_routes("OpenAI", "/v1/audio/transcriptions /v1/audio/translations", _HEARD),
    *_routes("OpenAI", "/v1/images/generations", TEXT),
    *_routes("OpenAI", "/v1/moderations", JUDGED),
    *_routes("Anthropic", "/v1/messages /v1/messages/count_tokens /v1/models"),
    *_routes("Anthropic", "/v1/messages/batches", "`bridle run-batch` answers files of requests"),
    *_routes("Anthropic", "/v1/complete", "/v1/messages and /v1/completions"),
)
