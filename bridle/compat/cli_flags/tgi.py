"""Flags that only text-generation-inference has, and flags of the servers of AICI and LMQL."""

from __future__ import annotations

from bridle.compat.cli_flags import reasons
from bridle.compat.cli_flags.schema import Flag, refusals, same, spelt, taken

TGI: tuple[Flag, ...] = (
    *same("TGI", "--max-input-tokens --max-total-tokens --max-batch-prefill-tokens --max-batch-total-tokens"),
    *same("TGI", "--waiting-served-ratio --max-waiting-tokens --otlp-endpoint"),
    *spelt("TGI", "--max-concurrent-requests", "--max-requests"),
    *spelt("TGI", "--payload-limit", "--max-body-bytes"),
    *spelt("TGI", "--max-client-batch-size", "--max-prompts"),
    *taken("TGI", "--max-input-length", "--max-input-tokens"),
    *taken("TGI", "--json-output", "--log-format json"),
    *taken("TGI", "--graceful-termination-timeout -g", "--grace-period"),
    *taken("TGI", "-p", "--port"),
    *refusals(
        "TGI",
        {
            "--max-best-of": "use --max-choices, which limits the choices of one request",
            "--max-stop-sequences --max-top-n-tokens": "docs/tgi.md has the limits of stop sequences and top tokens",
            "--validation-workers --tokenizer-config-path": reasons.TOKENIZERS,
            "--rope-factor": reasons.ROPE,
            "--cuda-graphs": reasons.GRAPHS,
            "--disable-custom-kernels": reasons.KERNELS,
            "--shard-uds-path": "use --shards, which starts and connects the shards",
            "--prometheus-port": "/metrics is on the same port as all other routes",
            "--watermark-gamma --watermark-delta": "set `gamma` and `delta` in a request's `watermark`",
            "--ngrok --ngrok-*": reasons.PROXY,
            "--disable-grammar-support": "constraints are always available; a policy (--policies) can refuse them",
            "--env -e": "use `bridle doctor`",
            "--usage-stats": "the server sends no usage statistics",
            "--enable-prefill-logprobs": reasons.ALWAYS,
        },
    ),
    # AICI's servers, rllm-llamacpp and rllm-cuda. The flags of aicirt are those of `bridle runtime`.
    *same("AICI", "-A"),
    *taken("AICI", "--aicirt", "--aici-rt"),
    *taken("AICI", "--aicirt-arg", "--aici-rtarg"),
    *refusals(
        "AICI",
        {
            "-t": "use --tokenizer",
            "--local-weights --gguf": "use `bridle serve FOLDER` or `bridle serve FILE.gguf`",
            "--gpu-layers": "use --device cuda, which puts all layers on the GPU",
            "-g": "use --device cuda, which puts all layers on the GPU",
            "--json-size --bin-size --busy-wait-time --shm-prefix": "pass the flag to the runtime: `-A --json-size=64`",
            "--log --verbose --daemon": reasons.LOGGING,
            "--setting "
            "-s --test --warmup --warmup-only -w --profile-step": "docs/batching.md has the settings of a step",
        },
    ),
)

#: Flags of `lmql serve-model`, for `bridle serve-model`.
LMQL: tuple[Flag, ...] = (
    *same("LMQL", "--host --port --cuda --static --single_thread"),
    *same("LMQL", "--dtype", "the values are `float32`, `bfloat16`, `float16` and `8bit`"),
    *refusals(
        "LMQL",
        {
            "--loader": reasons.LOADING,
            "--layout": "use `bridle serve`, which also speaks LMTP and has --shards and --replicas",
        },
    ),
)
