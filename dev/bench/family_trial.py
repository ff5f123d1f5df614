"""Tries one architecture of transformers. The trial loads a tiny checkpoint as a server would. It compares the logits
with those of transformers' class, loaded from the same files."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

SERVED, WRONG, REFUSED, CRASHED, UNTRIED = "served", "wrong", "refused", "crashed", "untried"
CAUSAL = "causal"
MULTIMODAL = "multimodal"
_LENGTHS = (100, 41, 7)
_TOLERANCE = 2e-4


def architectures() -> list[tuple[str, str]]:
    """Return all families for which transformers has a decoder, each with the class to try."""
    from transformers.models.auto import modeling_auto as names

    causal = sorted(names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    seeing = sorted(names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return [(family, CAUSAL) for family in causal] + [(family, MULTIMODAL) for family in seeing]


def try_family(family: str, kind: str, folder: str, result: Any) -> None:
    """Send the result and its reason through the pipe `result`. This function is the body of a child process. The
    parent removes `folder`, even if this process is killed."""
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    result.send(_try(family, kind, Path(folder)))


def _try(family: str, kind: str, folder: Path) -> tuple[str, str]:
    from bridle.errors import BridleError
    from bridle.model.checkpoint import inspect_checkpoint
    from bridle.model.support_checks import read_config

    problem = _write(family, kind, folder)
    try:
        if problem:  # many are refused because of their configuration alone
            read_config(inspect_checkpoint(folder))
            return UNTRIED, problem
        return _compare(folder, kind)
    except BridleError as error:
        return REFUSED, str(error).replace(str(folder), "the folder")
    except Exception as error:
        return CRASHED, _line(error)


def _write(family: str, kind: str, folder: Path) -> str:
    """Write a checkpoint. If only a configuration could be written, return the reason, otherwise an empty string."""
    import torch
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    from dev.bench.family_configs import tiny_config
    from tests.fakes.tiny_checkpoints import randomize

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    try:
        config = tiny_config(family)
        model = _class_of(kind).from_config(config)
        if sum(weight.numel() for weight in model.parameters()) > 100_000_000:
            raise ValueError("the default configuration was not made small")
        randomize(model, 0)
        model.save_pretrained(folder)
        return ""
    except Exception as error:
        problem = _line(error)
    try:
        CONFIG_MAPPING[family]().save_pretrained(folder)
    except Exception:  # there is no tokenizer for the class; the family's name is enough
        (folder / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    return problem


def _class_of(kind: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if kind == CAUSAL else AutoModelForImageTextToText


def _compare(folder: Path, kind: str) -> tuple[str, str]:
    import torch

    from bridle.config import ModelConfig
    from bridle.load_progress import silent
    from bridle.model.loader import load_weights
    from bridle.model.parity import run_packed, trial_runner

    loaded = load_weights(ModelConfig(model=str(folder), device="cpu", dtype="float32"), silent)
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 290, (length,), generator=generator).tolist() for length in _LENGTHS]
    runner = trial_runner(loaded.model, loaded.geometry, "auto", torch.float32, torch.device("cpu"), sum(_LENGTHS))
    found, _ = run_packed(runner, texts, torch.device("cpu"))
    model = _class_of(kind).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    error, same, scale = 0.0, 0, 1.0
    with torch.inference_mode():
        for text, have in zip(texts, found, strict=True):
            want = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
            finite = want.isfinite() & (want > torch.finfo(want.dtype).min)
            scale = max(scale, float(want[finite].abs().max()))
            error = max(error, float((want - have)[finite].abs().nan_to_num(1e9).max()))
            same += int((want.argmax(-1) == have.argmax(-1)).sum())
    state = SERVED if error <= _TOLERANCE * scale else WRONG
    return state, f"largest error {error:.2g} of logits up to {scale:.3g}, {same} of {sum(_LENGTHS)} likeliest tokens"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
