"""Flags that only SGLang 0.5 has."""

from __future__ import annotations

from bridle.compat.cli_flags import reasons
from bridle.compat.cli_flags.schema import Flag, refusals, same, taken

SGLANG: tuple[Flag, ...] = (
    *same("SGLang", "--ssl-keyfile-password --watchdog-timeout"),
    *taken("SGLang", "--page-size", "--block-size"),
    *taken("SGLang", "--max-queued-requests", "--max-waiting"),
    *taken("SGLang", "--disable-radix-cache", "--no-prefix-caching"),
    *refusals(
        "SGLang",
        {
            "--max-total-tokens": "bridle gives this name TGI's meaning, the tokens of one request; use "
            "--max-batch-total-tokens",
            # The model.
            "--is-embedding": reasons.POOLED,
            "--model-config-parser --json-model-override-args": "change config.json in the model's folder",
            "--quantization-param-path --modelopt-* --quantize-and-serve --rl-quant-profile --qsa-indexer-dtype "
            "--fp8-gemm-backend --fp4-gemm-backend --bf16-gemm-backend": reasons.QUANTIZED,
            "--startup-weight-load-mode --weight-loader-* --custom-weight-loader --model-checksum "
            "--delete-ckpt-after-loading --decrypted-* --modelexpress-config --weight-cache-*": reasons.LOADING,
            "--checkpoint-engine-* "
            "--remote-instance-* --weight-version --rl-on-policy-target --engine-info-bootstrap-port": reasons.TRAINING,
            "--sampling-defaults": "use --generation-config: `auto` means SGLang's `model`, and `none` means `openai`",
            "--preferred-sampling-params --sampling-backend": "each request sets its sampling parameters",
            "--random-seed": "set `seed` in each request",
            "--enable-deterministic-inference": (
                "a request with the same `seed` gets the same output on the same device (docs/sampling.md)"
            ),
            "--tokenizer-backend --tokenizer-worker-num --detokenizer-worker-num --enable-dynamic-batch-tokenizer "
            "--dynamic-batch-* --enable-tokenizer-batch-encode --disable-tokenizer-batch-decode": reasons.TOKENIZERS,
            # Lengths and memory.
            "--swa-* --c128-page-size --disable-hybrid-swa-memory --max-mamba-cache-size --radix-eviction-* "
            "--radix-cache-backend --enable-page-major-kv-layout --enable-unified-memory --enable-session-radix-cache "
            "--disable-chunked-prefix-cache --enable-cache-report": (
                "the KV cache has only the flags --kv-memory, --kv-cache-dtype and --prefix-caching"
            ),
            "--enable-hierarchical-cache --enable-hicache --hicache-* --enable-lmcache --lmcache-config-file "
            "--enable-flexkv --flexkv-config-file --enable-hisparse --hisparse-config --hierarchical-* "
            "--enable-unified-cache-external-linker --unified-* --enable-linker-mla-dedup "
            "--enable-kv-cache-sharding": "--kv-host-bytes keeps KV in host memory, and --kv-store keeps KV on disk",
            "--enable-memory-saver "
            "--enable-weights-cpu-backup --enable-draft-weights-cpu-backup --ple-*": reasons.OFFLOAD,
            "--prefill-only-disable-kv-cache": "scoring does not need a setting of the KV cache",
            # Batching.
            "--enable-priority-scheduling --disable-priority-preemption --default-priority-value "
            "--abort-on-priority-when-disabled "
            "--priority-*": "set `priority` in a request; a wait of --priority-seconds counts as one level",
            "--retraction-policy --num-reserved-decode-tokens": (
                "the engine computes a preempted request again, except for the tokens in the prefix cache"
            ),
            "--prefill-* --enable-prefill-delayer --enable-dynamic-chunking --enable-mixed-chunk "
            "--disable-overlap-schedule --num-continuous-decode-steps --scheduler-recv-interval "
            "--min-free-slots-delay": "the scheduler fills each step by fixed rules (docs/batching.md)",
            "--allow-auto-truncate": "set `truncate_prompt_tokens` in a request",
            # Devices, processes, other machines.
            "--base-gpu-id --gpu-id-step": "use --device cuda:1, or the environment variable CUDA_VISIBLE_DEVICES",
            "--numa-node": reasons.CPU,
            "--dist-* --nccl-* --gated-launch-port --use-ray --load-balance-method --load-snapshot-publish-interval "
            "--load-publish-endpoint": reasons.RAY,
            "--attn-* --attention-context-parallel-size --attention-data-parallel-size --enable-prefill-cp "
            "--cp-strategy --enable-cp-decode-attn-tp --enable-dsa-* --enable-dp-* --enable-tp-lm-head-all-to-all "
            "--enable-attn-tp-input-scattered --enable-dense-mlp-attn-tp --enable-layernorm-sp "
            "--enable-megamoe-for-layernorm-sp --disable-attn-tp-gather --enable-p2p-check --dwdp-size": reasons.PARTS,
            "--moe-* --ep-* --ep --expert-* --max-ep-size --enable-shared-experts-attn-tp --shared-experts-tp-size "
            "--deepep-* --fuseep-mode --flashinfer-a2a-dispatch-type --flashinfer-mxfp4-moe-precision "
            "--init-expert-location --mooncake-ib-device --enable-waterfill --enable-paged-experts "
            "--paged-experts-num-resident --kt-* --enable-two-batch-overlap --enable-single-batch-overlap --tbo-* "
            "--enable-w4a4-mxfp4-megamoe --disable-shared-experts-fusion --enforce-shared-experts-fusion "
            "--disable-flashinfer-cutlass-moe-fp4-allgather --experts-shared-outer-loras": reasons.EXPERTS,
            "--soft-watchdog-timeout": "with --isolate-model, the server restarts a lost model process",
            "--sleep-on-idle --gc-*": "an idle server sleeps without a flag",
            "--disaggregation-* --enable-pd-role-switch --optimistic-prefill-attempts --encoder-* "
            "--enable-adaptive-dispatch-to-encoder --decoupled-spec-* --enable-pdmux --pdmux-config-path "
            "--sm-group-num": reasons.TRANSFER,
        },
    ),
    *taken("SGLang", "--disable-cuda-graph", "--enforce-eager"),
    *refusals(
        "SGLang",
        {
            "--cuda-graph-* --context-bucket --disable-prefill-cuda-graph "
            "--disable-decode-cuda-graph --disable-cuda-graph-padding --enable-profile-cuda-graph "
            "--enable-cudagraph-gc --debug-cuda-graph": reasons.GRAPHS,
            "--enable-torch-compile --enable-torch-compile-debug-mode --torch-compile-max-bs "
            "--decode-attention-backend --enable-lean-attention --enable-nvidia-megakernel --enable-amd-monokernel "
            "--monokernel-backend --dsa-* --dsv4-* --disable-flashinfer-autotune --flashinfer-* --triton-* "
            "--enable-fused-qk-norm-rope --enable-precise-embedding-interpolation --enable-deepseek-v4-fp4-indexer "
            "--enable-fp32-lm-head --enable-tf32-matmul --enable-fused-moe-sum-all-reduce --enable-nccl-nvls "
            "--enable-symm-mem --enable-torch-symm-mem --enable-mscclpp --enable-scattered-sconv --pre-warm-nccl "
            "--boundary-reduction --enable-quant-communications --enforce-disable-flashinfer-allreduce-fusion "
            "--enable-flashinfer-allreduce-fusion --enable-aiter-allreduce-fusion --disable-aiter-* "
            "--mlx-enable-sampling --enable-mis": reasons.KERNELS,
            "--int8-mamba-ckpt-size --enable-int8-mamba-checkpoint --enable-linear-replayssm "
            "--enable-linear-replayssm-spec "
            "--enable-encoder-swa-bounded-replay --enable-decoder-swa-bounded-replay": reasons.MAMBA,
            "--dllm-*": "bridle serves only causal models, which generate token by token",
            # Images and other media.
            "--enable-multimodal --enable-broadcast-mm-inputs-process --enable-prefix-mm-cache "
            "--media-url-max-file-size-mb --trust-mm-content-hashes --limit-mm-data-per-request --language-only "
            "--enable-mm-global-cache --image-processor-backend --disable-fast-image-processor": reasons.MEDIA,
            "--asr-*": reasons.TEXT_ONLY,
            # Adapters.
            "--max-loaded-loras": "set --adapter-memory and --adapter-host-memory in bytes",
            "--enable-lora-overlap-loading "
            "--max-lora-chunk-size": "the computation of adapters has no settings (docs/lora.md)",
            # Draft tokens.
            "--speculative-* --enable-multi-layer-eagle --spec-trace-dir --uno-lora-path": reasons.DRAFTS,
            # Settings of requests.
            "--constrained-json-*": "set `whitespace` in a request's `constraint` to fixed or flexible",
            "--disable-outlines-disk-cache": (
                "the server keeps compiled constraints in memory; llguidance is the only grammar backend"
            ),
            "--enable-custom-logit-processor": "use --controller-class, which loads a class that controls each token",
            "--enable-watermark": "a policy of the kind `watermark` marks all outputs (docs/policies.md)",
            "--hf-chat-template-name --completion-template": reasons.TEMPLATE,
            "--strip-thinking-cache --enable-strict-thinking": reasons.TOLD,
            "--enable-response-store --file-storage-path --enable-streaming-session": (
                "the server keeps a response for an hour if `store` asks for it; the prefix cache finds earlier prompts"
            ),
            "--return-input-ids --return-output-ids --enable-return-* --return-hidden-states-mode --return-aux-* "
            "--sampling-mask-max-tokens": (
                "log-probabilities contain each token; /v1/embeddings returns the last hidden state"
            ),
            "--stream-response-default-include-usage "
            "--incremental-streaming-output --batch-notify-size": "set `stream` and `stream_options` in each request",
            # The server.
            "--admin-api-key": "use --keys FILE; `bridle keys add USER --admin` adds the key of an admin",
            "--fastapi-root-path --enable-http-worker-reuseport --enable-http2 --http2-*": reasons.PROXY,
            "--smg-* --sidecar --sidecar-args": reasons.MULTI,
            "--skip-server-warmup --warmups": "use --no-warm-up, which loads a model without running a step",
            "--log-level-http "
            "--uvicorn-access-log-exclude-prefixes --decode-log-interval --show-time-cost": reasons.LOGGING,
            "--log-requests --log-requests-*": reasons.PRIVATE,
            "--enable-metrics-for-all-schedulers --tokenizer-metrics-* --extra-metric-labels --bucket-* "
            "--prompt-tokens-buckets --generation-tokens-buckets --enable-request-time-stats-logging "
            "--enable-forward-pass-metrics --forward-pass-metrics-* --export-metrics-to-file "
            "--export-metrics-to-file-dir": reasons.METRICS,
            "--enable-trace --trace-modules": "use --otlp-endpoint, which turns traces on",
            "--crash-dump-folder --kv-canary --kv-canary-* --debug-tensor-dump-* --forward-hooks "
            "--msprobe-dump-config --enable-layerwise-nvtx-marker": reasons.DEBUGGING,
        },
    ),
)
