"""Flags of vLLM 0.33 alone; `vllm_earlier` has those that only earlier versions had."""

from __future__ import annotations

from bridle.compat.cli_flags import reasons
from bridle.compat.cli_flags.schema import Flag, refused, same, taken

VLLM: tuple[Flag, ...] = (
    *same("vLLM", "--max-model-len --block-size --max-num-batched-tokens --max-num-seqs"),
    *same("vLLM", "--generation-config", "`auto` or `none`"),
    *same("vLLM", "--speculative-config", "with `method` (ngram, draft_model), `model`, `num_speculative_tokens`"),
    *taken("vLLM", "-sc", "--speculative-config"),
    *taken("vLLM", "--spec-model", "--draft-model"),
    *taken("vLLM", "--spec-tokens", "--speculate"),
    *taken("vLLM", "--kv-cache-memory-bytes", "--kv-memory"),
    *taken("vLLM", "--enable-prefix-caching", "--prefix-caching"),
    *taken("vLLM", "--no-enable-prefix-caching", "--no-prefix-caching"),
    *taken("vLLM", "--enable-chunked-prefill", "--chunked-prefill"),
    *taken("vLLM", "--no-enable-chunked-prefill", "--no-chunked-prefill"),
    *taken("vLLM", "--max-num-queued-reqs", "--max-requests", "waiting and running; further ones get a 429"),
    *taken("vLLM", "--max-num-queued-tokens", "--max-prompt-tokens"),
    *taken("vLLM", "--shutdown-timeout", "--grace-period"),
    *taken("vLLM", "--sse-keep-alive-interval", "--ping-interval"),
    *taken("vLLM", "--uvicorn-log-level", "--log-level"),
    *taken("vLLM", "--h11-max-incomplete-event-size", "--max-header-bytes"),
    # The model.
    *refused("vLLM", "--runner --convert --pooler-config --io-processor-plugin", reasons.POOLED),
    *refused("vLLM", "--tokenizer-revision", "--revision is that of the tokenizer, too"),
    *refused("vLLM", "--code-revision --model-class-overrides", reasons.NO_CODE),
    *refused(
        "vLLM",
        "--hf-config-path --hf-overrides --config-format",
        "the folder's config.json is read: change it there",
    ),
    *refused("vLLM", "--quantization-config --allow-deprecated-quantization", reasons.QUANTIZED),
    *refused(
        "vLLM",
        "--safetensors-* --ignore-patterns --use-tqdm-on-load --pt-load-map-location --max-parallel-loading-workers",
        reasons.LOADING,
    ),
    *refused(
        "vLLM",
        "--override-generation-config",
        "each request says how it samples; --generation-config none leaves the folder's out",
    ),
    *refused("vLLM", "--renderer-num-workers", reasons.TOKENIZERS),
    *refused("vLLM", "--seed", "each request has a `seed`"),
    *refused(
        "vLLM",
        "--worker-cls --worker-extension-cls --middleware --reasoning-parser-plugin --tool-parser-plugin "
        "--scheduler-cls",
        reasons.PLUGINS,
    ),
    *refused("vLLM", "--logits-processors", "--controller-class: a class that decides about each token"),
    # Lengths and memory.
    *refused("vLLM", "--num-gpu-blocks-override", reasons.SHARE),
    *refused(
        "vLLM",
        "--kv-cache-* --kv-offloading-* --kv-sharing-fast-prefill --prefix-* --swa-bounded-replay --replayssm-* "
        "--use-replayssm --enable-mamba-shared-prefix-checkpoint --disable-hybrid-kv-cache-manager",
        "the KV cache is --kv-memory and --kv-cache-dtype; the rest is settled by the model",
    ),
    *refused("vLLM", "--disable-sliding-window --disable-cascade-attn", reasons.KERNELS),
    *refused("vLLM", "--max-logprobs", "a request may ask for 20 alternatives, or the route's own limit"),
    *refused("vLLM", "--logprobs-mode", "log-probabilities are those of the model, before any filter"),
    *refused("vLLM", "--return-sampling-mask", "a trace of a request says which tokens were allowed (docs/traces.md)"),
    *refused("vLLM", "--enable-prompt-embeds", "prompts are texts or token ids"),
    # Batching.
    *refused(
        "vLLM",
        "--max-num-scheduled-tokens --long-prefill-token-threshold --long-prefill-token-threshold-adaptive "
        "--max-num-active-seqs",
        "--max-num-batched-tokens, --max-batch-prefill-tokens and --max-num-seqs bound a step",
    ),
    *refused("vLLM", "--scheduling-policy", "requests have a `priority` (docs/http.md)"),
    *refused(
        "vLLM",
        "--disable-chunked-mm-input --scheduler-reserve-full-isl --prefill-schedule-interval --watermark "
        "--async-scheduling",
        "how steps are filled is settled: docs/batching.md",
    ),
    # Devices, processes, other machines.
    *refused(
        "vLLM",
        "--distributed-* --cpu-distributed-timeout-seconds --data-parallel-* -dpn -dpr -dpl -dpa -dpp -dpb -dph "
        "-dpe -dpm --ray-workers-use-nsight --dp-*",
        reasons.RAY,
    ),
    *refused("vLLM", "--headless --api-server-count -asc", "one process answers; the engines beside it are --replicas"),
    *refused(
        "vLLM",
        "--prefill-context-parallel-size -pcp --cp-* --enable-hc-sp --enable-batch-sharded-sampling",
        reasons.PARTS,
    ),
    *refused(
        "vLLM",
        "--enable-expert-parallel -ep --enable-ep-weight-filter --all2all-backend --enable-dbo --dbo-* "
        "--disable-nccl-for-dp-synchronization --expert-placement-strategy",
        reasons.EXPERTS,
    ),
    *refused("vLLM", "--numa-*", reasons.CPU),
    *refused("vLLM", "--device-ids", "--device cuda:1, or CUDA_VISIBLE_DEVICES"),
    *refused(
        "vLLM",
        "--enable-sleep-mode --sleep-*",
        "models are unloaded when others need the room, and loaded again (docs/http.md)",
    ),
    *refused(
        "vLLM",
        "--enable-fault-tolerance --fault-tolerance-config --watchdog-config",
        "a lost process is started again, and its requests go on: --isolate-model",
    ),
    *refused("vLLM", "--kv-transfer-config --ec-* --engram-config --enable-nccl-comm-suspend", reasons.TRANSFER),
    *refused("vLLM", "--weight-transfer-config", reasons.TRAINING),
    *same("vLLM", "--enforce-eager"),
    *refused("vLLM", "--cudagraph-* --max-cudagraph-capture-size", reasons.GRAPHS),
    *refused(
        "vLLM",
        "--compilation-config -cc --optimization-level --performance-mode --attention-config -ac --kernel-config "
        "--ir-op-priority --enable-flashinfer-autotune --monokernel --moe-backend --sparse-indexer-topk-backend "
        "--gdn-* --kda-* --use-fp64-gumbel --enable-cumem-allocator --enable-shm-tensor-arena --jit-monitor-*",
        reasons.KERNELS,
    ),
    *refused(
        "vLLM",
        "--additional-config --aux-output-config --profiler-config --fail-on-environ-validation --enable-trace-replay",
        reasons.DEBUGGING,
    ),
    *refused("vLLM", "--diffusion-config -dc", "texts are written token by token, by causal models"),
    # Pictures and the like.
    *refused(
        "vLLM",
        "--limit-mm-per-prompt --enable-mm-embeds --media-io-kwargs --allowed-local-media-path "
        "--interleave-mm-strings --skip-mm-profiling --trust-request-mm-kwargs --enable-tower-connector-lora "
        "--default-mm-loras",
        reasons.MEDIA,
    ),
    *refused("vLLM", "--video-*", reasons.VIDEO),
    # Adapters.
    *refused("vLLM", "--max-cpu-loras", "--adapter-host-memory, in bytes"),
    *refused(
        "vLLM",
        "--fully-sharded-loras --specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras "
        "--max-lora-cls-labels",
        "adapters are computed as docs/lora.md says; nothing has to be set",
    ),
    # Drafted tokens.
    *refused("vLLM", "--spec-method --per-request-spec-decode-metrics", reasons.DRAFTS),
    # What requests ask for.
    *refused(
        "vLLM",
        "--structured-outputs-config --reasoning-config",
        "constraints and thoughts are always there; each request says what it wants",
    ),
    *refused("vLLM", "--chat-template-content-format --response-role --reasoning-effort-map", reasons.TEMPLATE),
    *refused(
        "vLLM",
        "--exclude-tools-when-tool-choice-none --tool-strict-level --cohere-* --anthropic-disabled-thinking-effort",
        reasons.TOLD,
    ),
    *refused(
        "vLLM",
        "--return-tokens-as-token-ids --enable-prompt-tokens-details --enable-force-include-usage "
        "--enable-per-request-metrics",
        "`usage` has all counts; a stream has it with `stream_options`",
    ),
    *refused(
        "vLLM", "--tokens-only --enable-scale-out", "prompts may be token ids on /v1/completions; texts come back"
    ),
    *refused("vLLM", "--enable-tokenizer-info-endpoint", "/info and /tokenize say it"),
    *refused("vLLM", "--enable-flash-late-interaction", reasons.POOLED),
    # The server.
    *refused("vLLM", "--uds", "it listens on --host and --port; " + reasons.PROXY),
    *refused(
        "vLLM",
        "--root-path --allow-credentials --allowed-methods --allowed-headers --h11-max-header-count",
        reasons.PROXY,
    ),
    *refused("vLLM", "--disable-fastapi-docs --enable-offline-docs", "/docs is a page without scripts of others"),
    *refused("vLLM", "--enable-request-id-headers", "`x-request-id` is always taken and given"),
    *refused(
        "vLLM",
        "--logging-config --log-config-file --disable-uvicorn-access-log --disable-access-log-for-endpoints "
        "--aggregate-engine-logging --disable-log-stats --enable-logging-iteration-details --log-error-stack",
        reasons.LOGGING,
    ),
    *refused(
        "vLLM",
        "--enable-log-requests --enable-log-outputs --enable-log-deltas --max-log-len",
        reasons.PRIVATE,
    ),
    *refused(
        "vLLM",
        "--show-hidden-metrics-for-version --collect-detailed-traces --custom-histogram-buckets "
        "--enable-layerwise-nvtx-tracing --enable-server-load-tracking --cudagraph-metrics",
        reasons.METRICS,
    ),
    *refused("vLLM", "--fingerprint-*", "`system_fingerprint` is always there"),
)
