"""The correct result of an engine for one request, computed in the simplest way: without KV cache, batches, blocks and
steps.

Each token is sampled from logits that are computed from the whole token list. Forks are plain recursion. Random keys
come from the engine's public derivation, and decisions come from a plain program. Time is not modelled, because outputs
may not depend on it. Outputs are named by their path: () for the first output, (k,) for its k-th fork, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from bridle.engine.control.decision import Branch, Decision
from bridle.engine.interfaces import TextDecoder
from bridle.engine.request import Request
from bridle.engine.scheduling.step_plan import SampleRow
from bridle.engine.sequence import copy_seed, fork_key, root_key
from bridle.outputs import FinishReason, Logprob, Usage
from bridle.testing.logits import ScriptedModel
from bridle.testing.sampler import logprob_of, next_mu, sample_row
from tests.fakes.controller_runtime import Program, Reply, View, after, forked

Path = tuple[int, ...]
_PLAIN = Decision.sample()
_NOTHING_LEFT = "no token can be drawn"


@dataclass(slots=True)
class ReferenceOutput:
    """One output. `usage.cached_tokens` stays 0, because it depends on earlier requests. `error` is a message."""

    path: Path
    tokens: list[int]
    reason: FinishReason
    stop: int | str | None = None
    error: str | None = None
    text: str = ""
    logprobs: list[Logprob | None] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    logs: str = ""


@dataclass(slots=True)
class _Output:
    """An output that is being generated. `logprobs[i]` belongs to token i of `tokens`, which include the prompt."""

    path: Path
    tokens: list[int]
    num_prompt: int
    key: int
    view: View
    logprobs: list[Logprob | None]
    usage: Usage
    num_draws: int = 0
    num_forks: int = 0
    num_children: int = 0
    is_spread: bool = False  # the request's own n outputs exist
    logs: str = ""
    mus: list[tuple[int, float]] = field(default_factory=list)  # of Mirostat, each with the tokens there were
    moved: float = 0.0  # by the last draw
    result: ReferenceOutput | None = None


def run_reference(
    model: ScriptedModel,
    request: Request,
    program: Program | None = None,
    *,
    max_model_len: int,
    eos_token_ids: Sequence[int] = (),
    decoder: TextDecoder | None = None,
) -> dict[Path, ReferenceOutput]:
    """Return all outputs of `request` by path. `max_model_len` is the smaller of the model's context and the KV
    capacity."""
    return _Reference(model, request, program, max_model_len, eos_token_ids, decoder).run()


def reference_prompt_logprobs(model: ScriptedModel, request: Request) -> tuple[Logprob | None, ...]:
    """Return the correct `PromptEvent.logprobs` of a request with `prompt_logprobs`."""
    prompt, num_top = request.prompt, _num_top(request)
    scores = [
        logprob_of(model.row_after(prompt[:i], request.adapter), prompt[i], num_top) for i in range(1, len(prompt))
    ]
    return (None, *scores)


def _spelled(logprobs: Iterable[Logprob | None], request: Request, decoder: TextDecoder | None) -> list[Logprob | None]:
    """Return the log-probabilities with the texts of their tokens, if the request is detokenized."""
    if decoder is None or not request.detokenize:
        return list(logprobs)
    return [None if each is None else each.spelled(decoder.token_text) for each in logprobs]


def _num_top(request: Request) -> int:
    return max(request.sampling.prompt_logprobs or 0, request.sampling.logprobs or 0)


class _Reference:
    def __init__(
        self,
        model: ScriptedModel,
        request: Request,
        program: Program | None,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        decoder: TextDecoder | None,
    ) -> None:
        self.model, self.request, self.program, self.decoder = model, request, program, decoder
        self.sampling = request.sampling
        wanted = max_model_len
        if self.sampling.max_tokens is not None:
            wanted = len(request.prompt) + self.sampling.max_tokens
        self.max_len = wanted
        eos = () if self.sampling.ignore_eos else tuple(eos_token_ids)
        self.stop_ids = {*eos, *self.sampling.stop_token_ids}
        self.growing: list[_Output] = []

    def run(self) -> dict[Path, ReferenceOutput]:
        prompt = list(self.request.prompt)
        first = _Output(
            path=(),
            tokens=prompt,
            num_prompt=len(prompt),
            key=root_key(self.sampling.seed or 0),
            view=View(tuple(prompt), len(prompt)),
            logprobs=[None] * len(prompt),
            usage=Usage(prompt_tokens=len(prompt)),
        )
        self.growing.append(first)
        if self.sampling.max_tokens == 0:
            self.end(first, FinishReason.LENGTH)
        done: dict[Path, ReferenceOutput] = {}
        while self.growing:
            output = self.growing.pop()
            while output.result is None:
                self.turn(output)
            done[output.path] = output.result
        return done

    # -- one decision --------------------------------------------------------------------------------------

    def turn(self, output: _Output) -> None:
        decision = self.decide(output)
        if decision is None:
            return
        if decision.is_stop:
            self.end(output, FinishReason.CONTROLLER, decision.reason)
        elif decision.is_wait or decision.is_noop:
            output.view = after(output.view, (), 0, None)
        else:
            self.branch(output, decision)

    def decide(self, output: _Output) -> Decision | None:
        if self.program is None:
            return _PLAIN
        said = self.program(output.view)
        reply = said if isinstance(said, Reply) else Reply(said)
        output.logs += reply.log
        if reply.error is not None:
            self.end(output, FinishReason.ERROR, error=str(reply.error))
        return reply.decision

    def branch(self, output: _Output, decision: Decision) -> None:
        branches, num_own = decision.branches, len(decision.branches)
        if not output.is_spread and not decision.is_forced:
            branches *= self.sampling.n
            output.is_spread = True
        owners = [output, *(self.fork(output, number, num_own) for number in range(1, len(branches)))]
        output.num_forks += len(branches) > 1
        for owner, branch in zip(owners, branches, strict=True):
            if branch.sample:
                self.draw(owner, branch)
            else:
                splice = branch.splices[0]
                self.splice(owner, splice.backtrack, splice.ff_tokens)

    def fork(self, parent: _Output, number: int, num_own: int) -> _Output:
        copy, branch = divmod(number, num_own)
        root = root_key(copy_seed(self.sampling.seed or 0, copy)) if copy else parent.key
        child = _Output(
            path=(*parent.path, parent.num_children),
            tokens=list(parent.tokens),
            num_prompt=parent.num_prompt,
            key=root if copy and not branch else fork_key(root, parent.num_forks, branch),
            view=forked(parent.view, number),
            logprobs=list(parent.logprobs),
            usage=Usage(prompt_tokens=parent.usage.prompt_tokens, shared_tokens=len(parent.tokens)),
            num_draws=parent.num_draws,
            mus=list(parent.mus),
            is_spread=True,
        )
        parent.num_children += 1
        self.growing.append(child)
        return child

    # -- tokens --------------------------------------------------------------------------------------------

    def draw(self, output: _Output, branch: Branch) -> None:
        token, logprob = self.sample(output, branch)
        if token < 0:
            self.end(output, FinishReason.ERROR, error=_NOTHING_LEFT)
            return
        output.num_draws += 1
        output.usage.sampled_tokens += 1
        splice = next((s for s in branch.splices if not s.when_sampled or token in s.when_sampled), None)
        if splice is not None and splice.backtrack:
            output.usage.rewound_tokens += 1
            self.splice(output, splice.backtrack - 1, splice.ff_tokens, token)
            return
        num_kept = len(output.tokens)
        if (branch.sampling or self.sampling).has_mirostat:
            output.mus.append((num_kept + 1, output.moved))
        self.append(output, token, logprob)
        if splice is not None:
            self.force(output, splice.ff_tokens)
        output.view = after(output.view, output.tokens[num_kept:], 0, token)

    def sample(self, output: _Output, branch: Branch) -> tuple[int, Logprob | None]:
        own, sampling = self.sampling, branch.sampling or self.sampling
        sampling = replace(sampling, logprobs=own.logprobs, logprobs_mode=own.logprobs_mode)
        bias = branch.bias
        if len(output.tokens) - output.num_prompt < own.min_tokens:
            bias = (*bias, *((token, float("-inf")) for token in self.stop_ids))
        bias = (*bias, *self.bad_word_ends(output))
        mu = next((mu for length, mu in reversed(output.mus) if length <= len(output.tokens)), None)
        allowed = own.allowed_token_ids
        if allowed:
            size = self.model.vocab_size
            bias = (*bias, *((token, float("-inf")) for token in range(size) if token not in allowed))
        row = SampleRow(0, 0, sampling, output.key, output.num_draws, branch.mask, bias, mu)
        logits = self.model.row_after(output.tokens, self.request.adapter)
        token, logprob = sample_row(logits, row, output.tokens, output.num_prompt)
        if token >= 0 and sampling.has_mirostat:
            output.moved = next_mu(logits, row, output.tokens, output.num_prompt, token)
        return token, logprob

    def bad_word_ends(self, output: _Output) -> list[tuple[int, float]]:
        """Return biases against every token that would complete a bad word."""
        generated = output.tokens[output.num_prompt :]
        words = self.sampling.bad_words_ids
        return [(word[-1], float("-inf")) for word in words if tuple([*generated, word[-1]][-len(word) :]) == word]

    def splice(self, output: _Output, backtrack: int, tokens: Sequence[int], sampled: int | None = None) -> None:
        num_kept = len(output.tokens) - backtrack
        output.usage.rewound_tokens += min(backtrack, len(output.tokens) - output.num_prompt)
        del output.tokens[num_kept:], output.logprobs[num_kept:]
        output.mus = [(length, mu) for length, mu in output.mus if length <= num_kept]
        output.num_prompt = min(output.num_prompt, num_kept)
        self.force(output, tokens)
        output.view = after(output.view, output.tokens[num_kept:], backtrack, sampled)

    def force(self, output: _Output, tokens: Sequence[int]) -> None:
        for token in tokens:
            if output.result is not None:
                return
            logprob = None
            if self.sampling.logprobs is not None:
                logits = self.model.row_after(output.tokens, self.request.adapter) if output.tokens else None
                logprob = None if logits is None else logprob_of(logits, token, _num_top(self.request))
            output.usage.forced_tokens += 1
            self.append(output, token, logprob)

    def append(self, output: _Output, token: int, logprob: Logprob | None) -> None:
        output.tokens.append(token)
        output.logprobs.append(logprob)
        stop_string = self.find_stop_string(output)
        if token in self.stop_ids:
            self.end(output, FinishReason.STOP, token)
        elif stop_string is not None:
            self.end(output, FinishReason.STOP, stop_string)
        elif len(output.tokens) >= self.max_len:
            self.end(output, FinishReason.LENGTH)
        else:
            self.apply_criteria(output)

    def apply_criteria(self, output: _Output) -> None:
        for criterion in self.request.stopping:
            stop = criterion(output.tokens, output.num_prompt)
            if stop is not None:
                self.end(output, FinishReason.STOP, stop)
                return

    # -- text and endings ----------------------------------------------------------------------------------

    def text_of(self, output: _Output, num_tokens: int, flush: bool) -> str:
        """Return the text of the first `num_tokens` generated tokens."""
        if self.decoder is None or not self.request.detokenize:
            return ""
        state = self.decoder.open(output.tokens[: output.num_prompt], self.sampling.skip_special_tokens)
        generated = output.tokens[output.num_prompt :][:num_tokens]
        text = "".join(state.push(token) for token in generated)
        return text + (state.flush() if flush else "")

    def matches(self, output: _Output) -> list[tuple[int, str]]:
        """Return (start, stop string) of all stop strings that end in the text of the last token."""
        num_generated = len(output.tokens) - output.num_prompt
        before = len(self.text_of(output, num_generated - 1, flush=False))
        text = self.text_of(output, num_generated, flush=False)
        found = ((text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in self.sampling.stop)
        return [(start, stop) for start, stop in found if start >= 0]

    def find_stop_string(self, output: _Output) -> str | None:
        matches = self.matches(output) if self.sampling.stop else []
        return min(matches, key=lambda match: match[0])[1] if matches else None

    def final_text(self, output: _Output) -> str:
        num_generated = len(output.tokens) - output.num_prompt
        matches = self.matches(output) if self.sampling.stop and num_generated else []
        if not matches:
            return self.text_of(output, num_generated, flush=True)
        start, stop = min(matches, key=lambda match: match[0])
        end = start + len(stop) if self.sampling.include_stop_str_in_output else start
        return self.text_of(output, num_generated, flush=False)[:end]

    def end(
        self,
        output: _Output,
        reason: FinishReason,
        stop: int | str | None = None,
        error: str | None = None,
    ) -> None:
        generated = output.tokens[output.num_prompt :]
        output.usage.completion_tokens = len(generated)
        output.result = ReferenceOutput(
            path=output.path,
            tokens=generated,
            reason=reason,
            stop=stop,
            error=error,
            text=self.final_text(output),
            logprobs=_spelled(output.logprobs[output.num_prompt :], self.request, self.decoder),
            usage=output.usage,
            logs=output.logs,
        )
