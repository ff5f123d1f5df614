"""Names of guidance, outlines, LMQL and Ray's language model API, with their equivalents in bridle. The names are
functions, keywords, classes, and fields of settings."""

from __future__ import annotations

from bridle.compat.schema import LibrarySymbol, System
from bridle.compat.vendor_fields import TEXT
from dev.compat.programs import MEDIA

_PYTHON = "use Python itself: a program continues with the output's text"
_OVER_LMTP = "LMQL's own name works unchanged over LMTP"
_SERVE = "set Ray Serve's own `runtime_env` in the same file"


def words(system: System, names: str, why: str = "", **here: str) -> LibrarySymbol:
    """Return a row from two texts: the names of the other system, and their equivalents in bridle."""
    return LibrarySymbol(
        system, ", ".join(names.split()), why=why, **{kind: tuple(each.split()) for kind, each in here.items()}
    )


GUIDANCE: tuple[LibrarySymbol, ...] = (
    LibrarySymbol("guidance", "gen(regex=)", ("regex",)),
    LibrarySymbol("guidance", "gen(max_tokens=)", ("max_tokens",)),
    LibrarySymbol("guidance", "gen(stop=)", ("stop",)),
    LibrarySymbol(
        "guidance", "gen(stop_regex=)", ("stopping_criteria",), why="or use a regex that ends with this pattern"
    ),
    LibrarySymbol("guidance", "gen(temperature=), gen(top_p=), gen(n=)", ("temperature", "top_p", "n")),
    LibrarySymbol("guidance", "gen(suffix=)", ("constraint",), why="use `Concat` of the sampled part and the suffix"),
    LibrarySymbol(
        "guidance",
        "gen(tools=), gen(tool_choice=), gen(hide_tool_call=), Tool",
        (),
        ("chat",),
        why="pass the functions in `tools=`",
    ),
    LibrarySymbol(
        "guidance", "gen(name=), capture", (), ("session",), why="read the output's text; a script can store variables"
    ),
    LibrarySymbol("guidance", "gen(list_append=), gen(save_stop_text=), block", why=_PYTHON),
    LibrarySymbol("guidance", "gen, library", (), ("generate", "stream")),
    LibrarySymbol("guidance", "models, models.Model", exports=("LLM",)),
    words("guidance", "models.Transformers models.LlamaCpp", "the model may also be a hub id", exports="LLM"),
    words(
        "guidance",
        "models.OpenAI models.experimental.VLLMModel models.experimental.SglangModel models.experimental.LiteLLM",
        "`bridle serve` answers these clients, but they allow only one `+=` within an assistant's turn, "
        "with any server: write one `+=`, as in `lm += 'Answer: ' + gen()`",
        exports="LLM",
    ),
    words("guidance", "models.OnnxRuntimeGenAI", "bridle has only its own engine"),
    words(
        "guidance",
        "models.create_azure_openai_model models.create_azure_aifoundry_model",
        "these functions connect to services of other companies",
    ),
    LibrarySymbol("guidance", "models.Mock", exports=("testing",), why="its model returns scripted outputs"),
    LibrarySymbol("guidance", "select", ("choice",)),
    LibrarySymbol("guidance", "json", ("json_schema",), ("parse",)),
    LibrarySymbol("guidance", "regex", ("regex",)),
    LibrarySymbol("guidance", "lark", ("grammar",), exports=("Lark",)),
    LibrarySymbol("guidance", "gbnf_to_lark", ("grammar",), exports=("Gbnf",), why="bridle accepts GBNF unchanged"),
    LibrarySymbol("guidance", "substring", ("constraint",), exports=("Substring",)),
    LibrarySymbol(
        "guidance",
        "string, sequence",
        ("constraint",),
        exports=("Concat",),
        why="`Concat` also replaces `string + gen`",
    ),
    LibrarySymbol(
        "guidance", "optional, zero_or_more, one_or_more, at_most_n_repeats, exactly_n_repeats", ("regex", "grammar")
    ),
    LibrarySymbol(
        "guidance", "token_limit", ("max_tokens",), exports=("Branch",), why="use a controller for a part of the output"
    ),
    LibrarySymbol(
        "guidance",
        "with_temperature",
        ("temperature",),
        exports=("Branch.sampling",),
        why="use a controller for a part of the output",
    ),
    LibrarySymbol(
        "guidance",
        "special_token",
        exports=("Decision.splice",),
        why="force the token by its id; chat templates write their own special tokens",
    ),
    LibrarySymbol(
        "guidance", "guidance", ("controller",), why="write a controller for functions that decide during generation"
    ),
    LibrarySymbol("guidance", "role, system, user, assistant", (), ("chat", "session")),
    LibrarySymbol("guidance", "image", (), ("chat",), why="send images as parts of messages (docs/pictures.md)"),
    LibrarySymbol("guidance", "audio, video", (), ("chat",), why=MEDIA),
    LibrarySymbol("guidance", "gen_audio, gen_image, gen_video", why=TEXT),
)

