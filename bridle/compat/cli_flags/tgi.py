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
            "--max-best-of": "--max-choices limits the choices of one call",
            "--max-stop-sequences --max-top-n-tokens": "docs/tgi.md has the limits",
            "--validation-workers --tokenizer-config-path": reasons.TOKENIZERS,
            "--rope-factor": reasons.ROPE,
            "--cuda-graphs": reasons.GRAPHS,
            "--disable-custom-kernels": reasons.KERNELS,
            "--shard-uds-path": "--shards starts and connects the shards",
            "--prometheus-port": "metrics are at /metrics of the same port",
            "--watermark-gamma --watermark-delta": "a request has `watermark`, with both numbers",
            "--ngrok --ngrok-*": reasons.PROXY,
            "--disable-grammar-support": "constraints are always available; --policies can refuse them",
            "--env -e": "`bridle doctor`",
            "--usage-stats": "nothing about usage is sent anywhere",
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
            "-t": "--tokenizer",
            "--local-weights --gguf": "`bridle serve FOLDER`, or the GGUF file itself",
            "--gpu-layers": "--device cuda, with all layers",
            "-g": "--device cuda, with all layers",
            "--json-size --bin-size --busy-wait-time --shm-prefix": "-A passes it to the runtime: `-A --json-size=64`",
            "--log --verbose --daemon": reasons.LOGGING,
            "--setting "
            "-s --test --warmup --warmup-only -w --profile-step": "docs/batching.md has the settings of a step",
        },
    ),
)

#: Flags of `lmql serve-model`, for `bridle serve-model`.
LMQL: tuple[Flag, ...] = (
    *same("LMQL", "--host --port --cuda --static --single_thread"),
    *same("LMQL", "--dtype", "`float32`, `bfloat16`, `float16`, `8bit`"),
    *refusals(
        "LMQL",
        {
            "--loader": reasons.LOADING,
            "--layout": "`bridle serve` speaks LMTP, too, and has --shards and --replicas",
        },
    ),
)
