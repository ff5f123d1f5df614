"""Flags that only llama.cpp's server has."""

from __future__ import annotations

from bridle.compat.cli_flags import reasons
from bridle.compat.cli_flags.schema import Flag, refusals, same, spelt, taken

LLAMA_CPP: tuple[Flag, ...] = (
    *same("llama.cpp", "--alias", "the alias is an additional name; --served-name sets the first name"),
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
            "--docker-repo -dr --hf-file -hff": "serve `owner/name:Q4_K_M` or the file itself (docs/gguf.md)",
            "-hft": "set the environment variable HF_TOKEN",
            "--offline": "set the environment variable HF_HUB_OFFLINE=1",
            "--cache-list -cl": "models are in the Hugging Face cache; `hf cache scan` lists them",
            "--embd-gemma-default "
            "--fim-* --gpt-oss-* --vision-*": "bridle has no presets; use `bridle serve owner/name:Q4_K_M`",
            "--override-kv "
            "--check-tensors --load-mode -lm --lazy-mode -lzm --repack --no-repack -nr --no-host": reasons.LOADING,
            "--control-vector --control-vector-*": "use `--load-control-vector` (docs/control-vectors.md)",
            "--models-preset --models-max --models-autoload "
            "--no-models-autoload": "use --max-model-memory to limit loaded models, or --static to keep them loaded",
            "--sleep-idle-seconds": "the server unloads a model when another needs memory (docs/multiple-models.md)",
            "--embedding --embeddings --embd-* --rerank --reranking --pooling": reasons.POOLED,
            "--rope-* --yarn-*": reasons.ROPE,
            # Lengths and memory.
            "--cache-type-k --cache-type-v -ctk -ctv": "use --kv-cache-dtype, which applies to keys and values",
            "--fit --fit-* -fit -fitt -fitc": reasons.SHARE,
            "--context-shift "
            "--no-context-shift --keep": "outputs end with the context; `truncate_prompt_tokens` truncates prompts",
            "--kv-* -kvu -no-kvu -kvo -nkvo --no-kv-unified --no-kv-offload --swa-* --ctx-checkpoints -ctxcp "
            "--checkpoint-min-step -cms --cache-ram -cram --cache-idle-slots --no-cache-idle-slots "
            "--defrag-thold -dt": "all requests share the KV blocks; --kv-memory sets their total size",
            "--cache-reuse": "the prefix cache finds blocks by their content (docs/batching.md)",
        },
    ),
    *taken("llama.cpp", "--cache-prompt", "--prefix-caching"),
    *same("llama.cpp", "--reasoning-format", "the values are `none`, `auto` and `deepseek`"),
    *same("llama.cpp", "--mmproj"),
    *taken("llama.cpp", "-mm", "--mmproj"),
    *taken("llama.cpp", "--reasoning-budget-message", "--thinking-budget-message"),
    *taken("llama.cpp", "--no-cache-prompt", "--no-prefix-caching"),
    *refusals(
        "llama.cpp",
        {
            "--slot-save-path --slot-prompt-similarity -sps --lookup-cache-static -lcs "
            "--lookup-cache-dynamic -lcd": "the prefix cache finds earlier prompts; --kv-store keeps KV blocks on disk",
            "--batch-size -b": "use --max-num-batched-tokens, which limits the tokens of a step",
            "--cont-batching -cb --no-cont-batching -nocb": reasons.ALWAYS,
        },
    ),
    # Devices.
    *same("SGLang llama.cpp", "--device", "values are for example `cpu`, `cuda` and `cuda:1`"),
    *taken("llama.cpp", "-dev", "--device"),
    *refusals(
        "llama.cpp",
        {
            "--list-devices "
            "--completion-bash": "`bridle doctor` shows devices; `bridle --install-completion` prepares your shell",
            "--n-gpu-layers --gpu-layers -ngl": "use --device cuda, which puts all layers on the GPU",
            "--split-mode -sm --tensor-split -ts --main-gpu -mg --rpc": "use --shards (docs/shards.md)",
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
            "--lora --lora-scaled --lora-init-without-apply": "use --adapter NAME=SOURCE",
            # Draft tokens.
            "--draft-min --draft-n-min --spec-draft-n-min "
            "--draft-p-min --spec-draft-p-min": "`--speculate auto` adapts the number of draft tokens",
            "--spec-* --no-spec-draft-backend-sampling --draft-p-split --hf-repo-draft -hfd -hfrd": reasons.DRAFTS,
            "--threads-draft -td --threads-batch-draft -tbd -Cd -Crd -Cbd --prio-draft --poll-draft "
            "--prio-batch-draft --poll-batch-draft "
            "--cpu-mask-draft": "the draft model has the main model's --num-threads and --device",
            "--cache-type-k-draft -ctkd --cache-type-v-draft -ctvd --override-tensor-draft -otd --cpu-moe-draft "
            "-cmoed --n-cpu-moe-draft -ncmoed --device-draft -devd --gpu-layers-draft "
            "--n-gpu-layers-draft -ngld": "the draft model has the main model's --device and --kv-cache-dtype",
            # Settings of requests.
            "--grammar --grammar-file --json-schema --json-schema-file -j -jf": reasons.REQUEST,
            "--predict --n-predict -n --seed -s --ignore-eos --temp --temperature --top-k --top-p --min-p "
            "--top-nsigma --top-n-sigma --xtc-* --typical --typical-p --repeat-* --presence-penalty "
            "--frequency-penalty --dry-* --adaptive-* --dynatemp-* --mirostat --mirostat-* --logit-bias -l --samplers "
            "--sampler-seq --sampling-seq": reasons.REQUEST,
            "--prompt -p --file -f --binary-file -bf --escape "
            "--no-escape -e --reverse-prompt -r --special -sp": "only `bridle generate` takes a prompt",
            "--jinja": reasons.ALWAYS,
            "--no-jinja --chat-template-file": reasons.TEMPLATE,
            "--chat-template-kwargs --reasoning-effort --reasoning-budget --reasoning -rea "
            "--prefill-assistant --no-prefill-assistant": reasons.REQUEST,
            "--reasoning-preserve --no-reasoning-preserve --skip-chat-parsing --no-skip-chat-parsing": reasons.TOLD,
            "--spm-infill": "only Ollama's route /api/generate supports fill-in-the-middle",
            "--tools --tools-runtime --mcp-servers-config --mcp-servers-json --agent --no-agent -ag -no-ag": (
                "bridle's --tools is a file that lists tools and MCP servers (docs/tools.md)"
            ),
            # The server.
            "--timeout -to": "use --receive-timeout and --send-timeout, or --request-timeout for a whole request",
            "--cors-origins "
            "--cors-methods --cors-headers --cors-credentials --no-cors-credentials": "use --cors-origin",
            "--api-prefix --reuse-port --path": reasons.PROXY,
            "--ui "
            "--no-ui --ui-* --no-ui-mcp-proxy --webui --no-webui --webui-* --no-webui-mcp-proxy": reasons.PLAYGROUND,
            "--props --slots --no-slots": "/info and /v1/status always return this information",
            "--perf --no-perf": reasons.METRICS,
            "--tags": "models have names in /v1/models, but no tags",
            "--log-* -v --verbose --verbosity -lv --no-log-*": reasons.LOGGING,
        },
    ),
)
