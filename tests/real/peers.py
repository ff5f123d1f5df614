"""Results of transformers (in float32, with dequantized weights) and of llama.cpp for a real model's file."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tests.real.material import llamacpp_python, num_threads
from tests.real.texts import CHATS, PAGES, PROMPTS, TEXTS
from tests.waiting import PATIENCE

#: Tokens that are continued greedily from each of the first prompts.
NUM_GREEDY, NUM_CONTINUED = 24, 3

_PEER = Path(__file__).with_name("llamacpp_peer.py")


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy tokens, and the log-probabilities [NUM_GREEDY, V] from which they were chosen."""

    tokens: list[int]
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Reference:
    """Results of transformers for a file. An entry of `chats` is None if the file has no chat template or the template
    rejects the chat."""

    tokens: list[list[int]]  # of TEXTS
    pages: list[list[int]]  # tokens of PAGES
    logprobs: list[Tensor]  # [T, V] of each page
    prompts: list[list[int]]  # tokens of the first PROMPTS
    continuations: list[Continuation]  # of these
    chats: list[str | None]


def load_dequantized(file: Path) -> Any:
    """Load a file into transformers, with weights dequantized to float32."""
    torch.set_num_threads(num_threads())
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False  # its weights are plain numbers now, which can be saved
    vars(model.config).pop("quantization_config", None)
    return model.eval()


def load_tokenizer(file: Path) -> Any:
    """Load a file's tokenizer with transformers."""
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def reference_of(file: Path) -> Reference:
    """Return transformers' results for a file; the model's memory is freed."""
    model, tokenizer = load_dequantized(file), load_tokenizer(file)
    pages = [tokenizer.encode(page) for page in PAGES]
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[:NUM_CONTINUED]]
    return Reference(
        [tokenizer.encode(text) for text in TEXTS],
        pages,
        [logprobs_of(model, page) for page in pages],
        prompts,
        [_continued(model, prompt) for prompt in prompts],
        [_rendered(tokenizer, messages, tools) for messages, tools in CHATS],
    )


@torch.inference_mode()
def logprobs_of(model: Any, tokens: list[int]) -> Tensor:
    """Return the log-probabilities [T, V] of the next token after each token."""
    output: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return output.float().log_softmax(-1)


def _continued(model: Any, prompt: list[int]) -> Continuation:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_GREEDY, min_new_tokens=NUM_GREEDY,
        do_sample=False, return_dict_in_generate=True, output_logits=True,
        repetition_penalty=1.0, temperature=None, top_p=None, top_k=None,
    )  # fmt: skip
    logits = torch.cat(made.logits).float()
    return Continuation(made.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1))


def _rendered(tokenizer: Any, messages: Any, tools: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    text: str = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    return text


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """Results of llama.cpp for a file: tokens of TEXTS, log-probabilities [T, V] of each page, and greedy
    continuations."""

    tokens: list[list[int]]
    logprobs: list[Tensor]
    continuations: list[list[int]]


def llamacpp_of(file: Path, reference: Reference, folder: Path) -> LlamaCpp:
    """Run llama.cpp in a Python of its own; skip the test if there is none."""
    python = llamacpp_python()
    request, result = folder / "request.json", folder / "result.npz"
    wanted = {"model": str(file), "texts": TEXTS, "pages": reference.pages, "prompts": reference.prompts}
    wanted |= {"num_greedy": NUM_GREEDY, "threads": num_threads()}
    request.write_text(json.dumps(wanted), encoding="utf-8")
    done = subprocess.run(
        [python, str(_PEER), str(request), str(result)],
        timeout=2 * PATIENCE, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    with numpy.load(result) as found:
        logits = [found[f"logits{number}"] for number in range(len(reference.pages))]
        tokens, greedy = json.loads(str(found["tokens"])), json.loads(str(found["greedy"]))
    result.unlink()
    return LlamaCpp(tokens, [torch.from_numpy(each).float().log_softmax(-1) for each in logits], greedy)
