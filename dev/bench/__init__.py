"""Benchmarks for developers of bridle. Benchmarks that users also run are in `bridle.bench`; `bridle.bench.run` lists
the names that a benchmark module must define."""

from __future__ import annotations

#: Benchmarks by name, with a description. A benchmark is the module of that name in this package.
BENCHMARKS = {
    "agents": "agents that call tools: a client's loop with parked KV, prefix cache or none, and inside the engine",
    "batching": "continuous batching beside static batches and none, and what each of its knobs trades",
    "constraints": "masks beside llguidance's own, steps beside free ones",
    "cpu": "decoding and prompts on a CPU in all forms of weights, beside llama.cpp and the machine's limits",
    "crowds": "what floods, overload and slow readers cost those beside them",
    "embeddings": "vectors of texts per second, packed, beside transformers' padded batches",
    "families": "which architectures of the installed transformers are served, and why others are not",
    "frontend": "processor time of HTTP and of the engine's thread per streamed token, beside llama-server",
    "hybrid": "models with recurrent layers: prompts, decoding, and states used again, beside llama-bench",
    "images": "prompts with pictures, a chat about one, and streams beside them, next to transformers' `generate`",
    "lmtp": "LMQL's traffic, beside LMQL's own server",
    "lora": "many adapters in one batch, beside PEFT switching between them",
    "losses": "what clients notice when processes of a server are killed or hang",
    "overhead": "Python time of a step outside the model",
    "persistent": "time to the first token of a long prompt: computed, from memory, and from disk after a restart",
    "prefill": "time to the first token of a short prompt next to a long one, and what sharing steps costs",
    "recipes": "answers of recipes that steer, beside the model alone, a grammar in one request, and llama-server's",
    "refusals": "how quickly hostile bodies are refused, and who waits for it",
    "schemas": "which JSON schemas of a collection such as MaskBench are served, and what their masks cost",
    "shard": "a step through another process beside one in this",
    "simulation": "a hundred to a thousand replicas in virtual time",
    "soak": "a server under mixed traffic whose processes are killed, stopped and starved: answers, recovery, growth",
    "speculation": "what drafted tokens gain, beside none, and beside drafts in transformers and llama.cpp",
    "steps": "what a step costs, by what is in it",
    "trace": "what tracing costs, with and without in turns",
    "verbs": "the engine's verbs next to requests over the prefix cache; starts, forks and forced tokens",
}
