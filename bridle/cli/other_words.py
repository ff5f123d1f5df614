"""The names that other servers have for the flags of `bridle serve`, since their users type those first.

Flags of vLLM, SGLang, text-generation-inference and llama.cpp's server, each with what to write here instead.
docs/coming-from.md has them as tables. Flags that mean the same here under the same name are not listed.
"""

from __future__ import annotations

_POSITIONAL = "the model has no flag: `bridle serve MODEL`"
_ALWAYS = "needs no flag: it is always on"
_SHARDS = "--shards"
_LENGTH = "--max-model-len"
_REQUEST = "each request says it, in a field of its own (docs/http.md)"

#: By flag, in the order of the tables. A value that begins with dashes is the flag here.
OTHER_WORDS: dict[str, str] = {
    # Which model, and where it comes from.
    "--model": _POSITIONAL,
    "-m": _POSITIONAL,
    "--model-path": _POSITIONAL,
    "--model-id": _POSITIONAL,
    "--hf-repo": _POSITIONAL,
    "-hf": _POSITIONAL,
    "--served-model-name": "--served-name, and --alias for further names",
    "--tokenizer-path": "--tokenizer",
    "--download-dir": "set HF_HOME",
    "--huggingface-hub-cache": "set HF_HOME",
    "--hf-token": "set HF_TOKEN",
    "--trust-remote-code": "code of a checkpoint is never run; `bridle check MODEL` says whether it can be served",
    "--chat-template": "the checkpoint's own is used: put a chat_template.jinja into its folder",
    "--jinja": _ALWAYS,
    "--quantize": "--quantization",
    "-q": "--quantization",
    # Lengths and memory.
    "--context-length": _LENGTH,
    "--ctx-size": _LENGTH,
    "-c": _LENGTH,
    "--max-input-length": "--max-input-tokens",
    "--gpu-memory-utilization": "--kv-memory, in bytes; by default it is measured",
    "--mem-fraction-static": "--kv-memory, in bytes; by default it is measured",
    "--cuda-memory-fraction": "--kv-memory, in bytes; by default it is measured",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--cache-type-k": "--kv-cache-dtype, for keys and values alike",
    "--cache-type-v": "--kv-cache-dtype, for keys and values alike",
    "-ctk": "--kv-cache-dtype, for keys and values alike",
    "-ctv": "--kv-cache-dtype, for keys and values alike",
    # Batching.
    "--max-running-requests": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "--max-prefill-tokens": "--max-batch-prefill-tokens",
    "--chunked-prefill-size": "--max-batch-prefill-tokens",
    "--ubatch-size": "--max-batch-prefill-tokens",
    "-ub": "--max-batch-prefill-tokens",
    "--enable-chunked-prefill": "on already; --no-chunked-prefill turns it off",
    "--no-enable-chunked-prefill": "--no-chunked-prefill",
    "--enable-prefix-caching": "on already; --no-prefix-caching turns it off",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--disable-radix-cache": "--no-prefix-caching",
    "--cont-batching": _ALWAYS,
    "-cb": _ALWAYS,
    "--scheduling-policy": "requests have a `priority` (docs/http.md)",
    "--threads": "--num-threads",
    "-t": "--num-threads",
    # Devices and processes.
    "--tensor-parallel-size": _SHARDS,
    "-tp": _SHARDS,
    "--tp": _SHARDS,
    "--tp-size": _SHARDS,
    "--num-shard": _SHARDS,
    "--sharded": _SHARDS,
    "--data-parallel-size": "--replicas",
    "-dp": "--replicas",
    "--dp": "--replicas",
    "--dp-size": "--replicas",
    "--n-gpu-layers": "--device cuda, with all layers",
    "-ngl": "--device cuda, with all layers",
    # Adapters.
    "--enable-lora": "--adapter, or --adapters-dir; nothing has to be turned on",
    "--lora-modules": "--adapter NAME=SOURCE",
    "--lora-paths": "--adapter NAME=SOURCE",
    "--lora-adapters": "--adapter NAME=SOURCE",
    "--lora": "--adapter NAME=SOURCE",
    "--max-loras": "--max-step-adapters",
    "--max-loras-per-batch": "--max-step-adapters",
    # Drafted tokens.
    "-md": "--draft-model",
    "--speculative-draft-model-path": "--draft-model",
    "--speculative-num-draft-tokens": "--speculate",
    "--draft": "--speculate",
    "--draft-min": "not needed: with `--speculate auto` as many are drafted as pay",
    "--draft-p-min": "not needed: with `--speculate auto` as many are drafted as pay",
    # What requests ask for.
    "--enable-auto-tool-choice": _ALWAYS,
    "--tool-call-parser": "not needed: the chat template tells how the model writes calls",
    "--reasoning-parser": "not needed: the chat template tells how the model writes thoughts",
    "--grammar-backend": "there is one, llguidance",
    "--guided-decoding-backend": "there is one, llguidance",
    "--grammar": _REQUEST,
    "--json-schema": _REQUEST,
    # Who may ask, and what is seen of it.
    "--hostname": "--host",
    "--api-key": "--keys FILE, made by `bridle keys add USER`",
    "--api-key-file": "--keys FILE, made by `bridle keys add USER`",
    "--allowed-origins": "--cors-origin",
    "--cors-allow-origin": "--cors-origin",
    "--uvicorn-log-level": "--log-level",
    "--json-output": "--log-format json",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--metrics": _ALWAYS,
    "--enable-metrics": _ALWAYS,
}


def advice(flag: str) -> str | None:
    """What to write here instead of another server's flag; None if no such server has it. `--flag=value` and `--a_b`
    are recognized, too."""
    name = flag.partition("=")[0]
    known = OTHER_WORDS.get(name) or OTHER_WORDS.get(name.replace("_", "-"))
    if known is None:
        return None
    return f"here it is {known}" if known.startswith("--") else known
