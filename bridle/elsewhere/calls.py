"""Routes of other servers, and the words of libraries that are called rather than asked: what each is here.

Whether a route is here is not written down: the application knows. `why` says what to use where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridle.elsewhere.rows import System

_TEXT = "models here read and write only text"
_STORE = "the server keeps nothing: send the whole conversation"


@dataclass(frozen=True, slots=True)
class Route:
    """A route of another server."""

    systems: tuple[System, ...]
    path: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Word:
    """A function, a class or a setting of a library. `keywords` of `LLM`'s calls and `members` of it are what it is
    here; without either it is absent."""

    system: System
    name: str
    keywords: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    why: str = ""


ROUTES: tuple[Route, ...] = (
    Route(("vLLM", "SGLang", "llama.cpp", "TGI", "Ray"), "/v1/chat/completions"),
    Route(("vLLM", "SGLang", "llama.cpp", "TGI", "Ray"), "/v1/completions"),
    Route(("vLLM", "SGLang", "llama.cpp", "TGI", "Ray"), "/v1/models"),
    Route(("vLLM", "SGLang", "llama.cpp", "Ray"), "/v1/embeddings"),
    Route(("vLLM", "SGLang", "llama.cpp"), "/v1/responses"),
    Route(("vLLM", "SGLang", "llama.cpp"), "/v1/messages"),
    Route(("vLLM", "SGLang", "llama.cpp", "TGI"), "/health"),
    Route(("vLLM", "SGLang", "llama.cpp", "TGI"), "/metrics"),
    Route(("vLLM", "SGLang"), "/ping"),
    Route(("vLLM",), "/v1/load_lora_adapter"),
    Route(("vLLM",), "/v1/unload_lora_adapter"),
    Route(("vLLM", "llama.cpp", "TGI"), "/tokenize"),
    Route(("vLLM", "llama.cpp"), "/detokenize"),
    Route(("vLLM", "Ray"), "/v1/score"),
    Route(("vLLM", "SGLang", "llama.cpp"), "/v1/rerank"),
    Route(("vLLM", "SGLang"), "/v1/classify"),
    Route(("vLLM",), "/classify"),
    Route(("vLLM",), "/rerank"),
    Route(("vLLM",), "/pooling", "/v1/embeddings pools as the model's folder says, /v1/classify gives logits"),
    Route(("vLLM",), "/v1/audio/transcriptions", _TEXT),
    Route(("SGLang", "TGI"), "/generate"),
    Route(("SGLang",), "/flush_cache", "prefixes are dropped when room is needed"),
    Route(("SGLang",), "/get_model_info", "/info and /v1/models say it"),
    Route(("llama.cpp",), "/completion", "/v1/completions takes its fields, /generate streams its way"),
    Route(("llama.cpp",), "/infill", "there is no filling in between prefix and suffix"),
    Route(("llama.cpp",), "/props", "/info says it"),
    Route(("llama.cpp",), "/slots", "/v1/status and `bridle top` show what runs"),
    Route(("llama.cpp",), "/apply-template", "/chat_tokenize gives the tokens"),
    Route(("TGI",), "/generate_stream"),
    Route(("TGI",), "/info"),
    Route(("TGI",), "/chat_tokenize"),
    Route(("TGI",), "/invocations"),
    Route(("OpenAI",), "/v1/batches", "`bridle run-batch` answers such files"),
    Route(("OpenAI",), "/v1/files", _STORE),
    Route(("OpenAI",), "/v1/conversations", _STORE),
    Route(("Anthropic",), "/v1/messages/count_tokens"),
)

WORDS: tuple[Word, ...] = (
    Word("guidance", "gen(regex=)", ("regex",)),
    Word("guidance", "gen(max_tokens=)", ("max_tokens",)),
    Word("guidance", "gen(stop=)", ("stop",)),
    Word("guidance", "gen(temperature=)", ("temperature",)),
    Word("guidance", "gen(name=), capture", (), ("session",), why="the output's text; a script stores variables"),
    Word("guidance", "select", ("choice",)),
    Word("guidance", "json", ("json_schema",), ("parse",)),
    Word("guidance", "substring", ("constraint",)),
    Word("guidance", "string + gen", ("constraint",)),
    Word("guidance", "@guidance, stateful functions", ("controller",)),
    Word("guidance", "system(), user(), assistant()", (), ("chat", "session")),
    Word("guidance", "image()", why="pictures are parts of messages: `docs/pictures.md`"),
    Word("outlines", "Generator(model, type)", (), ("parse",)),
    Word("outlines", "model(prompt, PydanticModel)", (), ("parse",)),
    Word("outlines", "Literal, Enum, Choice", ("choice",), ("parse",)),
    Word("outlines", "types.Regex", ("regex",)),
    Word("outlines", "types.CFG", ("grammar",)),
    Word("outlines", "types.JsonSchema", ("json_schema",)),
    Word("outlines", "model.stream", (), ("stream", "parse_stream")),
    Word("outlines", "model.batch", (), ("generate", "parse")),
    Word("outlines", "Template", why="Python's own, or Jinja's"),
    Word("outlines", "Application", why="a function of your own around `LLM.parse`"),
    Word("LMQL", "argmax, sample, sampler arguments", ("temperature", "max_tokens"), why="unchanged over LMTP"),
    Word("LMQL", "beam, best_k", why="LMQL does them itself, over LMTP"),
    Word("LMQL", "where REGEX(X, ...)", ("regex",)),
    Word("LMQL", 'where X in ["a", "b"]', ("choice",)),
    Word("LMQL", "where STOPS_AT(X, ...)", ("stop",)),
    Word("LMQL", "lmql.score", (), ("score",)),
    Word("Ray", "model_loading_config", settings=("model", "name")),
    Word("Ray", "engine_kwargs", settings=("model_options", "engine_options")),
    Word("Ray", "lora_config", settings=("adapters",)),
    Word("Ray", "deployment_config.autoscaling_config", settings=("min_engines", "max_engines", "initial_engines")),
    Word("Ray", "accelerator_type, placement_group_config", settings=("num_cpus", "num_gpus")),
    Word("Ray", "engine_kwargs.tensor_parallel_size", settings=("shards",)),
    Word("Ray", "runtime_env", why="Serve's own, in the same file"),
    Word("Ray", "log_engine_metrics", why="metrics are always there, at /metrics"),
)
