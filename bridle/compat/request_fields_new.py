"""Equivalents in bridle of request fields that are new in other systems, or that few clients send."""

from __future__ import annotations

from bridle.compat.schema import CompatField, absent, named, neutral, optional, same

_SPEED = "this field does not change the output"
_WHOLE = "answers always have all of their fields"
_TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}
_PICTURES = "the checkpoint determines the preprocessing of images"

NEWER: tuple[CompatField, ...] = (
    *same("vLLM SGLang", "instructions previous_response_id reasoning"),
    optional("OpenAI vLLM SGLang", "background", False, (False,), "the client must wait for the answer"),
    optional("OpenAI vLLM SGLang", "truncation", "disabled", ("disabled",), "the server never drops input items"),
    optional("OpenAI SGLang", "modalities", ["text"], (["text"],), "answers always have the modality `text`"),
    named("vLLM SGLang", "structural_tag", "structured_outputs", _TAG, lambda value: {"structural_tag": value}),
    named("SGLang", "sampling_seed", "seed", 7),
    named("llama.cpp", "reasoning_budget_tokens", "thinking_budget", 8),
    named("llama.cpp", "reasoning_budget_message", "thinking_budget_message", "x"),
    # Fields that would change the output.
    absent("vLLM", "watermarking", "set `gamma` and `delta` in `watermark` instead"),
    absent(
        "vLLM",
        "repetition_detection",
        "a policy can end repetitive outputs; `dry_multiplier` makes repetition less likely",
        {"a": 1},
    ),
    absent("vLLM", "truncation_side", "`truncate_prompt_tokens` keeps a prompt's end", "right", ("left",)),
    absent("vLLM", "logprob_token_ids", "set `logprobs`, the number of most probable tokens", [1]),
    absent(
        "vLLM",
        "previous_input_messages",
        "name the earlier response in `previous_response_id`, or send the whole input",
        ["x"],
    ),
    absent("vLLM", "multi_modal_data", "send images as parts of messages, of the type `image_url`", {"image": "x"}),
    absent("vLLM", "mm_payload", "send images as parts of messages, of the type `image_url`", {"a": 1}),
    absent("vLLM", "trace_decode_token_ids", "`LLM.score` and `echo` return the log-probabilities of a text", [1]),
    absent("vLLM", "prompt_logprob_token_ids", "set `prompt_logprobs`, the number of most probable tokens", [[1]]),
    absent("vLLM", "prompt_logprob_start", "only Python has this setting: `prompt_logprobs_start` of `LLM`", 3, (0,)),
    absent("vLLM", "extra_args", "use `controller`, a program that decides about each token", {"a": 1}),
    absent(
        "SGLang",
        "beam_width",
        "set `use_beam_search` and `best_of` (beams) on /v1/completions or /v1/chat/completions",
        4,
        (0, 1),
    ),
    absent("SGLang", "lora_id", "name the adapter in `lora_path` or `adapter`", "x"),
    absent("SGLang", "multi_item_delimiter_indices", "send a list of texts to /v1/score", [1]),
    absent("SGLang", "token_indices_to_pool", "the model's folder decides which tokens are pooled", [1]),
    absent("SGLang", "task", "the checkpoint's chat template formats conversations", "x"),
    absent("SGLang", "use_audio_in_video", "the server reads only frames of a video; send its sound as another part"),
    absent("SGLang", "video_config", "the checkpoint determines the preprocessing of videos", {"a": 1}),
    absent("llama.cpp", "t_max_prompt_ms", "set `deadline`, the seconds for the whole request", 500, (0, -1)),
    absent("TGI", "tool_prompt", "the checkpoint's chat template formats the tools", "x"),
    # Fields that do not change the output.
    neutral("vLLM", "ec_transfer_params", _SPEED, {"a": 1}),
    neutral("vLLM", "enable_response_messages", _WHOLE),
    neutral("vLLM", "media_io_kwargs", _PICTURES, {"a": 1}),
    neutral("vLLM", "return_mm_kwargs", _PICTURES),
    neutral("vLLM", "prompt_cache_options", "the server always caches prompt prefixes", {"a": 1}),
    neutral("vLLM", "return_assistant_tokens_mask", "/chat_tokenize returns the tokens of a conversation"),
    neutral("vLLM", "return_prompt_text", "`echo` returns the prompt text on /v1/completions"),
    neutral("vLLM", "return_token_offsets", "/v1/completions returns token offsets in `logprobs`"),
    neutral("vLLM", "return_weight_versions", "each version of a model has its own name in bridle"),
    neutral("vLLM", "routed_experts_prompt_start", "answers do not name the experts that computed them", 3),
    neutral("vLLM SGLang", "stream_interval", "the server sends each token when it is generated", 3),
    neutral("vLLM", "detokenize", "the server always returns the text with its token ids", False),
    neutral("vLLM", "output_kind", "requests with `stream` get pieces of the text, other requests the whole text", 1),
    neutral("vLLM", "output_text_buffer_length", "text that may begin a stop string is held back automatically", 3),
    neutral("vLLM", "flat_logprobs", "log-probabilities have only one format"),
    neutral("vLLM", "skip_reading_prefix_cache", _SPEED),
    neutral("vLLM", "skip_clone", _SPEED),
    *(
        neutral("SGLang", name, _SPEED, "x")
        for name in ("bootstrap_pair_key", "encoder_urls", "kv_hints", "routing_key")
    ),
    *(neutral("SGLang", name, _SPEED, 1) for name in ("decode_tp_size", "disagg_prefill_dp_rank")),
    *(
        neutral("SGLang", name, _PICTURES, 2)
        for name in ("max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch")
    ),
    neutral("SGLang", "images_config", _PICTURES, {"a": 1}),
    neutral("SGLang", "mm_hashes", _PICTURES, ["x"]),
    neutral("SGLang", "mm_content_hashes", _PICTURES, ["x"]),
    *(
        neutral("SGLang", name, _WHOLE)
        for name in (
            "return_bytes",
            "return_cached_tokens_details",
            "return_spec_tokens_details",
            "return_meta_info",
            "return_input_ids_in_sglext",
            "return_output_ids_in_sglext",
            "return_entropy",
            "return_indexer_topk",
            "return_flat_raw_top_logprobs",
            "return_flat_raw_output_top_logprobs",
            "return_flat_raw_top_logprobs_b64",
        )
    ),
    neutral("SGLang", "return_routed_experts", "answers do not name the experts that computed them"),
    neutral("SGLang", "routed_experts_start_len", "answers do not name the experts that computed them", 3),
    neutral("SGLang", "return_sampling_mask", "the trace of a request shows which tokens were allowed"),
    neutral("SGLang", "sampling_logprobs_mode", "log-probabilities are computed before sampling filters", "x"),
    neutral("llama.cpp", "backend_sampling", _SPEED),
    neutral("llama.cpp", "n_cache_reuse", "the prefix cache finds blocks by their content", 3),
    neutral("llama.cpp", "grammar_type", "the server recognizes the notation of a grammar", "x"),
    neutral("llama.cpp", "reasoning_control", "`thinking_budget` limits the length of reasoning"),
    neutral("llama.cpp", "sse_ping_interval", "the operator sets the interval of pings with --ping-interval", 5),
    neutral("llama.cpp", "verbose", "`bridle explain` and traces show more details of a request"),
)
#: Names of fields that a system shares with another system, whose row is above or in `request_fields`.
SHARED = (
    ("OpenAI", "instructions previous_response_id prompt_cache_options reasoning text"),
    ("Anthropic", "metadata model service_tier stream tools"),
    ("vLLM SGLang", "user include metadata service_tier store max_tool_calls max_output_tokens"),
    ("vLLM", "prompt_cache_key prompt_cache_retention safety_identifier session_id text"),
    ("SGLang", "cache_salt image_data min_tokens mm_processor_kwargs priority request_id return_token_ids watermark"),
    ("SGLang", "spaces_between_special_tokens"),
    ("llama.cpp", "add_generation_prompt continue_final_message echo logprobs max_completion_tokens max_tokens n"),
    ("llama.cpp", "parallel_tool_calls reasoning_effort stream_options"),
    ("TGI", "logit_bias logprobs max_tokens messages model n presence_penalty prompt response_format stream"),
    ("TGI", "stream_options tool_choice tools top_logprobs"),
)
