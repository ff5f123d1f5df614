"""GGUF files of the benchmarks' checkpoints, for engines that read such files: real shapes, a vocabulary of nothing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from bridle.bench.checkpoints import Checkpoint

#: Types that are compared.
FILE_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")


def can_write() -> bool:
    """Whether such files can be made here."""
    return find_spec("gguf") is not None


def has_llamacpp() -> bool:
    """Whether llama.cpp is there to be compared with."""
    return can_write() and find_spec("llama_cpp") is not None


def write_files(checkpoint: Checkpoint, folder: Path) -> dict[str, Path]:
    """The checkpoint in each of `FILE_TYPES`."""
    from transformers import AutoModelForCausalLM

    from bridle.gguf.vocabulary_writer import VocabularyFields
    from bridle.gguf.writer import write_gguf

    model = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tokens = [f"t{number}" for number in range(checkpoint.vocab_size)]
    vocabulary = VocabularyFields(
        "gpt2", "qwen2", tokens, [1] * len(tokens), merges=["t 0"], ids={"bos": 1, "eos": 2}, flags={}
    )
    files = {}
    for name in FILE_TYPES:
        files[name] = folder / f"{checkpoint.name}-{name}.gguf"
        if not files[name].exists():
            write_gguf(files[name], model.config, tensors, vocabulary, name, checkpoint.name)
    return files
