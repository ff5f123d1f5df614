"""Request fields of OpenAI and Anthropic that concern only their own services, and fields of nested objects in
requests.

A name with a dot is a field of a nested object: `text.verbosity` is sent as `{"text": {"verbosity": ...}}`.
"""

from __future__ import annotations

from bridle.compat.schema import CompatField, absent, neutral, same

#: Features that no model has in bridle.
TEXT = "bridle's models read text, images, sounds and videos, and write only text"
JUDGED = "the server has no moderation model; docs/policies.md describes the operator's policies"
_EFFORT = "`reasoning.effort` sets the amount of reasoning"
_KEPT = "the server does not store messages; send the whole conversation"
_MEMORY = "the client stores and shortens its conversations itself"
_WHOLE = "the server always returns reasoning in full"

VENDORS: tuple[CompatField, ...] = (
    *same("OpenAI", "conversation dimensions encoding_format", dimensions=8, encoding_format="base64"),
    *same("OpenAI", "prediction", prediction={"type": "content", "content": "x"}),
    *same("OpenAI", "stream_options.include_usage text.format reasoning.effort"),
    *same("Anthropic", "output_config.format output_config.effort thinking.type thinking.budget_tokens"),
    # Fields that would change the output.
    absent("OpenAI", "verbosity", "models have no setting for verbosity; ask in a message", "low", ("medium",)),
    absent("OpenAI", "text.verbosity", "models have no setting for verbosity; ask in a message", "low", ("medium",)),
    absent("OpenAI", "reasoning.mode", _EFFORT, "pro", ("standard",)),
    absent(
        "OpenAI",
        "reasoning.context",
        "the checkpoint's chat template decides which reasoning of earlier turns the prompt contains",
        "all_turns",
        ("auto",),
    ),
    absent("OpenAI vLLM SGLang TGI", "suffix", "only Ollama's route /api/generate supports fill-in-the-middle", "x"),
    absent("OpenAI", "functions", "send functions as `tools`", [{"name": "f"}]),
    absent("OpenAI", "function_call", "send `tool_choice` instead", "auto"),
    absent("OpenAI", "audio", TEXT, {"voice": "ash"}),
    absent("OpenAI", "web_search_options", "this server does not search the web; offer a tool that searches", {}),
    absent("OpenAI", "moderation", JUDGED, {"model": "x"}),
    absent(
        "Anthropic",
        "mcp_servers",
        "the server does not call servers that a request names; offer their tools in `tools`",
        [{"url": "x"}],
    ),
    absent("Anthropic", "container", "this server runs no code that a model writes", "x"),
    absent("Anthropic", "compaction", "ask for a summary in a message", {"type": "enabled"}),
    absent("Anthropic", "thread", _KEPT, {"type": "create"}),
    absent("Anthropic", "output_config.task_budget", "`max_tokens` and `thinking` bound each answer", {"total": 9}),
    # Fields that do not change the output.
    *(
        neutral("OpenAI", name, why, value)
        for name, why, value in (
            ("user", "API keys identify users", "me"),
            ("safety_identifier", "API keys identify users", "me"),
            ("metadata", "the server does not store metadata", {"a": "b"}),
            ("store", "chats are not stored; responses of `/v1/responses` are", True),
            ("service_tier", "set `priority` instead", "auto"),
            ("prompt_cache_key", "the server always caches prompt prefixes", "x"),
            ("prompt_cache_retention", "the server keeps cached prefixes until it needs their memory", "24h"),
            ("include", "answers always include reasoning; other routes return log-probabilities", ["x"]),
            ("models", "only the model that `model` names answers the request", ["x"]),
            ("max_tool_calls", "it limits only OpenAI's built-in tools", 3),
            ("access_programs", "every user with a key may send requests", {"cyber": "standard"}),
            ("background_options", "the client must wait for the answer", {"completion_window": "soonest"}),
            ("image", "the checkpoint determines the preprocessing of images", {"context_compression": "auto"}),
            ("reasoning.summary", _WHOLE, "auto"),
            ("reasoning.generate_summary", _WHOLE, "auto"),
            ("stream_options.include_obfuscation", "the server does not pad events", True),
        )
    ),
    *(
        neutral("Anthropic", name, why, value)
        for name, why, value in (
            ("betas", "no feature of the server has to be turned on", ["x"]),
            ("billing_policy", "the server bills nothing", {"bill_to": "self"}),
            ("cache_control", "the server always caches prompt prefixes", {"type": "ephemeral"}),
            ("diagnostics", "`usage` has the number of cached tokens", {"previous_message_id": "x"}),
            ("fallback_credit_token", "the server bills nothing", "x"),
            ("fallbacks", "only the model that `model` names answers the request", "default"),
            ("inference_geo", "a model runs on the machines of its server", "eu"),
            ("speed", "this field does not change the output", "fast"),
            ("thinking.block_binding", "reasoning from clients is never changed", {"on_failure": "drop"}),
            ("thinking.display", _WHOLE, "omitted"),
            ("user_profile_id", "API keys identify users", "x"),
            ("workspace_id", "API keys identify users", "x"),
        )
    ),
    neutral("OpenAI Anthropic", "context_management", _MEMORY, {"edits": []}),
)
