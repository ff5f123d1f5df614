"""Request fields of OpenAI and Anthropic that concern only their own services, and fields of nested objects in
requests.

A name with a dot is a field of a nested object: `text.verbosity` is sent as `{"text": {"verbosity": ...}}`.
"""

from __future__ import annotations

from bridle.compat.schema import CompatField, absent, neutral, same

#: Features that no model has in bridle.
TEXT = "models here read text, images, sounds and videos, and write text"
JUDGED = "no model moderates texts; docs/policies.md has the operator's policies"
_EFFORT = "`reasoning.effort` sets the amount of reasoning"
_KEPT = "messages are not stored: send the whole conversation"
_MEMORY = "clients keep their conversations themselves"
_WHOLE = "reasoning is returned in full"

VENDORS: tuple[CompatField, ...] = (
    *same("OpenAI", "conversation dimensions encoding_format", dimensions=8, encoding_format="base64"),
    *same("OpenAI", "prediction", prediction={"type": "content", "content": "x"}),
    *same("OpenAI", "stream_options.include_usage text.format reasoning.effort"),
    *same("Anthropic", "output_config.format output_config.effort thinking.type thinking.budget_tokens"),
    # Fields that would change the output.
    absent("OpenAI", "verbosity", "models do not know it; ask for it in a message", "low", ("medium",)),
    absent("OpenAI", "text.verbosity", "models do not know it; ask for it in a message", "low", ("medium",)),
    absent("OpenAI", "reasoning.mode", _EFFORT, "pro", ("standard",)),
    absent(
        "OpenAI",
        "reasoning.context",
        "the checkpoint's template decides which reasoning of earlier turns it shows",
        "all_turns",
        ("auto",),
    ),
    absent("OpenAI vLLM SGLang TGI", "suffix", "fill-in-the-middle is only on Ollama's /api/generate", "x"),
    absent("OpenAI", "functions", "send them as `tools`", [{"name": "f"}]),
    absent("OpenAI", "function_call", "send it as `tool_choice`", "auto"),
    absent("OpenAI", "audio", TEXT, {"voice": "ash"}),
    absent("OpenAI", "web_search_options", "this server does not search the web; offer a tool that does", {}),
    absent("OpenAI", "moderation", JUDGED, {"model": "x"}),
    absent(
        "Anthropic",
        "mcp_servers",
        "the server does not call servers that a request names; offer their tools in `tools`",
        [{"url": "x"}],
    ),
    absent("Anthropic", "container", "this server runs no code for models", "x"),
    absent("Anthropic", "compaction", "a message can ask for a summary", {"type": "enabled"}),
    absent("Anthropic", "thread", _KEPT, {"type": "create"}),
    absent("Anthropic", "output_config.task_budget", "`max_tokens` and `thinking` bound each answer", {"total": 9}),
    # Fields that do not change the output.
    *(
        neutral("OpenAI", name, why, value)
        for name, why, value in (
            ("user", "API keys identify users", "me"),
            ("safety_identifier", "API keys identify users", "me"),
            ("metadata", "nothing is kept", {"a": "b"}),
            ("store", "chats are not stored; responses of `/v1/responses` are", True),
            ("service_tier", "`priority` is here", "auto"),
            ("prompt_cache_key", "prefixes are always cached", "x"),
            ("prompt_cache_retention", "prefixes are cached while there is room", "24h"),
            ("include", "reasoning is always included; log-probabilities are those of the other routes", ["x"]),
            ("models", "only the model in `model` answers", ["x"]),
            ("max_tool_calls", "it limits only OpenAI's built-in tools", 3),
            ("access_programs", "there are none: every user with a key may send requests", {"cyber": "standard"}),
            ("background_options", "an answer is computed while its client waits", {"completion_window": "soonest"}),
            ("image", "the checkpoint decides how images are prepared", {"context_compression": "auto"}),
            ("reasoning.summary", _WHOLE, "auto"),
            ("reasoning.generate_summary", _WHOLE, "auto"),
            ("stream_options.include_obfuscation", "events are not padded", True),
        )
    ),
    *(
        neutral("Anthropic", name, why, value)
        for name, why, value in (
            ("betas", "nothing has to be turned on", ["x"]),
            ("billing_policy", "nothing is billed", {"bill_to": "self"}),
            ("cache_control", "prefixes are always cached", {"type": "ephemeral"}),
            ("diagnostics", "`usage` has the number of cached tokens", {"previous_message_id": "x"}),
            ("fallback_credit_token", "nothing is billed", "x"),
            ("fallbacks", "only the model in `model` answers", "default"),
            ("inference_geo", "a model answers where its server is", "eu"),
            ("speed", "it does not change the output", "fast"),
            ("thinking.block_binding", "reasoning that is sent back is used unchanged", {"on_failure": "drop"}),
            ("thinking.display", _WHOLE, "omitted"),
            ("user_profile_id", "API keys identify users", "x"),
            ("workspace_id", "API keys identify users", "x"),
        )
    ),
    neutral("OpenAI Anthropic", "context_management", _MEMORY, {"edits": []}),
)
