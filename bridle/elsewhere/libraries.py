"""What guidance, outlines, LMQL and Ray's language models call things that are called rather than asked, and what that
is here: functions, keywords, classes, and fields of settings."""

from __future__ import annotations

from bridle.elsewhere.programs import TEXT
from bridle.elsewhere.rows import System, Word

_PYTHON = "Python's own: a program goes on with the output's text"
_SERVE = "Serve's own, in the same file"


def _words(system: System, names: str, why: str = "", **here: str) -> Word:
    """A row whose names, and names here, are words of one text."""
    return Word(system, ", ".join(names.split()), why=why, **{kind: tuple(each.split()) for kind, each in here.items()})


GUIDANCE: tuple[Word, ...] = (
    Word("guidance", "gen(regex=)", ("regex",)),
    Word("guidance", "gen(max_tokens=)", ("max_tokens",)),
    Word("guidance", "gen(stop=)", ("stop",)),
    Word("guidance", "gen(stop_regex=)", ("stopping_criteria",), why="or a regex that ends so"),
    Word("guidance", "gen(temperature=), gen(top_p=), gen(n=)", ("temperature", "top_p", "n")),
    Word("guidance", "gen(suffix=)", ("constraint",), why="`Concat` of what is drawn and what follows"),
    Word("guidance", "gen(tools=), gen(tool_choice=), gen(hide_tool_call=), Tool", (), ("chat",), why="`tools=`"),
    Word("guidance", "gen(name=), capture", (), ("session",), why="the output's text; a script stores variables"),
    Word("guidance", "gen(list_append=), gen(save_stop_text=), block", why=_PYTHON),
    Word("guidance", "gen, guidance, library", (), ("generate", "stream")),
    Word("guidance", "models", exports=("LLM",), why="guidance's own clients of vLLM, SGLang and OpenAI work, too"),
    Word("guidance", "select", ("choice",)),
    Word("guidance", "json", ("json_schema",), ("parse",)),
    Word("guidance", "regex", ("regex",)),
    Word("guidance", "lark", ("grammar",), exports=("Lark",)),
    Word("guidance", "gbnf_to_lark", ("grammar",), exports=("Gbnf",), why="taken as it is"),
    Word("guidance", "substring", ("constraint",), exports=("Substring",)),
    Word("guidance", "string, sequence, string + gen", ("constraint",), exports=("Concat",)),
    Word("guidance", "optional, zero_or_more, one_or_more, at_most_n_repeats, exactly_n_repeats", ("regex", "grammar")),
    Word("guidance", "token_limit", ("max_tokens",), exports=("Branch",), why="of a part: a controller"),
    Word("guidance", "with_temperature", ("temperature",), exports=("Branch.sampling",), why="of a part: a controller"),
    Word("guidance", "special_token", exports=("Decision.splice",), why="forced by its id; templates write their own"),
    Word("guidance", "@guidance, stateful functions", ("controller",)),
    Word("guidance", "role, system, user, assistant", (), ("chat", "session")),
    Word("guidance", "image", (), ("chat",), why="pictures are parts of messages: `docs/pictures.md`"),
    Word("guidance", "audio, video, gen_audio, gen_image, gen_video", why=TEXT),
)

