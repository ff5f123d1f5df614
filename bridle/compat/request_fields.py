"""Fields of requests in other systems, and their equivalents in bridle.

If a route has its own field of the same name, that field has precedence over this table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bridle.compat.request_fields_new import NEWER, SHARED
from bridle.compat.schema import CompatField, absent, named, neutral, optional, same, systems_of
from bridle.compat.vendor_fields import TEXT, VENDORS

_CONTROLLER = "`controller` names a sandboxed program or an operator's class, which decides about each token"
_SAMPLER = "this server has no such sampler; docs/sampling.md lists the server's samplers"
_TOP = "send the entries of this object as top-level fields of the body, next to `model`"
_ORDER = "the order of samplers is fixed: penalties, temperature, then filters"
_WEBUI = "text-generation-webui"
_BEAMS = "beam search works on /v1/completions and /v1/chat/completions, in batch files and with `LLM.beam_search`"
_BEAMS_BY_NAME = "set `use_beam_search` and `best_of` (beams) on /v1/completions or /v1/chat/completions"
_SPEED = "this field does not change the output"


def _reasoning(thinking: Any) -> Any:
    """Convert Anthropic's `thinking`, or a boolean, to a value for bridle's field `reasoning`. Values of other types
    are returned unchanged, and refused by the field `reasoning`."""
    if not isinstance(thinking, dict):
        return {"enabled": thinking}
    kinds = {"enabled": True, "adaptive": True, "disabled": False}
    kind = str(thinking.get("type"))
    return {"enabled": kinds.get(kind, kind), "max_tokens": thinking.get("budget_tokens")}


def _banned_tokens(ids: Any) -> Any:
    """Convert a text with token ids to pairs for `logit_bias`. Invalid ids are passed on, and `logit_bias` refuses
    them."""
    if not isinstance(ids, str):
        return ids
    return [[int(each) if each.strip().isdecimal() else each, False] for each in ids.split(",") if each.strip()]


_FIELDS: tuple[CompatField, ...] = (
    # Fields of several systems.
    *same("OpenAI vLLM SGLang", "model stream stream_options n max_tokens top_p", n=2),
    *same("OpenAI vLLM SGLang", "seed stop logit_bias response_format", seed=7, stop=["x"]),
    *same("SGLang", "temperature presence_penalty frequency_penalty"),
    *same("OpenAI vLLM SGLang", "echo best_of logprobs top_logprobs max_completion_tokens"),
    *same("OpenAI vLLM SGLang", "tools tool_choice parallel_tool_calls reasoning_effort"),
    optional("OpenAI vLLM SGLang", "prompt", "x", (), "only on /v1/completions; /generate has `inputs` or `text`"),
    optional("OpenAI vLLM SGLang", "messages", [{"role": "user"}], (), "only on /v1/chat/completions and /v1/messages"),
    optional("OpenAI vLLM SGLang", "input", "x", (), "only on /v1/responses and /v1/embeddings"),
    *same("vLLM SGLang llama.cpp", "top_k min_p chat_template_kwargs"),
    *same("vLLM SGLang", "stop_token_ids ignore_eos skip_special_tokens repetition_penalty", stop_token_ids=[1]),
    *same("vLLM", "min_tokens include_stop_str_in_output structured_outputs guided_json guided_regex guided_choice"),
    *same("vLLM", "guided_grammar priority bad_words truncate_prompt_tokens add_special_tokens"),
    *same("vLLM SGLang", "continue_final_message"),
    *same("vLLM", "add_generation_prompt"),
    *same("vLLM", "allowed_token_ids prompt_logprobs", allowed_token_ids=[1], prompt_logprobs=1),
    *same("SGLang", "regex ebnf json_schema"),
    *same("llama.cpp", "grammar json_schema typical_p ignore_eos temperature top_p seed stop stream logit_bias"),
    *same("llama.cpp", "presence_penalty frequency_penalty prompt messages tools tool_choice response_format"),
    *same("TGI", "best_of frequency_penalty grammar repetition_penalty seed stop temperature top_k top_p"),
    *same("TGI", "typical_p watermark inputs parameters"),
    *same(_WEBUI, "temperature top_p top_k min_p typical_p presence_penalty frequency_penalty repetition_penalty seed"),
    *same(_WEBUI, "stop stream max_tokens n logit_bias logprobs echo prompt messages model tools tool_choice"),
    *same(_WEBUI, "dynatemp_exponent xtc_threshold xtc_probability dry_multiplier dry_base dry_allowed_length"),
    *same(_WEBUI, "dry_sequence_breakers mirostat_tau mirostat_eta skip_special_tokens top_n_sigma"),
    *same("LMQL", "temperature max_tokens logit_bias top_logprobs"),
    *same("Anthropic", "system stop_sequences tool_choice output_config max_tokens messages"),
    *(
        CompatField(systems_of("OpenAI vLLM"), name, name, limits)
        for name, limits in (
            ("temperature", "the maximum is 100; for OpenAI and for vLLM from 0.26 on, it is 2"),
            ("presence_penalty", "the range is -100 to 100; for OpenAI and vLLM, it is -2 to 2"),
            ("frequency_penalty", "the range is -100 to 100; for OpenAI and vLLM, it is -2 to 2"),
        )
    ),
    # Other names.
    named(f"TGI SGLang {_WEBUI}", "max_new_tokens", "max_tokens", 3),
    named("SGLang TGI", "min_new_tokens", "min_tokens", 1),
    named("llama.cpp", "n_predict", "max_tokens", 3),
    named("llama.cpp", "repeat_penalty", "repetition_penalty", 1.2),
    named("llama.cpp", "n_cmpl", "n", 2),
    named("llama.cpp", "reasoning_budget", "thinking_budget", 8),
    named("vLLM", "guided_decoding", "structured_outputs", {"regex": "a"}),
    named("vLLM", "thinking_token_budget", "thinking_budget", 8),
    named("SGLang", "lora_path", "adapter", "an-adapter"),
    named("SGLang", "no_stop_trim", "include_stop_str_in_output", True),
    named("OpenAI", "max_output_tokens", "max_tokens", 3),
    # Hugging Face's clients send the fields of /generate to /v1/completions, too.
    named("TGI", "return_full_text", "echo", True, off=(False,)),
    named("TGI", "truncate", "truncate_prompt_tokens", 3),
    named("TGI", "adapter_id", "adapter", "an-adapter"),
    optional("TGI", "do_sample", False, (True,)),
    neutral("TGI", "details", "`usage` and `logprobs` have the details"),
    neutral("TGI", "decoder_input_details", "`prompt_logprobs` returns the prompt's log-probabilities"),
    neutral("TGI", "top_n_tokens", "`logprobs` sets the number of alternatives", 2),
    named(_WEBUI, "mirostat_mode", "mirostat", 2),
    named(_WEBUI, "grammar_string", "ebnf", 'root ::= "a"'),
    named(_WEBUI, "custom_token_bans", "logit_bias", "5,7", _banned_tokens),
    named(_WEBUI, "add_bos_token", "add_special_tokens", False),
    named(_WEBUI, "prompt_lookup_num_tokens", "speculate", 3),
    named(_WEBUI, "continue_", "continue_final_message", True),
    named("Anthropic SGLang", "thinking", "reasoning", {"type": "enabled", "budget_tokens": 8}, _reasoning),
    named(_WEBUI, "enable_thinking", "chat_template_kwargs", False, lambda value: {"enable_thinking": value}),
    # Fields that a controller replaces.
    absent("vLLM", "logits_processors", _CONTROLLER, ["x"]),
    absent("SGLang", "custom_logit_processor", _CONTROLLER, "x"),
    absent("SGLang", "custom_params", _CONTROLLER, {"a": 1}),
    absent("vLLM", "vllm_xargs", _CONTROLLER, {"a": 1}),
    absent("SGLang", "stop_regex", "use a `regex` constraint that ends the text, or strings in `stop`", "x"),
    absent("SGLang", "session_params", "send the whole conversation; the prefix cache keeps its KV", {"id": "1"}),
    # Samplers.
    optional("vLLM TGI", "use_beam_search", True, (False,), _BEAMS),
    optional(f"vLLM TGI {_WEBUI}", "length_penalty", 1.2, (1, 1.0), _BEAMS),
    optional(f"vLLM TGI {_WEBUI}", "early_stopping", True, (False,), _BEAMS),
    absent(f"TGI {_WEBUI}", "num_beams", _BEAMS_BY_NAME, 4, (1,)),
    absent(f"TGI {_WEBUI}", "no_repeat_ngram_size", _SAMPLER, 3, (0,)),
    named("llama.cpp", "banned_strings", "banned_phrases", ["x"]),
    *same(
        "llama.cpp", "dynatemp_range dynatemp_exponent dry_multiplier dry_base dry_allowed_length dry_penalty_last_n"
    ),
    *same("llama.cpp", "dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta"),
    *same("llama.cpp", "top_n_sigma"),
    absent("llama.cpp", "tfs_z", _SAMPLER, 0.9, (1, 1.0)),
    absent(f"llama.cpp {_WEBUI}", "top_a", _SAMPLER, 0.2, (0,)),
    absent("llama.cpp", "adaptive_target", _SAMPLER, 0.5, (-1, 0)),
    neutral("llama.cpp", "adaptive_decay", "bridle does not have the sampler adaptive-p, which it controls", 0.9),
    absent(_WEBUI, "tfs", _SAMPLER, 0.9, (1, 1.0)),
    absent(_WEBUI, "epsilon_cutoff", _SAMPLER, 3, (0,)),
    absent(_WEBUI, "eta_cutoff", _SAMPLER, 3, (0,)),
    absent(_WEBUI, "smoothing_factor", _SAMPLER, 0.2, (0,)),
    absent(_WEBUI, "smoothing_curve", _SAMPLER, 2, (1, 1.0)),
    absent(_WEBUI, "encoder_repetition_penalty", _SAMPLER, 1.1, (1, 1.0)),
    absent(_WEBUI, "penalty_alpha", _SAMPLER, 0.6, (0,)),
    absent(_WEBUI, "guidance_scale", _SAMPLER, 1.5, (1, 1.0)),
    absent(_WEBUI, "negative_prompt", _SAMPLER, "x"),
    absent(_WEBUI, "dynamic_temperature", "`dynatemp_range` is the distance above and below `temperature`"),
    absent(_WEBUI, "dynatemp_low", "`dynatemp_range` is the distance above and below `temperature`", 0.5, (1, 1.0)),
    absent(_WEBUI, "dynatemp_high", "`dynatemp_range` is the distance above and below `temperature`", 1.5, (1, 1.0)),
    absent(_WEBUI, "temperature_last", _ORDER),
    absent(_WEBUI, "sampler_priority", _ORDER, ["top_k"]),
    absent(_WEBUI, "repetition_penalty_range", "penalties always apply to the whole text", 1024, (0, -1)),
    absent(_WEBUI, "do_sample", "set `temperature` to 0 for greedy sampling", False, (True,)),
    absent(_WEBUI, "ban_eos_token", "set `min_tokens` to prevent an early end"),
    absent(_WEBUI, "truncation_length", "set `truncate_prompt_tokens` to truncate a prompt", 2048, (0,)),
    absent(_WEBUI, "auto_max_new_tokens", "a chat without `max_tokens` may continue up to the end of the context"),
    absent(_WEBUI, "preset", "this server has no presets; send the sampling fields themselves", "min_p"),
    absent(_WEBUI, "mode", "the checkpoint's chat template formats conversations", "chat", ("instruct",)),
    absent(_WEBUI, "character", "describe the character in a `system` message", "x"),
    absent(_WEBUI, "context", "describe the character in a `system` message", "x"),
    *(
        absent(_WEBUI, name, "the server uses the checkpoint's own chat template", "x")
        for name in ("instruction_template", "instruction_template_str", "chat_template_str", "chat_instruct_command")
    ),
    *(
        absent(_WEBUI, name, "the checkpoint's chat template names the roles", "x")
        for name in ("bot_name", "user_name", "name1", "name2", "greeting")
    ),
    neutral(_WEBUI, "max_tokens_second", _SPEED, 5),
    neutral(_WEBUI, "static_cache", _SPEED),
    absent("llama.cpp", "samplers", _ORDER, ["top_k"]),
    absent("llama.cpp", "min_keep", "`top_p` and the other filters always keep at least one token", 2, (0, 1)),
    absent("llama.cpp", "repeat_last_n", "penalties always apply to the whole text", 64, (-1,)),
    absent("llama.cpp", "penalize_nl", "penalties also apply to newlines", True),
    absent("llama.cpp", "t_max_predict_ms", "set `deadline`, the seconds for the whole request", 500, (0, -1)),
    absent("llama.cpp", "n_indent", "a `regex` constraint can enforce an indentation", 2, (0,)),
    absent("llama.cpp", "n_keep", "the server refuses a prompt that does not fit the context", 5, (0,)),
    absent("llama.cpp", "n_discard", "the server refuses a prompt that does not fit the context", 5, (0,)),
    absent("llama.cpp", "input_prefix", "write this text into the prompt", "x"),
    absent("llama.cpp", "input_suffix", "write this text into the prompt", "x"),
    absent("llama.cpp", "input_extra", "write the text of these files into the prompt", ["x"]),
    absent("llama.cpp", "lora", "name one adapter in `adapter`; a request cannot mix adapters", [{"id": 0}]),
    # Prompts and templates.
    absent(
        "vLLM SGLang",
        "chat_template",
        "only Python's `LLM.chat` accepts another chat template than the checkpoint's",
        "{{ x }}",
    ),
    absent("vLLM", "documents", "pass documents to the chat template in `chat_template_kwargs`", [{"text": "x"}]),
    absent("vLLM", "guided_whitespace_pattern", "set `whitespace` in `constraint` to fixed or flexible", "x"),
    absent(
        "vLLM", "spaces_between_special_tokens", "the tokenizer places spaces between special tokens", False, (True,)
    ),
    absent("vLLM", "prompt_embeds", TEXT, "x"),
    absent("llama.cpp", "image_data", "send images as parts of messages, of the type `image_url`", ["x"]),
    absent("SGLang", "input_embeds", TEXT, ["x"]),
    # Bodies of other shapes.
    absent("SGLang", "sampling_params", _TOP, {"regex": "a"}),
    absent("SGLang", "text", "the prompt is `prompt` here; /generate takes SGLang's body", "Say"),
    absent("SGLang", "input_ids", "`prompt` takes token ids; /generate takes SGLang's body", [1]),
    absent("SGLang", "audio_data", "send sounds as parts of messages, of the type `input_audio`", "x"),
    absent("SGLang", "video_data", "send videos as parts of messages, of the type `video_url`", "x"),
    absent("SGLang", "positional_embed_overrides", TEXT, {"a": 1}),
    absent("SGLang", "max_thinking_tokens", "set `thinking_budget` in a chat", 8),
    absent("SGLang", "require_reasoning", "the chat template decides about reasoning; set `chat_template_kwargs`"),
    absent("SGLang", "token_ids_logprob", "set `logprobs`, the number of most probable tokens", [1]),
    absent("OpenAI", "extra_body", _TOP + " (OpenAI's clients do this themselves)", {"regex": "a"}),
    absent("llama.cpp", "options", _TOP, {"a": 1}),
    # Fields that do not change the output.
    neutral("vLLM", "cache_salt", "only requests of the same user share cached prompts", "x"),
    neutral("vLLM", "request_id", "send the header `x-request-id` instead", "x"),
    neutral("vLLM", "return_token_ids", "log-probabilities contain each token"),
    neutral("vLLM", "return_tokens_as_token_ids", "log-probabilities contain each token"),
    neutral("vLLM", "kv_transfer_params", _SPEED, {"a": 1}),
    neutral("vLLM", "mm_processor_kwargs", "the checkpoint determines the preprocessing of images", {"a": 1}),
    neutral("vLLM", "guided_decoding_backend", "llguidance is the only grammar backend", "xgrammar"),
    neutral("vLLM SGLang", "include_reasoning", "the server always returns reasoning in a separate field"),
    neutral("SGLang", "separate_reasoning", "the server always returns reasoning in a separate field"),
    neutral("SGLang", "stream_reasoning", "the server streams reasoning like the rest of the answer"),
    neutral("SGLang", "rid", "send the header `x-request-id` instead", "x"),
    neutral("SGLang", "return_hidden_states", "/v1/embeddings returns the last hidden state"),
    neutral("SGLang", "return_logprob", "set `logprobs` instead"),
    neutral("SGLang", "top_logprobs_num", "`logprobs` sets the number of alternatives", 2),
    neutral("SGLang", "logprob_start_len", "`echo` returns log-probabilities of the prompt", 3),
    *(
        neutral("SGLang", name, _SPEED, 1)
        for name in ("bootstrap_room", "bootstrap_host", "bootstrap_port", "routed_dp_rank", "data_parallel_rank")
    ),
    neutral("SGLang", "return_text_in_logprobs", "log-probabilities always contain the tokens' texts"),
    neutral("SGLang", "log_metrics", "/metrics counts all requests"),
    neutral("SGLang", "no_logs", "the server never logs the text of a request"),
    neutral("SGLang", "conversation_id", "the server always caches prompt prefixes", "x"),
    neutral("SGLang", "session_id", "the server always caches prompt prefixes", "x"),
    neutral("SGLang", "extra_key", "only requests of the same user share cached prompts", "x"),
    neutral("SGLang", "return_prompt_token_ids", "/tokenize returns the token ids of a prompt"),
    neutral("SGLang", "custom_labels", "only the operator sets labels of metrics", {"a": "b"}),
    neutral("llama.cpp", "n_probs", "set the number of alternatives in `logprobs` or `top_logprobs`", 2),
    neutral("llama.cpp", "cache_prompt", "the server always caches prompt prefixes"),
    neutral("llama.cpp", "id_slot", "the engine assigns requests to its batch automatically", 1),
    neutral("llama.cpp", "timings_per_token", "`usage` has token counts, and `/metrics` has times"),
    neutral("llama.cpp", "return_progress", "`usage` has token counts, and `/metrics` has times"),
    neutral("llama.cpp", "return_tokens", "log-probabilities contain each token"),
    neutral("llama.cpp", "post_sampling_probs", "log-probabilities are computed before sampling filters"),
    neutral("llama.cpp", "response_fields", "answers always have all of their fields", ["content"]),
    neutral("llama.cpp", "reasoning_format", "the server always returns reasoning in a separate field", "deepseek"),
    neutral("llama.cpp", "parse_tool_calls", "the server always separates tool calls from the text"),
)


def _shared() -> list[CompatField]:
    """Return table rows for fields that a system shares, in name and meaning, with another system that has a row."""
    first = {row.name: row for row in (*VENDORS[::-1], *NEWER[::-1], *_FIELDS[::-1])}
    return [replace(first[name], systems=systems_of(systems)) for systems, names in SHARED for name in names.split()]


FIELDS: tuple[CompatField, ...] = (*_FIELDS, *NEWER, *VENDORS, *_shared())


def _by_name() -> dict[str, CompatField]:
    """Return a table row for each field name. If systems have different rows for a name, a row with an equivalent in
    bridle has precedence."""
    found: dict[str, CompatField] = {}
    for row in FIELDS:
        known = found.get(row.name)
        if known is None or (known.here == known.name and row.here != row.name and row.here):
            found[row.name] = row
    return found


BY_NAME = _by_name()
