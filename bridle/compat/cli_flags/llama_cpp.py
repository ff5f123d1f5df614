"""Flags of llama.cpp's server alone."""

from __future__ import annotations

from bridle.compat.cli_flags import reasons
from bridle.compat.cli_flags.schema import Flag, refused, same, spelt, taken

LLAMA_CPP: tuple[Flag, ...] = (
    *same("llama.cpp", "--alias", "a further name; the first is --served-name"),
    *taken("llama.cpp", "-a", "--alias"),
    *same("llama.cpp", "--models-dir"),
    *spelt("llama.cpp", "--sse-ping-interval", "--ping-interval"),
    *taken("llama.cpp", "--threads -t", "--num-threads"),
    *taken("llama.cpp", "--warmup", "--warm-up"),
    *taken("llama.cpp", "--no-warmup", "--no-warm-up"),
    # The model.
    *refused(
        "llama.cpp",
        "--model-url -mu --docker-repo -dr --hf-file -hff",
        "`bridle serve owner/name:Q4_K_M`, or the file itself (docs/gguf.md)",
    ),
    *refused("llama.cpp", "-hft", "set HF_TOKEN"),
    *refused("llama.cpp", "--offline", "set HF_HUB_OFFLINE=1"),
    *refused("llama.cpp", "--cache-list -cl", "the hub's own cache is used: `hf cache scan`"),
    *refused(
        "llama.cpp",
        "--embd-gemma-default --fim-* --gpt-oss-* --vision-*",
        "there are no presets: `bridle serve owner/name:Q4_K_M`",
    ),
    *refused(
        "llama.cpp",
        "--override-kv --check-tensors --load-mode -lm --lazy-mode -lzm --repack --no-repack -nr --no-host",
        reasons.LOADING,
    ),
    *refused(
        "llama.cpp", "--control-vector --control-vector-*", "there are no control vectors; adapters are (docs/lora.md)"
    ),
    *refused(
        "llama.cpp",
        "--models-preset --models-max --models-autoload --no-models-autoload",
        "--max-model-memory bounds what is loaded, --static keeps it as it is",
    ),
    *refused("llama.cpp", "--sleep-idle-seconds", "models are unloaded when others need the room (docs/http.md)"),
    *refused("llama.cpp", "--embedding --embeddings --embd-* --rerank --reranking --pooling", reasons.POOLED),
    *refused("llama.cpp", "--rope-* --yarn-*", reasons.ROPE),
    # Lengths and memory.
    *refused("llama.cpp", "--cache-type-k --cache-type-v -ctk -ctv", "--kv-cache-dtype, for keys and values alike"),
    *refused("llama.cpp", "--fit --fit-* -fit -fitt -fitc", reasons.SHARE),
    *refused(
        "llama.cpp",
        "--context-shift --no-context-shift --keep",
        "a text ends where the context does; `truncate_prompt_tokens` cuts a prompt",
    ),
    *refused(
        "llama.cpp",
        "--kv-* -kvu -no-kvu -kvo -nkvo --no-kv-unified --no-kv-offload --swa-* --ctx-checkpoints -ctxcp "
        "--checkpoint-min-step -cms --cache-ram -cram --cache-idle-slots --no-cache-idle-slots --defrag-thold -dt",
        "KV is kept in blocks that all requests share; --kv-memory says how many",
    ),
    *refused("llama.cpp", "--cache-reuse", "blocks are found by what is in them (docs/batching.md)"),
    *taken("llama.cpp", "--cache-prompt", "--prefix-caching"),
    *taken("llama.cpp", "--no-cache-prompt", "--no-prefix-caching"),
    *refused(
        "llama.cpp",
        "--slot-save-path --slot-prompt-similarity -sps --lookup-cache-static -lcs --lookup-cache-dynamic -lcd",
        "the prefix cache finds prompts again by itself; nothing is kept on disk",
    ),
    *refused("llama.cpp", "--batch-size -b", "--max-num-batched-tokens bounds a step"),
    *refused("llama.cpp", "--cont-batching -cb --no-cont-batching -nocb", reasons.ALWAYS),
    # Devices.
    *same("SGLang llama.cpp", "--device", "`cpu`, `cuda`, `cuda:1`"),
    *taken("llama.cpp", "-dev", "--device"),
    *refused(
        "llama.cpp",
        "--list-devices --completion-bash",
        "`bridle doctor` says what is there; `bridle --install-completion` completes words",
    ),
    *refused("llama.cpp", "--n-gpu-layers --gpu-layers -ngl", "--device cuda, with all layers"),
    *refused("llama.cpp", "--split-mode -sm --tensor-split -ts --main-gpu -mg --rpc", "--shards (docs/shards.md)"),
    *refused(
        "llama.cpp",
        "--override-tensor -ot --cpu-moe -cmoe --n-cpu-moe -ncmoe --n-cpu-ffn -ncffn --op-offload --no-op-offload",
        reasons.OFFLOAD,
    ),
    *refused(
        "llama.cpp",
        "--threads-batch -tb --threads-http --cpu-* -C -Cr -Cb -Crb --prio --prio-batch --poll --poll-batch --numa",
        reasons.CPU,
    ),
    *refused("llama.cpp", "--flash-attn -fa --backend-sampling -bs", reasons.KERNELS),
    # Pictures and the like.
    *refused(
        "llama.cpp",
        "--mmproj --mmproj-* --no-mmproj --no-mmproj-auto --no-mmproj-offload -mm -mmu --image-* "
        "--mtmd-batch-max-tokens --media-path",
        reasons.MEDIA,
    ),
    *refused("llama.cpp", "--video-*", reasons.VIDEO),
    # Adapters.
    *refused("llama.cpp", "--lora --lora-scaled --lora-init-without-apply", "--adapter NAME=SOURCE"),
    # Drafted tokens.
    *refused(
        "llama.cpp",
        "--draft-min --draft-n-min --spec-draft-n-min --draft-p-min --spec-draft-p-min",
        "not needed: with `--speculate auto` as many are drafted as pay",
    ),
    *refused(
        "llama.cpp",
        "--spec-* --no-spec-draft-backend-sampling --draft-p-split --hf-repo-draft -hfd -hfrd",
        reasons.DRAFTS,
    ),
    *refused(
        "llama.cpp",
        "--threads-draft -td --threads-batch-draft -tbd -Cd -Crd -Cbd --prio-draft --poll-draft "
        "--prio-batch-draft --poll-batch-draft --cpu-mask-draft",
        "the smaller model computes as the other does: --num-threads, --device",
    ),
    *refused(
        "llama.cpp",
        "--cache-type-k-draft -ctkd --cache-type-v-draft -ctvd --override-tensor-draft -otd --cpu-moe-draft "
        "-cmoed --n-cpu-moe-draft -ncmoed --device-draft -devd --gpu-layers-draft --n-gpu-layers-draft -ngld",
        "the smaller model computes as the other does: --device, --kv-cache-dtype",
    ),
    # What requests ask for.
    *refused("llama.cpp", "--grammar --grammar-file --json-schema --json-schema-file -j -jf", reasons.REQUEST),
    *refused(
        "llama.cpp",
        "--predict --n-predict -n --seed -s --ignore-eos --temp --temperature --top-k --top-p --min-p "
        "--top-nsigma --top-n-sigma --xtc-* --typical --typical-p --repeat-* --presence-penalty "
        "--frequency-penalty --dry-* --adaptive-* --dynatemp-* --mirostat --mirostat-* --logit-bias -l --samplers "
        "--sampler-seq --sampling-seq",
        reasons.REQUEST,
    ),
    *refused(
        "llama.cpp",
        "--prompt -p --file -f --binary-file -bf --escape --no-escape -e --reverse-prompt -r --special -sp",
        "a server has no prompt; `bridle generate` has",
    ),
    *refused("llama.cpp", "--jinja", reasons.ALWAYS),
    *refused("llama.cpp", "--no-jinja --chat-template-file", reasons.TEMPLATE),
    *refused(
        "llama.cpp",
        "--chat-template-kwargs --reasoning-effort --reasoning-budget --reasoning-budget-message --reasoning -rea "
        "--prefill-assistant --no-prefill-assistant",
        reasons.REQUEST,
    ),
    *refused(
        "llama.cpp",
        "--reasoning-format --reasoning-preserve --no-reasoning-preserve --skip-chat-parsing --no-skip-chat-parsing",
        reasons.TOLD,
    ),
    *refused("llama.cpp", "--spm-infill", "there is no filling in between prefix and suffix"),
    *refused(
        "llama.cpp",
        "--tools --tools-runtime --mcp-servers-config --mcp-servers-json --agent --no-agent -ag -no-ag",
        "--tools takes a file of tools here, with servers of the Model Context Protocol in it (docs/tools.md)",
    ),
    # The server.
    *refused(
        "llama.cpp", "--timeout -to", "--receive-timeout and --send-timeout; --request-timeout for a whole request"
    ),
    *refused(
        "llama.cpp",
        "--cors-origins --cors-methods --cors-headers --cors-credentials --no-cors-credentials",
        "--cors-origin, once for each",
    ),
    *refused("llama.cpp", "--api-prefix --reuse-port --path", reasons.PROXY),
    *refused(
        "llama.cpp",
        "--ui --no-ui --ui-* --no-ui-mcp-proxy --webui --no-webui --webui-* --no-webui-mcp-proxy",
        reasons.PLAYGROUND,
    ),
    *refused("llama.cpp", "--props --slots --no-slots", "/info and /v1/status say it, without a switch"),
    *refused("llama.cpp", "--perf --no-perf", reasons.METRICS),
    *refused("llama.cpp", "--tags", "/v1/models has names; there are no tags"),
    *refused("llama.cpp", "--log-* -v --verbose --verbosity -lv --no-log-*", reasons.LOGGING),
)
