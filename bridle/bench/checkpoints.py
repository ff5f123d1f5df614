"""Generated checkpoints for benchmarks: real shapes and random weights, without a download.

Speed does not depend on the values of the weights, as long as nothing overflows and the output never ends early.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridle.errors import InvalidRequest

#: Settings of transformers by name. `20m` is a Llama, `0.5b` has the shape of Qwen2-0.5B.
SHAPES: dict[str, dict[str, Any]] = {
    "20m": {
        "model_type": "llama",
        "vocab_size": 8_192,
        "hidden_size": 384,
        "intermediate_size": 1_024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4_096,
    },
    "0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4_096,
        "tie_word_embeddings": True,
    },
}
#: Sizes that are measured only if they are requested: `1.5b` has the shape of Qwen2-1.5B.
LARGE_SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {
        **SHAPES["0.5b"],
        "hidden_size": 1_536,
        "intermediate_size": 8_960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
}


@dataclass(frozen=True, slots=True)
class BenchCheckpoint:
    """A generated checkpoint in the folder `path`. Each decoding step reads `step_bytes` bytes of weights, for any
    batch size. Each decoding step also reads `token_bytes` bytes of KV for each token of context of each sequence."""

    name: str
    path: Path
    vocab_size: int
    num_parameters: int
    step_bytes: int
    token_bytes: int
    head_numbers: int = 0  # weights of the output head, which runs only on sampled rows


def make_checkpoint(name: str, folder: Path, *, seed: int = 0) -> BenchCheckpoint:
    """Write the checkpoint called `name` into `folder`, in float32; raise `InvalidRequest` for other names."""
    import torch

    torch.manual_seed(seed)
    model = _made(name)
    model.save_pretrained(folder / name)
    return _described(name, model, folder)


def planned_checkpoint(name: str, folder: Path = Path()) -> BenchCheckpoint:
    """Return the `BenchCheckpoint` that `make_checkpoint` returns, without creating files."""
    import torch

    with torch.device("meta"):
        return _described(name, _made(name), folder)


def _made(name: str) -> Any:
    shapes = SHAPES | LARGE_SHAPES
    if name not in shapes:
        raise InvalidRequest(f"model_size is {name!r}; must be one of {', '.join(shapes)}", "model_size")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(shapes[name])
    config = AutoConfig.for_model(settings.pop("model_type"), bos_token_id=1, eos_token_id=2, **settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _described(name: str, model: Any, folder: Path) -> BenchCheckpoint:
    config = model.config
    return BenchCheckpoint(
        name=name,
        path=folder / name,
        vocab_size=config.vocab_size,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        step_bytes=_step_bytes(model),
        token_bytes=_token_bytes(config),
        head_numbers=config.vocab_size * config.hidden_size,
    )


def _step_bytes(model: Any) -> int:
    """Return the bytes of all weights that a step reads. An embedding table that is only looked up is left out, because
    a step reads one of its rows per token."""
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    total = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    looked_up = 0 if is_tied else embedding.numel() * embedding.element_size()
    return int(total - looked_up)


def _token_bytes(config: Any) -> int:
    """Return the bytes of keys and values of one token in all layers, in float32."""
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    return 2 * 4 * int(config.num_hidden_layers) * int(width)