OUTLINES: tuple[LibrarySymbol, ...] = (
    LibrarySymbol("outlines", "Generator, SteerableModel, BlackBoxModel, Model.__call__", (), ("parse",)),
    LibrarySymbol(
        "outlines",
        "types.Choice, types.either",
        ("choice",),
        ("parse",),
        why="`LLM.parse` also accepts `Literal` and `Enum`",
    ),
    LibrarySymbol("outlines", "regex, types.Regex", ("regex",), exports=("Regex",)),
    LibrarySymbol("outlines", "cfg, types.CFG", ("grammar",), exports=("Lark",)),
    LibrarySymbol("outlines", "json_schema, types.JsonSchema", ("json_schema",), exports=("JsonSchema",)),
    LibrarySymbol(
        "outlines",
        "types.at_least, types.at_most, types.between, types.exactly, types.optional, types.zero_or_more, "
        "types.one_or_more",
        ("regex", "constraint"),
        exports=("Concat",),
    ),
    LibrarySymbol(
        "outlines",
        "types.boolean, types.integer, types.number, types.string, types.date, types.time, types.datetime, "
        "types.email, types.ipv4, types.ipv6, types.uuid4",
        ("json_schema",),
        ("parse",),
        why="use the types and formats of JSON Schema",
    ),
    LibrarySymbol(
        "outlines",
        "types.airports, types.bic, types.char, types.countries, types.credit_card, types.digit, types.e164, "
        "types.hex_color, types.hex_str, types.iban, types.isbn, types.latitude, types.locale, types.longitude, "
        "types.mac_address, types.newline, types.paragraph, types.semver, types.sentence, types.slug, types.whitespace",
        ("regex",),
        why="write the pattern of the type as a regex",
    ),
    LibrarySymbol("outlines", "Model.stream", (), ("stream", "parse_stream")),
    LibrarySymbol("outlines", "Model.batch", (), ("generate", "parse")),
    words(
        "outlines",
        "from_transformers from_llamacpp from_vllm_offline from_mlxlm",
        "the model may also be a hub id",
        exports="LLM",
    ),
    words(
        "outlines",
        "from_vllm from_sglang from_tgi from_openai from_anthropic from_lmstudio from_ollama",
        "`bridle serve` answers the clients of vLLM, SGLang, TGI, OpenAI, Anthropic and Ollama",
        exports="LLM",
    ),
    words("outlines", "from_dottxt from_gemini from_mistral", "these functions connect to services of other companies"),
    words("outlines", "Image Vision", "send images as parts of messages (docs/pictures.md)", members="chat"),
    words("outlines", "Audio Video", MEDIA, members="chat"),
    words("outlines", "Template", "use Python's own templates, or Jinja"),
    words("outlines", "Application", "write a function that calls `LLM.parse`"),
    words("outlines", "get_cache clear_cache disable_cache", "compiled constraints stay in memory, within limits"),
)

LMQL: tuple[LibrarySymbol, ...] = (
    LibrarySymbol("LMQL", "argmax, sample", ("temperature", "max_tokens"), why=_OVER_LMTP),
    words(
        "LMQL", "beam_search beam_sample beam_var best_k var", "over LMTP, LMQL itself searches", members="beam_search"
    ),
    LibrarySymbol("LMQL", "REGEX, STARTS_WITH, ESCAPED", ("regex",), why=_OVER_LMTP),
    LibrarySymbol("LMQL", "INT, SENTENCES, WORDS, TOKENS, len", ("regex", "max_tokens"), why=_OVER_LMTP),
    LibrarySymbol("LMQL", "STOPS_AT, STOPS_BEFORE", ("stop",), why=_OVER_LMTP),
    words("LMQL", "ERASE", "a splice rolls tokens back", exports="Splice"),
    words("LMQL", "lmql.score lmql.score_sync", members="score"),
    words("LMQL", "lmql.generate lmql.generate_sync", members="generate"),
    LibrarySymbol(
        "LMQL", "lmql.model, lmql.LLM", exports=("LLM",), why="`lmql.model(endpoint=)` of `bridle serve` works, too"
    ),
    words("LMQL", "lmql.serve", "use `bridle serve-model`, which speaks LMTP"),
    words(
        "LMQL",
        "lmql.query lmql.F lmql.run lmql.run_sync lmql.run_file lmql.query_from_string",
        "only LMQL itself runs programs in its language",
    ),
)

