"""Flags that only vLLM 0.33 has. `vllm_earlier` has the flags that only earlier versions had."""

from __future__ import annotations

from bridle.compat.cli_flags import reasons
from bridle.compat.cli_flags.schema import Flag, refusals, same, taken

VLLM: tuple[Flag, ...] = (
    *same("vLLM", "--max-model-len --block-size --max-num-batched-tokens --max-num-seqs"),
    *same("vLLM", "--generation-config", "the values are `auto` and `none`"),
    *same("vLLM", "--speculative-config", "keys: `method` (ngram, draft_model), `model`, `num_speculative_tokens`"),
    *taken("vLLM", "-sc", "--speculative-config"),
    *taken("vLLM", "--spec-model", "--draft-model"),
    *taken("vLLM", "--spec-tokens", "--speculate"),
    *taken("vLLM", "--kv-cache-memory-bytes", "--kv-memory"),
    *taken("vLLM", "--enable-prefix-caching", "--prefix-caching"),
    *taken("vLLM", "--no-enable-prefix-caching", "--no-prefix-caching"),
    *taken("vLLM", "--enable-chunked-prefill", "--chunked-prefill"),
    *taken("vLLM", "--no-enable-chunked-prefill", "--no-chunked-prefill"),
    *taken("vLLM", "--max-num-queued-reqs", "--max-requests", "waiting and running requests count; others get a 429"),
    *taken("vLLM", "--max-num-queued-tokens", "--max-prompt-tokens"),
    *taken("vLLM", "--api-server-count -asc", "--front-ends", "front ends read requests and write streams"),
    *taken("vLLM", "--shutdown-timeout", "--grace-period"),
    *taken("vLLM", "--sse-keep-alive-interval", "--ping-interval"),
    *taken("vLLM", "--uvicorn-log-level", "--log-level"),
    *taken("vLLM", "--h11-max-incomplete-event-size", "--max-header-bytes"),
    # The model.
    *refusals(
        "vLLM",
        {
            "--runner --convert --pooler-config --io-processor-plugin": reasons.POOLED,
            "--tokenizer-revision": "the flag --revision also applies to the tokenizer",
            "--code-revision --model-class-overrides": reasons.NO_CODE,
            "--hf-config-path --hf-overrides --config-format": "change config.json in the model's folder",
            "--quantization-config --allow-deprecated-quantization": reasons.QUANTIZED,
            "--safetensors-* --ignore-patterns "
            "--use-tqdm-on-load --pt-load-map-location --max-parallel-loading-workers": reasons.LOADING,
            "--override-generation-config": (
                "requests set sampling parameters; `--generation-config none` ignores the checkpoint's defaults"
            ),
            "--renderer-num-workers": reasons.TOKENIZERS,
            "--seed": "set `seed` in each request",
            "--worker-cls --worker-extension-cls --middleware --reasoning-parser-plugin --tool-parser-plugin "
            "--scheduler-cls": reasons.PLUGINS,
            "--logits-processors": "use --controller-class, which loads a class that controls each token",
            # Lengths and memory.
            "--num-gpu-blocks-override": reasons.SHARE,
            "--kv-cache-* --kv-offloading-* --kv-sharing-fast-prefill --prefix-* --swa-bounded-replay --replayssm-* "
            "--use-replayssm --enable-mamba-shared-prefix-checkpoint --disable-hybrid-kv-cache-manager": (
                "the KV cache has only the flags --kv-memory and --kv-cache-dtype"
            ),
            "--disable-sliding-window --disable-cascade-attn": reasons.KERNELS,
            "--max-logprobs": "a request may ask for at most 20 alternative tokens, unless its route has another limit",
            "--logprobs-mode": "log-probabilities are those of the model, before any sampling filter",
            "--return-sampling-mask": "the trace of a request shows which tokens were allowed (docs/traces.md)",
            "--enable-prompt-embeds": "a prompt is text or token ids, never embeddings",
            # Batching.
            "--max-num-scheduled-tokens --long-prefill-token-threshold --long-prefill-token-threshold-adaptive "
            "--max-num-active-seqs": (
                "limit a step with --max-num-batched-tokens, --max-batch-prefill-tokens and --max-num-seqs"
            ),
            "--scheduling-policy": "set `priority` in a request (docs/limits.md)",
            "--disable-chunked-mm-input --scheduler-reserve-full-isl --prefill-schedule-interval --watermark "
            "--async-scheduling": "the scheduler fills each step by fixed rules (docs/batching.md)",
            # Devices, processes, other machines.
            "--distributed-* --cpu-distributed-timeout-seconds --data-parallel-* -dpn -dpr -dpl -dpa -dpp -dpb -dph "
            "-dpe -dpm --ray-workers-use-nsight --dp-*": reasons.RAY,
            "--headless": "one process always answers the requests; --replicas adds engines",
            "--prefill-context-parallel-size -pcp --cp-* --enable-hc-sp --enable-batch-sharded-sampling": reasons.PARTS,
            "--enable-expert-parallel -ep --enable-ep-weight-filter --all2all-backend --enable-dbo --dbo-* "
            "--disable-nccl-for-dp-synchronization --expert-placement-strategy": reasons.EXPERTS,
            "--numa-*": reasons.CPU,
            "--device-ids": "use --device cuda:1, or the environment variable CUDA_VISIBLE_DEVICES",
            "--enable-sleep-mode "
            "--sleep-*": "models are unloaded when another needs memory, and reloaded later (docs/multiple-models.md)",
            "--enable-fault-tolerance --fault-tolerance-config "
            "--watchdog-config": "with --isolate-model, the server restarts a lost model process",
            "--kv-transfer-config --ec-* --engram-config --enable-nccl-comm-suspend": reasons.TRANSFER,
            "--weight-transfer-config": reasons.TRAINING,
        },
    ),
    *same("vLLM", "--enforce-eager"),
    *refusals(
        "vLLM",
        {
            "--cudagraph-* --max-cudagraph-capture-size": reasons.GRAPHS,
            "--compilation-config -cc --optimization-level --performance-mode --attention-config -ac --kernel-config "
            "--ir-op-priority --enable-flashinfer-autotune --monokernel --moe-backend --sparse-indexer-topk-backend "
            "--gdn-* --kda-* "
            "--use-fp64-gumbel --enable-cumem-allocator --enable-shm-tensor-arena --jit-monitor-*": reasons.KERNELS,
            "--additional-config --aux-output-config "
            "--profiler-config --fail-on-environ-validation --enable-trace-replay": reasons.DEBUGGING,
            "--diffusion-config -dc": "bridle serves only causal models, which generate token by token",
            # Images and other media.
            "--limit-mm-per-prompt --enable-mm-embeds --media-io-kwargs --allowed-local-media-path "
            "--interleave-mm-strings --skip-mm-profiling --trust-request-mm-kwargs --enable-tower-connector-lora "
            "--default-mm-loras": reasons.MEDIA,
            "--video-*": reasons.VIDEO,
            # Adapters.
            "--max-cpu-loras": "set --adapter-host-memory in bytes",
            "--fully-sharded-loras --specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras "
            "--max-lora-cls-labels": "the computation of adapters has no settings (docs/lora.md)",
            # Draft tokens.
            "--spec-method --per-request-spec-decode-metrics": reasons.DRAFTS,
            # Settings of requests.
            "--structured-outputs-config "
            "--reasoning-config": "constraints and reasoning are always available; each request selects them",
            "--chat-template-content-format --response-role --reasoning-effort-map": reasons.TEMPLATE,
            "--exclude-tools-when-tool-choice-none "
            "--tool-strict-level --cohere-* --anthropic-disabled-thinking-effort": reasons.TOLD,
            "--return-tokens-as-token-ids --enable-prompt-tokens-details --enable-force-include-usage "
            "--enable-per-request-metrics": "answers have `usage`; streams have `usage` if `stream_options` asks",
            "--tokens-only --enable-scale-out": "/v1/completions accepts token ids as prompts; answers contain text",
            "--enable-tokenizer-info-endpoint": "/info and /tokenize return this information about the tokenizer",
            "--enable-flash-late-interaction": reasons.POOLED,
            # The server.
            "--uds": "the server listens only on --host and --port; " + reasons.PROXY,
            "--root-path --allow-credentials --allowed-methods --allowed-headers --h11-max-header-count": reasons.PROXY,
            "--disable-fastapi-docs --enable-offline-docs": "the page /docs loads no scripts from other sites",
            "--enable-request-id-headers": "the server always reads and returns the header `x-request-id`",
            "--logging-config --log-config-file --disable-uvicorn-access-log --disable-access-log-for-endpoints "
            "--aggregate-engine-logging "
            "--disable-log-stats --enable-logging-iteration-details --log-error-stack": reasons.LOGGING,
            "--enable-log-requests --enable-log-outputs --enable-log-deltas --max-log-len": reasons.PRIVATE,
            "--show-hidden-metrics-for-version --collect-detailed-traces --custom-histogram-buckets "
            "--enable-layerwise-nvtx-tracing --enable-server-load-tracking --cudagraph-metrics": reasons.METRICS,
            "--fingerprint-*": "answers always have `system_fingerprint`",
        },
    ),
)
