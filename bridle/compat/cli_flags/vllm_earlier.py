"""Flags that earlier versions of vLLM had, which people still type."""

from __future__ import annotations

from bridle.compat.cli_flags import reasons
from bridle.compat.cli_flags.schema import Flag, refused, same

_STEPS = "how steps are filled is settled: docs/batching.md"
_EXACT = "drafts never change a text: its tokens are drawn as without them"
_SMALLER = "the smaller model computes as the other does: --device, --quantization"

VLLM_EARLIER: tuple[Flag, ...] = (
    *same("vLLM SGLang", "--device", "`cpu`, `cuda`, `cuda:1`"),
    # The model.
    *refused("vLLM", "--task --override-pooler-config", reasons.POOLED),
    *refused("vLLM", "--rope-theta", "the folder's config.json is read: change it there"),
    *refused("vLLM", "--quantization-param-path", reasons.QUANTIZED),
    *refused("vLLM", "--override-attention-dtype", "--dtype is that of the whole model"),
    *refused("vLLM", "--override-neuron-config", "models are computed on CPUs and CUDA devices: --device"),
    *refused("vLLM", "--tokenizer-pool-*", reasons.TOKENIZERS),
    *refused("vLLM", "--logits-processor-pattern", "--controller-class: a class that decides about each token"),
    *refused("vLLM", "--image-*", "pictures are prepared as the checkpoint says"),
    *refused("vLLM", "--disable-mm-preprocessor-cache --enable-multimodal-encoder-data-parallel", reasons.MEDIA),
    # Memory and steps.
    *refused(
        "vLLM",
        "--swap-space --preemption-mode",
        "what is preempted is computed again, from the prefix cache where it can be",
    ),
    *refused("vLLM", "--calculate-kv-scales", "the KV cache is --kv-memory and --kv-cache-dtype"),
    *refused("vLLM", "--max-seq-len-to-capture --max-context-len-to-capture --cuda-graph-sizes", reasons.GRAPHS),
    *refused(
        "vLLM",
        "--num-scheduler-steps --scheduler-delay-factor --multi-step-stream-outputs --max-paddings "
        "--use-v2-block-manager --disable-async-output-proc",
        _STEPS,
    ),
    *refused(
        "vLLM",
        "--max-num-partial-prefills --max-long-partial-prefills",
        "--max-num-batched-tokens, --max-batch-prefill-tokens and --max-num-seqs bound a step",
    ),
    *refused("vLLM", "-O* --enable-bf16x3-router-gemm", reasons.KERNELS),
    *refused("vLLM", "--num-redundant-experts", reasons.EXPERTS),
    *refused("vLLM", "--worker-use-ray --engine-use-ray", reasons.RAY),
    *refused("vLLM", "--disable-frontend-multiprocessing", "one process answers; the engines beside it are --replicas"),
    # Adapters.
    *refused("vLLM", "--qlora-adapter-name-or-path", "--adapter NAME=SOURCE"),
    *refused(
        "vLLM",
        "--enable-lora-bias --long-lora-scaling-factors",
        "adapters are computed as docs/lora.md says; nothing has to be set",
    ),
    *refused(
        "vLLM",
        "--enable-prompt-adapter --prompt-adapters --max-prompt-adapters --max-prompt-adapter-token",
        "adapters are LoRA's: --adapter; tuned prompts are not read",
    ),
    # Drafted tokens.
    *refused(
        "vLLM",
        "--ngram-prompt-lookup-max --ngram-prompt-lookup-min --speculative-disable-by-batch-size --num-lookahead-slots "
        "--speculative-disable-mqa-scorer",
        reasons.DRAFTS,
    ),
    *refused(
        "vLLM",
        "--speculative-draft-tensor-parallel-size -spec-draft-tp --speculative-model-quantization "
        "--speculative-max-model-len",
        _SMALLER,
    ),
    *refused("vLLM", "--spec-decoding-acceptance-method --typical-acceptance-sampler-*", _EXACT),
    *refused("vLLM", "--disable-logprobs-during-spec-decoding", "drafted tokens have log-probabilities like others"),
    # What requests ask for.
    *refused("vLLM", "--guided-decoding-backend --guided-decoding-disable-fallback", "there is one, llguidance"),
    *refused(
        "vLLM",
        "--guided-decoding-disable-any-whitespace",
        "a request's `constraint` takes `whitespace`, fixed or flexible",
    ),
    *refused(
        "vLLM",
        "--guided-decoding-disable-additional-properties",
        "an object with `properties` has no others, by default (docs/constraints.md)",
    ),
    *refused(
        "vLLM", "--enable-reasoning", "constraints and thoughts are always there; each request says what it wants"
    ),
    *refused("vLLM", "--expand-tools-even-if-tool-choice-none", reasons.TOLD),
    *refused("vLLM", "--disable-log-requests", reasons.PRIVATE),
)