RAY: tuple[LibrarySymbol, ...] = (
    LibrarySymbol(
        "Ray", "LLMConfig, ModelLoadingConfig", settings=("model", "name"), why="these are entries of the settings file"
    ),
    LibrarySymbol("Ray", "model_loading_config, model_id, model_source", settings=("model", "name")),
    LibrarySymbol("Ray", "tokenizer_source", settings=("model_options",), why="set `tokenizer` in this entry"),
    LibrarySymbol("Ray", "engine_kwargs", settings=("model_options", "engine_options")),
    LibrarySymbol(
        "Ray", "engine_kwargs.tensor_parallel_size, engine_kwargs.pipeline_parallel_size", settings=("shards",)
    ),
    LibrarySymbol("Ray", "engine_kwargs.data_parallel_size", settings=("min_engines", "max_engines")),
    LibrarySymbol(
        "Ray", "engine_kwargs.max_model_len", settings=("model_options",), why="set `max_model_len` in this entry"
    ),
    words("Ray", "engine_kwargs.trust_remote_code", "bridle never runs code of a checkpoint"),
    LibrarySymbol(
        "Ray",
        "LoraConfig, lora_config, dynamic_lora_loading_path",
        settings=("adapters",),
        why="list all adapters in the settings file",
    ),
    LibrarySymbol(
        "Ray", "max_num_adapters_per_replica", settings=("engine_options",), why="set `adapter_memory` in this entry"
    ),
    LibrarySymbol("Ray", "deployment_config", settings=("fronts", "max_requests", "drain")),
    LibrarySymbol("Ray", "autoscaling_config.min_replicas", settings=("min_engines",)),
    LibrarySymbol("Ray", "autoscaling_config.max_replicas", settings=("max_engines",)),
    LibrarySymbol("Ray", "autoscaling_config.initial_replicas", settings=("initial_engines",)),
    LibrarySymbol("Ray", "autoscaling_config.upscale_delay_s", settings=("upscale_delay",)),
    LibrarySymbol(
        "Ray",
        "autoscaling_config.downscale_delay_s, autoscaling_config.downscale_to_zero_delay_s",
        settings=("downscale_delay",),
        why="the last engine is never removed",
    ),
    LibrarySymbol(
        "Ray", "autoscaling_config.target_ongoing_requests", settings=("target_queued_tokens", "target_busy")
    ),
    LibrarySymbol(
        "Ray", "accelerator_type, accelerator_config, placement_group_config", settings=("num_cpus", "num_gpus")
    ),
    LibrarySymbol(
        "Ray", "LLMServingArgs, llm_configs", settings=("model",), why="write one application for each model"
    ),
    LibrarySymbol(
        "Ray",
        "build_openai_app, build_llm_deployment, LLMServer",
        why="write `bridle.launch.ray.app` into Ray Serve's configuration file (docs/ray.md)",
    ),
    words(
        "Ray",
        "ingress_cls_config ingress_deployment_config",
        "bridle's own server answers the HTTP requests",
        settings="fronts front_cpus",
    ),
    LibrarySymbol(
        "Ray",
        "PrefixCacheAffinityRouter, KVAwareRouter",
        why="each request goes to the engine that holds its prefix (docs/ray.md)",
    ),
    words("Ray", "build_pd_openai_app", "prefill and decode share each batch"),
    words("Ray", "build_dp_deployment build_dp_openai_app", settings="min_engines max_engines"),
    words(
        "Ray",
        "CloudMirrorConfig bucket_uri extra_files",
        "each machine needs the model's folder, or downloads the model from the hub",
    ),
    words("Ray", "runtime_env", _SERVE),
    words("Ray", "log_engine_metrics", "/metrics always shows the metrics"),
    words("Ray", "llm_engine server_cls", "bridle has only its own engine"),
    words(
        "Ray",
        "download_timeout_s max_download_tries",
        "each machine needs the model's folder, or downloads the model from the hub",
    ),
    words("Ray", "experimental_configs callback_config", "bridle has no settings of this kind"),
)

LIBRARIES: tuple[LibrarySymbol, ...] = (*GUIDANCE, *OUTLINES, *LMQL, *RAY)
