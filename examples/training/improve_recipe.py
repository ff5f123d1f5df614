"""Improve a recipe by its own check: train a LoRA adapter on the right answers among its samples, again and again.

    pip install 'bridle-llm[bench]'
    python -m examples.training.improve_recipe SmolLM2-135M-Instruct.Q4_1.gguf --out adapter

This method is expert iteration. bridle samples with the newest adapter and the recipe's script, and the recipe's check
judges the answers. PEFT trains the same weights in float32 on the tokens that bridle has sampled, so no text is
tokenized again. The new weights replace the adapter while bridle runs. The last line compares the results on questions
that were not used for training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM

from bridle import LLM, SamplingParams
from bridle.serving import ControlSettings
from dev.bench.recipes import SEED, recipe
from dev.recipes.columns import steered
from dev.recipes.recipe import Case, Recipe

NAME = "learner"
TASKS = ("calculator", "sql", "quote", "extract", "vote", "thinking", "style")  # recipes with unlimited questions
BATCH = 64  # answers at once; each needs a process of the control runtime
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LIMITS = ("--wasm-max-step-time=4000", "--limit", "max_prepare_wait=600000", "--limit", "max_init_time=20000")


@dataclass(frozen=True, slots=True)
class Plan:
    """Each of `rounds` rounds asks `questions` new questions, and samples `samples` answers to each. `held_out`
    questions are answered before and after training, at temperature 0."""

    rounds: int = 3
    questions: int = 96
    samples: int = 2
    held_out: int = 100
    temperature: float = 0.3


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer as tokens, and whether the recipe accepts it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    is_right: bool


class Learner:
    """The model's weights in float32 with a trainable adapter. `model` is a GGUF file or a model folder."""

    def __init__(self, model: str, out: Path, learning_rate: float = 1e-3, batch: int = 4, epochs: int = 2) -> None:
        path = Path(model)
        source = {"gguf_file": path.name} if path.is_file() else {}
        base = AutoModelForCausalLM.from_pretrained(path.parent if source else path, dtype=torch.float32, **source)
        torch.manual_seed(0)
        self._model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=LAYERS))
        self._optimizer = torch.optim.AdamW([p for p in self._model.parameters() if p.requires_grad], lr=learning_rate)
        self._batch, self._epochs, self.out = batch, epochs, out

    def learn(self, samples: Sequence[Sample]) -> float:
        """Train the adapter on all samples a few times and save it; return the mean loss per token."""
        total, order = 0.0, [at for _ in range(self._epochs) for at in torch.randperm(len(samples)).tolist()]
        for number, at in enumerate(order, 1):
            loss = self._loss(samples[at])
            (loss / self._batch).backward()
            total += loss.item()
            if number % self._batch == 0 or number == len(order):
                self._optimizer.step()
                self._optimizer.zero_grad()
        self._model.save_pretrained(self.out)
        return total / len(order)

    def _loss(self, sample: Sample) -> torch.Tensor:
        ids, size = torch.tensor([[*sample.prompt, *sample.answer]]), len(sample.answer)
        logits = self._model(input_ids=ids, logits_to_keep=size + 1).logits[0, :-1]  # [size, V]
        return functional.cross_entropy(logits, ids[0, -size:])


def ask(llm: LLM, task: Recipe, cases: Sequence[Case], adapter: str | None, temperature: float = 0.0) -> list[Sample]:
    """Answer all cases with the recipe's script, several in one batch. An answer whose script fails counts as wrong."""
    found: list[Sample] = []
    for begin in range(0, len(cases), BATCH):
        some = cases[begin : begin + BATCH]
        params = [
            SamplingParams(temperature=temperature, seed=at, max_tokens=task.max_tokens) for at in range(len(some))
        ]
        messages = [list(case.messages) for case in some]
        outputs = llm.chat(messages, params, adapter=adapter, use_tqdm=False, **steered(task, some))
        for case, output in zip(some, outputs, strict=True):
            tokens = (*output.outputs[0].token_ids, llm.info.eos_token_ids[0])
            is_right = output.outputs[0].error is None and task.is_right(case, output.text)
            found.append(Sample(tuple(output.prompt_token_ids), tokens, is_right))
    return found


def improve(llm: LLM, learner: Learner, task: Recipe, plan: Plan, tell: Callable[[str], object] = print) -> list[float]:
    """Run the rounds of the plan; return the share of right answers to held-out questions before and after them."""

    def held_out(adapter: str | None) -> float:
        return share(ask(llm, task, task.cases(plan.held_out, SEED), adapter))

    before, adapter = held_out(None), None
    tell(f"before: {before:.0%} of {plan.held_out} held-out questions are right")
    for number in range(1, plan.rounds + 1):
        cases = [case for case in task.cases(plan.questions, number) for _ in range(plan.samples)]
        found = ask(llm, task, cases, adapter, plan.temperature)
        winners = list(dict.fromkeys(sample for sample in found if sample.is_right))
        if not winners:
            raise ValueError(f"round {number}: none of {len(found)} answers is right; take an easier recipe")
        loss = learner.learn(winners)
        llm.load_adapter(NAME, learner.out, replace=True)
        adapter = NAME
        right = f"{share(found):.0%} of {len(found)} samples are right"
        tell(f"round {number}: {right}; {len(winners)} were taught, with a loss of {loss:.3f}")
    after = held_out(adapter)
    tell(f"after: {after:.0%} of {plan.held_out} held-out questions are right")
    return [before, after]


def share(samples: Sequence[Sample]) -> float:
    """Return the share of samples that are right."""
    return sum(sample.is_right for sample in samples) / len(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="GGUF file or folder")
    parser.add_argument("--recipe", choices=TASKS, default="calculator")
    parser.add_argument("--out", type=Path, default=Path("adapter"))
    for name in ("rounds", "questions", "samples", "held_out"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Plan(), name))
    given = parser.parse_args()
    task = recipe(given.recipe)
    plan = Plan(given.rounds, given.questions, given.samples, given.held_out)
    control = ControlSettings("on", args=LIMITS)
    with LLM(given.model, control=control, tools=dict(task.tools), adapters={}, max_model_len=2048) as llm:
        improve(llm, Learner(given.model, given.out), task, plan)


if __name__ == "__main__":
    main()
