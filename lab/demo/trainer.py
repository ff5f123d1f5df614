"""The model being trained, step by step, with its checkpoints and its export.

Everything is seeded and a batch follows from its step number, so a run that was interrupted and continued equals
an unbroken one. Checkpoints are safetensors and JSON. How a run is started and shown is in `train`.
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lab.demo.batches import Batch, BatchShape, make_batch
from lab.demo.corpus.document import END, EOS
from lab.demo.optimizer import Optimizer
from lab.demo.tokenizer import MAX_LENGTH, VOCAB_SIZE

NUM_KEPT_CHECKPOINTS = 2


class AnyRecipe:
    """What every recipe has: it is a dataclass, with a seed, the sizes of a language model, and learning rates at some
    steps. In between the rate runs straight, and the last step ends training."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    seed: int
    rates: tuple[tuple[int, float], ...]
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return self.rates[-1][0]

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: straight between those that are given."""
        for (begin, first), (end, last) in pairwise(self.rates):
            if step < end:
                return first + (last - first) * (step + 1 - begin) / (end - begin)
        return self.rates[-1][1]

    def text_config(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, max_length: int) -> LlamaConfig:
        """The configuration of the language model."""
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=max_length,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=stop_ids(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
        )


@dataclass(frozen=True, slots=True)
class Recipe(AnyRecipe):
    """All that determines the trained weights, apart from the rounding of the machine."""

    seed: int = 1
    rates: tuple[tuple[int, float], ...] = (
        (0, 0.0),
        (60, 0.02),
        (1051, 0.02),
        (2001, 0.0102564),
        (2500, 0.01),
        (3300, 0.0),
    )
    hidden_size: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 640
    tokenizer_documents: int = 30_000
    shape: BatchShape = field(default_factory=BatchShape)


R = TypeVar("R", bound=AnyRecipe)
B = TypeVar("B")


class Course(ABC, Generic[R, B]):
    """A place in a recipe, with the model that follows it and its optimizer."""

    def __init__(self, recipe: R, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        """Starts at step 0."""
        self.recipe, self.tokenizer = recipe, tokenizer
        self.optimizer = Optimizer(model)
        self.num_done = 0
        self._whole = model

    def step(self) -> float:
        """Does the next step and returns its loss in nats per target token."""
        loss = self._loss(self._batch())
        torch.autograd.backward(loss)
        self.optimizer.step(self.recipe.lr_at(self.num_done), self.num_done + 1)
        self.num_done += 1
        return float(loss.detach())

    @abstractmethod
    def _batch(self) -> B:
        """The batch of the next step."""

    @abstractmethod
    def _loss(self, batch: B) -> torch.Tensor:
        """The loss in nats per target token of a batch."""

    def export(self, folder: Path) -> None:
        """Writes the model as a Hugging Face folder in bf16."""
        export_model(self._whole, self.tokenizer, folder)

    def save_checkpoint(self, folder: Path) -> Path:
        """Writes `folder/step-N` (complete or not at all) and drops all but the newest few."""
        target = folder / f"step-{self.num_done:06d}"
        partial = folder / f".{target.name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(
            {name: t.contiguous() for name, t in self.optimizer.state().items()},
            partial / "optimizer.safetensors",
        )
        state = {"num_done": self.num_done, "recipe": asdict(self.recipe)}
        (partial / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        for old in checkpoints(folder)[:-NUM_KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
        return target

    def load_checkpoint(self, checkpoint: Path) -> None:
        """Continues from a checkpoint of the same recipe.

        Raises `ValueError` if it was written by another recipe.
        """
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        written, wanted = state["recipe"], json.loads(json.dumps(asdict(self.recipe)))
        different = [key for key in wanted if written.get(key) != wanted[key]]
        if different:
            raise ValueError(f"{checkpoint} has another recipe ({', '.join(different)}); use another folder")
        self.optimizer.load_state(load_file(checkpoint / "optimizer.safetensors"))
        self.num_done = state["num_done"]


class Trainer(Course[Recipe, Batch]):
    """A model, its optimizer and its place in the recipe."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        device: str = "cpu",
        use_compile: bool = False,
    ):
        """Starts at step 0 with weights drawn from the recipe's seed."""
        torch.manual_seed(recipe.seed)
        self.model = LlamaForCausalLM(recipe.text_config(tokenizer, VOCAB_SIZE, MAX_LENGTH)).to(
            device=device, dtype=torch.bfloat16
        )
        super().__init__(recipe, self.model, tokenizer)
        self.device = device
        self._body = torch.compile(self.model.model, dynamic=False) if use_compile else self.model.model

    def _batch(self) -> Batch:
        return make_batch(self.tokenizer, self.recipe.shape, self.recipe.seed, self.num_done)

    def _loss(self, batch: Batch) -> torch.Tensor:
        tokens = batch.tokens.to(self.device)  # (rows, length)
        hidden = self._body(input_ids=tokens, use_cache=False).last_hidden_state  # (rows, length, hidden)
        chosen = batch.is_target[:, 1:].to(self.device)  # (rows, length - 1)
        logits = self.model.lm_head(hidden[:, :-1][chosen])  # (targets, vocabulary)
        return torch.nn.functional.cross_entropy(logits.float(), tokens[:, 1:][chosen])


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step-*"))


def export_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes config, weights, tokenizer, chat template and generation settings."""
    model.config.dtype = "bfloat16"
    ids = stop_ids(tokenizer)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ids,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _name_as_before(folder / "tokenizer_config.json")


def _name_as_before(path: Path) -> None:
    """Names that versions 4 and 5 of transformers both know: old clients load this tokenizer too."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("backend", None)
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [])
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n", encoding="utf-8")


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """What ends a text, and what ends a turn."""
    ids = tokenizer.convert_tokens_to_ids([EOS, END])
    assert isinstance(ids, list)
    return ids
