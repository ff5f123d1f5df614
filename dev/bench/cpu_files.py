"""Files of `bridle bench cpu`: checkpoints with real shapes, and GGUF files of these checkpoints with a placeholder
vocabulary. The files are made once in a folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bridle.bench.checkpoints import BenchCheckpoint, make_checkpoint
from bridle.bench.control_guests import write_tokenizer
from bridle.cpu_kernels.features import cpu_features

#: The compared types of GGUF files.
FILE_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
#: llama.cpp's names of processor features that its products use.
_FEATURES = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
}


def can_write() -> bool:
    """Return whether GGUF files can be written in this environment."""
    return find_spec("gguf") is not None


def has_llamacpp() -> bool:
    """Return whether llama.cpp is available for comparison."""
    return can_write() and find_spec("llama_cpp") is not None


@cache
def describe_llamacpp() -> dict[str, Any] | None:
    """Return llama.cpp's version, and whether it was built for this processor. A generic build of llama.cpp would make
    the comparison unfair. Returns None if llama.cpp is missing."""
    if not has_llamacpp():
        return None
    from bridle.llamacpp.library import library

    told = library().llama_print_system_info().decode()
    used = {pair.split("=")[0].split(":")[-1].strip() for pair in told.split("|") if pair.strip().endswith("= 1")}
    lacks = [name for name, theirs in _FEATURES.items() if name in cpu_features() and theirs not in used]
    return {
        "version": version("llama-cpp-python"),
        "features": sorted(used),
        "lacks": lacks,
        "is_native": not lacks,
    }


def made_checkpoint(name: str, folder: Path) -> BenchCheckpoint:
    """Return the checkpoint called `name` in `folder`, with a tokenizer. The checkpoint is made if it does not
    exist."""
    note = folder / f"{name}.json"
    if not note.is_file():
        made = make_checkpoint(name, folder)
        write_tokenizer(made.path, made.vocab_size)
        note.write_text(json.dumps(asdict(made) | {"path": None}))
    return BenchCheckpoint(**json.loads(note.read_text()) | {"path": folder / name})


def weight_bytes(checkpoint: BenchCheckpoint, folder: Path, form: str) -> float | None:
    """Return the bytes of weights that a step reads from the file in format `form`. They exclude an embedding that is
    only looked up. Returns None if there is no such file."""
    path = _file(checkpoint, folder, form)
    if not path.is_file():
        return None
    from bridle.gguf.reader import open_gguf

    tensors = open_gguf(path).tensors
    looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
    return float(sum(entry.num_bytes for name, entry in tensors.items() if name not in looked_up))


def _file(checkpoint: BenchCheckpoint, folder: Path, kind: str) -> Path:
    return folder / f"{checkpoint.name}-{kind}.gguf"


def write_file(checkpoint: BenchCheckpoint, folder: Path, kind: str) -> Path:
    """Write the checkpoint as a GGUF file of type `kind`, one of `FILE_TYPES`; return its path."""
    path = _file(checkpoint, folder, kind)
    if path.exists():
        return path
    from transformers import AutoModelForCausalLM

    from bridle.gguf.vocabulary_writer import VocabularyFields
    from bridle.gguf.writer import write_gguf

    model = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tokens = [f"t{number}" for number in range(checkpoint.vocab_size)]
    vocabulary = VocabularyFields(
        "gpt2", "qwen2", tokens, [1] * len(tokens), merges=["t 0"], ids={"bos": 1, "eos": 2}, flags={}
    )
    write_gguf(path, model.config, tensors, vocabulary, kind, checkpoint.name)
    return path
