"""Flags that only llama.cpp's server has."""

from __future__ import annotations

from bridle.compat.cli_flags import reasons
from bridle.compat.cli_flags.schema import Flag, refusals, same, spelt, taken

LLAMA_CPP: tuple[Flag, ...] = (
    *same("llama.cpp", "--alias", "an additional name; --served-name sets the first"),
    *taken("llama.cpp", "-a", "--alias"),
    *same("llama.cpp", "--models-dir"),
    *spelt("llama.cpp", "--sse-ping-interval", "--ping-interval"),
    *taken("llama.cpp", "--threads -t", "--num-threads"),
    *taken("llama.cpp", "--warmup", "--warm-up"),
    *taken("llama.cpp", "--no-warmup", "--no-warm-up"),
    # The model.
    *refusals(
        "llama.cpp",
        {
            "--model-url -mu "
            "--docker-repo -dr --hf-file -hff": "`bridle serve owner/name:Q4_K_M`, or the file itself (docs/gguf.md)",
            "-hft": "set HF_TOKEN",
            "--offline": "set HF_HUB_OFFLINE=1",
            "--cache-list -cl": "the hub's own cache is used: `hf cache scan`",
            "--embd-gemma-default "
            "--fim-* --gpt-oss-* --vision-*": "there are no presets: `bridle serve owner/name:Q4_K_M`",
            "--override-kv "
            "--check-tensors --load-mode -lm --lazy-mode -lzm --repack --no-repack -nr --no-host": reasons.LOADING,
            "--control-vector --control-vector-*": "`--load-control-vector` (docs/control-vectors.md)",
            "--models-preset --models-max --models-autoload "
            "--no-models-autoload": "--max-model-memory limits the loaded models, --static keeps them loaded",
            "--sleep-idle-seconds": "models are unloaded when other models need memory (docs/multiple-models.md)",
            "--embedding --embeddings --embd-* --rerank --reranking --pooling": reasons.POOLED,
            "--rope-* --yarn-*": reasons.ROPE,
            # Lengths and memory.
            "--cache-type-k --cache-type-v -ctk -ctv": "--kv-cache-dtype, for keys and values alike",
            "--fit --fit-* -fit -fitt -fitc": reasons.SHARE,
            "--context-shift "
            "--no-context-shift --keep": "outputs end at the end of the context; `truncate_prompt_tokens` cuts prompts",
            "--kv-* -kvu -no-kvu -kvo -nkvo --no-kv-unified --no-kv-offload --swa-* --ctx-checkpoints -ctxcp "
            "--checkpoint-min-step -cms --cache-ram -cram --cache-idle-slots --no-cache-idle-slots "
            "--defrag-thold -dt": "all requests share the KV blocks; --kv-memory sets their total size",
            "--cache-reuse": "cached blocks are found by their content (docs/batching.md)",
        },
    ),
    *taken("llama.cpp", "--cache-prompt", "--prefix-caching"),
    *same("llama.cpp", "--reasoning-format", "`none`, `auto`, `deepseek`"),
    *same("llama.cpp", "--mmproj"),
    *taken("llama.cpp", "-mm", "--mmproj"),
    *taken("llama.cpp", "--reasoning-budget-message", "--thinking-budget-message"),
    *taken("llama.cpp", "--no-cache-prompt", "--no-prefix-caching"),
    *refusals(
        "llama.cpp",
        {
            "--slot-save-path --slot-prompt-similarity -sps --lookup-cache-static -lcs "
            "--lookup-cache-dynamic -lcd": "the prefix cache finds earlier prompts; --kv-store keeps KV on disk",
            "--batch-size -b": "--max-num-batched-tokens limits a step",
            "--cont-batching -cb --no-cont-batching -nocb": reasons.ALWAYS,
        },
    ),
    # Devices.
    *same("SGLang llama.cpp", "--device", "`cpu`, `cuda`, `cuda:1`"),
    *taken("llama.cpp", "-dev", "--device"),
    *refusals(
        "llama.cpp",
        {
            "--list-devices "
            "--completion-bash": "`bridle doctor` shows the devices; `bridle --install-completion` installs completion",
            "--n-gpu-layers --gpu-layers -ngl": "--device cuda, with all layers",
            "--split-mode -sm --tensor-split -ts --main-gpu -mg --rpc": "--shards (docs/shards.md)",
            "--override-tensor "
            "-ot --cpu-moe -cmoe --n-cpu-moe -ncmoe --n-cpu-ffn -ncffn --op-offload --no-op-offload": reasons.OFFLOAD,
            "--threads-batch "
            "-tb --threads-http --cpu-* -C -Cr -Cb -Crb --prio --prio-batch --poll --poll-batch --numa": reasons.CPU,
            "--flash-attn -fa --backend-sampling -bs": reasons.KERNELS,
            # Images and other media.
            "--mmproj-* --no-mmproj --no-mmproj-auto --no-mmproj-offload -mmu --image-* "
            "--mtmd-batch-max-tokens --media-path": reasons.MEDIA,
            "--video-*": reasons.VIDEO,
            # Adapters.
            "--lora --lora-scaled --lora-init-without-apply": "--adapter NAME=SOURCE",
            # Draft tokens.
            "--draft-min --draft-n-min --spec-draft-n-min "
            "--draft-p-min --spec-draft-p-min": "not needed: `--speculate auto` adapts the number of draft tokens",
            "--spec-* --no-spec-draft-backend-sampling --draft-p-split --hf-repo-draft -hfd -hfrd": reasons.DRAFTS,
            "--threads-draft -td --threads-batch-draft -tbd -Cd -Crd -Cbd --prio-draft --poll-draft "
            "--prio-batch-draft --poll-batch-draft "
            "--cpu-mask-draft": "the smaller model computes as the other does: --num-threads, --device",
            "--cache-type-k-draft -ctkd --cache-type-v-draft -ctvd --override-tensor-draft -otd --cpu-moe-draft "
            "-cmoed --n-cpu-moe-draft -ncmoed --device-draft -devd --gpu-layers-draft "
            "--n-gpu-layers-draft -ngld": "the smaller model computes as the other does: --device, --kv-cache-dtype",
            # Settings of requests.
            "--grammar --grammar-file --json-schema --json-schema-file -j -jf": reasons.REQUEST,
            "--predict --n-predict -n --seed -s --ignore-eos --temp --temperature --top-k --top-p --min-p "
            "--top-nsigma --top-n-sigma --xtc-* --typical --typical-p --repeat-* --presence-penalty "
            "--frequency-penalty --dry-* --adaptive-* --dynatemp-* --mirostat --mirostat-* --logit-bias -l --samplers "
            "--sampler-seq --sampling-seq": reasons.REQUEST,
            "--prompt -p --file -f --binary-file -bf --escape "
            "--no-escape -e --reverse-prompt -r --special -sp": "a server has no prompt; use `bridle generate`",
            "--jinja": reasons.ALWAYS,
            "--no-jinja --chat-template-file": reasons.TEMPLATE,
            "--chat-template-kwargs --reasoning-effort --reasoning-budget --reasoning -rea "
            "--prefill-assistant --no-prefill-assistant": reasons.REQUEST,
            "--reasoning-preserve --no-reasoning-preserve --skip-chat-parsing --no-skip-chat-parsing": reasons.TOLD,
            "--spm-infill": "fill-in-the-middle is only on Ollama's /api/generate",
            "--tools --tools-runtime --mcp-servers-config --mcp-servers-json --agent --no-agent -ag -no-ag": (
                "--tools takes a file of tools here, with servers of the Model Context Protocol in it (docs/tools.md)"
            ),
            # The server.
            "--timeout -to": "--receive-timeout and --send-timeout; --request-timeout for a whole request",
            "--cors-origins "
            "--cors-methods --cors-headers --cors-credentials --no-cors-credentials": "use --cors-origin",
            "--api-prefix --reuse-port --path": reasons.PROXY,
            "--ui "
            "--no-ui --ui-* --no-ui-mcp-proxy --webui --no-webui --webui-* --no-webui-mcp-proxy": reasons.PLAYGROUND,
            "--props --slots --no-slots": "/info and /v1/status have this information, without a flag",
            "--perf --no-perf": reasons.METRICS,
            "--tags": "/v1/models has names; there are no tags",
            "--log-* -v --verbose --verbosity -lv --no-log-*": reasons.LOGGING,
        },
    ),
)
