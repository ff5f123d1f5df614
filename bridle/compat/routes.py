"""Routes of other servers, and their equivalents in bridle.

The table does not say which routes exist in bridle, because the server's application has that list.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridle.compat.schema import System, systems_of
from bridle.compat.vendor_fields import JUDGED, TEXT

_HEARD = "send a chat with an `input_audio` part to a model that reads sound"

_DROPPED = "the server drops cached KV when it needs the memory"
_LEAVES = "a client that disconnects ends its request; no route ends other requests"
_PAUSES = "use /v1/pause and /v1/resume"
_LOOK = "use traces of requests, /metrics or `bridle top`, which show the work of the server"
_REPLACED = "the server starts and replaces replicas and shards; Ray Serve scales them"
_WEIGHTS = "the weights of a loaded model cannot change; load the new weights under another name"


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
    Route(("vLLM",), "/pooling", "/v1/embeddings returns pooled vectors, and /v1/classify returns logits"),
    Route(("vLLM", "Ray"), "/v1/audio/transcriptions", _HEARD),
    Route(("SGLang", "TGI"), "/generate"),
    Route(("vLLM",), "/generate", but="but with the bodies of SGLang and TGI; vLLM's `prompt` is for /v1/completions"),
    Route(("SGLang",), "/flush_cache", "the server drops cached prefixes when it needs the memory"),
    Route(("SGLang",), "/get_model_info", "use /info or /v1/models, which return this information"),
    Route(("llama.cpp",), "/completion", "use /v1/completions, which accepts the fields of /completion"),
    Route(("llama.cpp",), "/infill", "only Ollama's route /api/generate supports fill-in-the-middle"),
    Route(("llama.cpp",), "/props", "use /info, which returns this information"),
    Route(("llama.cpp",), "/slots", "use /v1/status or `bridle top`, which show the running requests"),
    Route(("llama.cpp",), "/apply-template", "use /chat_tokenize, which returns the prompt's tokens"),
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
    *_routes("vLLM", "/v2/embed", "use /v1/embeddings or /embed"),
    *_routes("SGLang", "/encode", "use /v1/embeddings or /embed"),
    *_routes("SGLang", "/v1/tokenize /v1/detokenize", "use /tokenize and /detokenize"),
    *_routes("vLLM", "/generative_scoring", "use /v1/score (cross-encoders) or `LLM.score` (log-probabilities)"),
    *_routes("vLLM SGLang", "/v1/decisions /v1/systemone", "use `choice` on /v1/completions, with log-probabilities"),
    *_routes("vLLM", "/v1/chat/completions/batch", "use `bridle run-batch`, which answers files of requests"),
    *_routes("vLLM", "/inference/v1/abort_requests", _LEAVES),
    *_routes("vLLM", "/inference/v1/generate", "/v1/completions accepts token ids, and /generate streams token ids"),
    *_routes(
        "vLLM",
        "/v1/chat/completions/render /v1/chat/completions/derender /v1/completions/render /v1/completions/derender "
        "/v1/messages/render /v1/responses/render /cohere/v2/chat/render",
        "use /chat_tokenize or /tokenize, which return the prompt's tokens",
    ),
    *_routes("vLLM", "/cohere/v2/chat", "use /v1/chat/completions"),
    *_routes("vLLM SGLang", "/v1/responses/{response_id}/cancel", "a client ends its request by disconnecting"),
    *_routes("vLLM SGLang", "/v1/realtime", TEXT),
    *_routes("vLLM", "/v1/audio/translations", _HEARD),
    *_routes("SGLang llama.cpp", "/v1/audio/transcriptions", _HEARD),
    *_routes("llama.cpp", "/audio/transcriptions", _HEARD),
    *_routes(
        "llama.cpp",
        "/chat/completions /completions /embedding /embeddings /models /responses /reranking /v1/reranking /v1/health "
        "/models/load /models/unload",
        "the path exists with or without /v1 in bridle: /v1/chat/completions, /v1/models/load, /health",
    ),
    *_routes(
        "llama.cpp",
        "/chat/completions/input_tokens /v1/chat/completions/input_tokens /responses/input_tokens "
        "/v1/responses/input_tokens",
        "use /chat_tokenize or /v1/messages/count_tokens, which count tokens",
    ),
    *_routes("llama.cpp", "/models/sse", "use /v1/status, which lists the loaded models"),
    *_routes("llama.cpp", "/v1/chat/completions/control", "`thinking_budget` limits reasoning in advance"),
    *_routes(
        "llama.cpp",
        "/v1/stream /v1/streams/lookup",
        "a stream cannot be resumed on a new connection; send the request again, because its prefix is cached",
    ),
    *_routes("llama.cpp", "/slots/:id_slot", "use /v1/status or `bridle top`, which show the running requests"),
    *_routes("llama.cpp", "/lora-adapters", "use /v1/adapters; a request names its adapter in `adapter`"),
    *_routes("llama.cpp", "/tools /cors-proxy", "only the operator adds tools, with --tools FILE (docs/tools.md)"),
    *_routes("vLLM SGLang", "/server_info", "use /info, which returns this information"),
    *_routes("vLLM", "/tokenizer_info", "use /info, which returns this information"),
    *_routes("SGLang", "/get_server_info /model_info", "use /info, which returns this information"),
    *_routes("vLLM", "/load", "use /v1/status or /metrics, which return this information"),
    *_routes("SGLang", "/v1/loads", "use /v1/status or /metrics, which return this information"),
    *_routes("vLLM SGLang", "/ready", "use /health/ready"),
    *_routes("vLLM", "/readyz", "use /health/ready"),
    *_routes("SGLang", "/health_generate", "use /health/ready"),
    *_routes(
        "TGI",
        "/v2 /v2/health/live /v2/health/ready /v2/models/:model_name/versions/:model_version "
        "/v2/models/:model_name/versions/:model_version/infer /v2/models/:model_name/versions/:model_version/ready",
        "KServe's own protocol is not supported; use /health/ready and /generate",
    ),
    *_routes("TGI", "/vertex", "use /predict, /invocations or /generate"),
    *_routes("SGLang", "/load_lora_adapter /unload_lora_adapter", "use the same path below /v1"),
    *_routes("SGLang", "/load_lora_adapter_from_tensors", "the server reads adapters only from folders and the hub"),
    *_routes(
        "SGLang", "/parse_function_call /separate_reasoning", "/v1/chat/completions separates calls and reasoning"
    ),
    *_routes("SGLang", "/open_session /close_session", "send the whole conversation; the prefix cache keeps its KV"),
    *_routes("SGLang", "/abort_request /slow_down", _LEAVES),
    *_routes("vLLM", "/abort_requests", _LEAVES),
    *_routes("SGLang", "/pause_generation /continue_generation", _PAUSES),
    *_routes("vLLM", "/pause /resume /is_paused", _PAUSES),
    *_routes("vLLM", "/sleep /wake_up /is_sleeping /release_kv_cache_memory", "use /v1/models/unload and /load"),
    *_routes("SGLang", "/release_memory_occupation /resume_memory_occupation", "use /v1/models/unload and /load"),
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
        "draft tokens come from the text itself or a smaller model",
    ),
    *_routes("AICI", "/v1/run /v1/controllers /v1/controllers/tags /v1/models /v1/completions"),
    *_routes("AICI", "/ws-http-tunnel/info", "clients send plain HTTP requests"),
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
    *_routes("Anthropic", "/v1/messages/batches", "use `bridle run-batch`, which answers files of requests"),
    *_routes("Anthropic", "/v1/complete", "use /v1/messages or /v1/completions"),
)