OUTLINES: tuple[Word, ...] = (
    Word("outlines", "Generator, SteerableModel, BlackBoxModel", (), ("parse",)),
    Word("outlines", "Generator(model, type)", (), ("parse",)),
    Word("outlines", "model(prompt, PydanticModel)", (), ("parse",)),
    Word("outlines", "Literal, Enum, types.Choice, types.either", ("choice",), ("parse",)),
    Word("outlines", "regex, types.Regex", ("regex",), exports=("Regex",)),
    Word("outlines", "cfg, types.CFG", ("grammar",), exports=("Lark",)),
    Word("outlines", "json_schema, types.JsonSchema", ("json_schema",), exports=("JsonSchema",)),
    Word(
        "outlines",
        "types.at_least, types.at_most, types.between, types.exactly, types.optional, types.zero_or_more, "
        "types.one_or_more",
        ("regex", "constraint"),
        exports=("Concat",),
    ),
    Word(
        "outlines",
        "types.boolean, types.integer, types.number, types.string, types.date, types.time, types.datetime, "
        "types.email, types.ipv4, types.ipv6, types.uuid4",
        ("json_schema",),
        ("parse",),
        why="types, and formats of a schema",
    ),
    Word(
        "outlines",
        "types.airports, types.bic, types.char, types.countries, types.credit_card, types.digit, types.e164, "
        "types.hex_color, types.hex_str, types.iban, types.isbn, types.latitude, types.locale, types.longitude, "
        "types.mac_address, types.newline, types.paragraph, types.semver, types.sentence, types.slug, types.whitespace",
        ("regex",),
        why="their pattern",
    ),
    Word("outlines", "model.stream", (), ("stream", "parse_stream")),
    Word("outlines", "model.batch", (), ("generate", "parse")),
    _words("outlines", "from_transformers from_llamacpp from_vllm_offline from_mlxlm", "or a hub id", exports="LLM"),
    _words(
        "outlines",
        "from_vllm from_sglang from_tgi from_openai from_anthropic from_lmstudio from_ollama",
        "`bridle serve` answers the clients of vLLM, SGLang, TGI, OpenAI and Anthropic",
        exports="LLM",
    ),
    _words("outlines", "from_dottxt from_gemini from_mistral", "services of others"),
    _words("outlines", "Image Vision", "pictures are parts of messages: `docs/pictures.md`", members="chat"),
    _words("outlines", "Audio Video", TEXT),
    _words("outlines", "Template", "Python's own, or Jinja's"),
    _words("outlines", "Application", "a function of your own around `LLM.parse`"),
    _words("outlines", "get_cache clear_cache disable_cache", "what is compiled is kept in memory, within bounds"),
)

LMQL: tuple[Word, ...] = (
    Word("LMQL", "argmax, sample, sampler arguments", ("temperature", "max_tokens"), why="unchanged over LMTP"),
    Word("LMQL", "beam, best_k", why="LMQL does them itself, over LMTP"),
    Word("LMQL", "where REGEX(X, ...)", ("regex",)),
    Word("LMQL", 'where X in ["a", "b"]', ("choice",)),
    Word("LMQL", "where STOPS_AT(X, ...)", ("stop",)),
    Word("LMQL", "lmql.score", (), ("score",)),
)

RAY: tuple[Word, ...] = (
    Word("Ray", "model_loading_config, model_id, model_source", settings=("model", "name")),
    Word("Ray", "tokenizer_source", settings=("model_options",), why="`tokenizer` in it"),
    Word("Ray", "engine_kwargs", settings=("model_options", "engine_options")),
    Word("Ray", "engine_kwargs.tensor_parallel_size", settings=("shards",)),
    Word("Ray", "lora_config, dynamic_lora_loading_path", settings=("adapters",), why="named at the start"),
    Word("Ray", "max_num_adapters_per_replica", settings=("engine_options",), why="`adapter_memory` in it"),
    Word("Ray", "deployment_config", settings=("fronts", "max_requests", "drain")),
    Word("Ray", "deployment_config.autoscaling_config", settings=("min_engines", "max_engines", "initial_engines")),
    Word("Ray", "accelerator_type, accelerator_config, placement_group_config", settings=("num_cpus", "num_gpus")),
    _words("Ray", "runtime_env", _SERVE),
    _words("Ray", "log_engine_metrics", "metrics are always there, at /metrics"),
    _words("Ray", "llm_engine server_cls", "the engine is bridle's"),
    _words("Ray", "download_timeout_s max_download_tries", "every machine has the folder, or asks the hub"),
    _words("Ray", "experimental_configs callback_config", "there are none"),
)

LIBRARIES: tuple[Word, ...] = (*GUIDANCE, *OUTLINES, *LMQL, *RAY)
