"""A small engine of your own whose outputs bridle's controllers steer: plain transformers, one request at a time.

    python examples/aici_transformers.py demo yesno "Is snow white?"
    python examples/aici_transformers.py MODEL_FOLDER CONTROLLER.wasm "a prompt" ARGUMENT

The engine supports everything that a controller may request: masks, forced tokens, backtracking, forks, waiting, a
temperature, and logs. Backtracking crops the KV cache, and forks copy it. An output is a token list, and a KV cache of
all tokens but the last.
"""

from __future__ import annotations

import copy
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bridle.aici import Runner, RuntimeConfig
from bridle.controllers import standard
from bridle.engine import Branch, Request
from bridle.engine.interfaces import Answer, Ask
from bridle.model import resolve_model


@dataclass
class Output:
    """One output of a request. `news` is the next message to the output's controller."""

    tokens: list[int]
    num_prompt: int
    cache: Any
    news: Ask
    logits: torch.Tensor | None = None  # [V], after all tokens
    is_over: bool = False
    error: Exception | None = None


NUMBERS = itertools.count()  # of requests and of sequences, which must be unique in one runtime


class TinyEngine:
    """Runs requests over `model`, with controllers that `runner` runs."""

    def __init__(self, model: Any, runner: Runner, max_tokens: int = 64, seed: int = 0) -> None:
        self.model, self.runner, self.max_tokens = model.eval(), runner, max_tokens
        self.random = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def run(self, prompt: list[int], module: str, argument: str = "") -> list[Output]:
        """Run a request to its end; return all its outputs."""
        name = f"request-{next(NUMBERS)}"
        tokens = self.runner.start(name, prompt, module, argument)
        ask = Ask(next(NUMBERS), request=Request(name, tuple(tokens)))
        outputs = [Output(list(tokens), len(tokens), DynamicCache(config=self.model.config), ask)]
        while live := [output for output in outputs if not output.is_over]:
            self.runner.begin([output.news for output in live])  # the callbacks run while the model computes
            for output in live:
                self.compute(output)
            answers = self.runner.finish()
            for output in live:
                outputs += self.apply(output, answers[output.news.seq_id])
        return outputs

    def compute(self, output: Output) -> None:
        """Update the output's KV cache and logits to its current tokens."""
        if output.logits is None:
            new = torch.tensor([output.tokens[output.cache.get_seq_length() :]])  # [1, n]
            output.logits = self.model(new, past_key_values=output.cache, use_cache=True).logits[0, -1]  # [V]

    def apply(self, output: Output, answer: Answer) -> list[Output]:
        """Apply the controller's decision; return the forks. Each fork starts from the tokens before the decision."""
        print(answer.log, end="")
        decision = answer.decision
        if decision is None or decision.is_stop:
            self.end(output, answer.error)
            return []
        branches = decision.branches or (Branch(sample=False),)  # no branch: the sequence waits
        forks = [self.fork(output, number) for number in range(1, len(branches))]
        for owner, branch in zip([output, *forks], branches, strict=True):
            self.follow(owner, branch, is_new=owner is not output)
        return forks

    def fork(self, parent: Output, number: int) -> Output:
        news = Ask(next(NUMBERS), parent=parent.news.seq_id, branch=number)
        cache = copy.deepcopy(parent.cache)
        return Output(list(parent.tokens), parent.num_prompt, cache, news, parent.logits)

    def follow(self, output: Output, branch: Branch, *, is_new: bool) -> None:
        """Follow one branch of a decision: sample, splice, and record the result."""
        sampled, backtrack = None, 0
        tokens: tuple[int, ...] = ()
        splices = branch.splices
        if branch.sample:
            sampled = self.draw(output, branch)
            splices = tuple(s for s in splices if not s.when_sampled or sampled in s.when_sampled)
            tokens = (sampled,)
        if splices:  # in a branch that samples, backtrack counts the sampled token
            keeps = splices[0].backtrack == 0
            backtrack = max(splices[0].backtrack - branch.sample, 0)
            tokens = (tokens if keeps else ()) + splices[0].ff_tokens
        if backtrack:
            del output.tokens[-backtrack:]
            surplus = output.cache.get_seq_length() - (len(output.tokens) - 1)
            if surplus > 0:  # the last token is computed again, for its logits
                output.cache.crop(-surplus)
        if backtrack or tokens:
            output.tokens += tokens
            output.logits = None
        old = output.news
        parent, branch_number = (old.parent, old.branch) if is_new else (None, None)
        output.news = Ask(old.seq_id, tokens, backtrack, sampled, parent=parent, branch=branch_number)
        if len(output.tokens) - output.num_prompt >= self.max_tokens:
            self.end(output)

    def draw(self, output: Output, branch: Branch) -> int:
        assert output.logits is not None
        logits = output.logits.float().clone()  # [V]
        if branch.mask is not None:
            logits[torch.from_numpy(~self.runner.allowed(branch.mask))] = -torch.inf
        for token, value in branch.bias:
            logits[token] += value
        temperature = branch.sampling.temperature if branch.sampling else 0.0
        if temperature == 0.0:
            return int(logits.argmax())
        return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=self.random))

    def end(self, output: Output, error: Exception | None = None) -> None:
        output.is_over, output.error = True, error
        self.runner.free(output.news.seq_id)


def main(
    model_name: str = "demo", controller: str = "yesno", prompt: str = "Is snow white?", argument: str = ""
) -> None:
    """Upload a module from a file, or one that is part of bridle; run it and print its outputs."""
    folder = str(resolve_model(model_name))
    wasm = Path(controller).read_bytes() if controller.endswith(".wasm") else standard.load(controller)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with Runner(RuntimeConfig(folder, num_logits=model.config.vocab_size), model.config.vocab_size) as runner:
        module = runner.upload(wasm)
        for number, output in enumerate(TinyEngine(model, runner).run(tokenizer.encode(prompt), module, argument)):
            print(f"[{number}]", tokenizer.decode(output.tokens[output.num_prompt :]), output.error or "")


if __name__ == "__main__":
    main(*sys.argv[1:])
