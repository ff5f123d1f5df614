"""Encodes and checks the JSON that callbacks of guests take and return, in each dialect.

A guest is untrusted. Every returned number is checked against the vocabulary, the masks of this call and the limits
before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from bridle.aici.protocol import Count, TokenId
from bridle.aici.replies import BranchReply, PreResult, SpliceReply
from bridle.aici.runtime.instance import Instance
from bridle.errors import ControllerError, ControllerTrap, InvalidRequest
from bridle.sampling_values import check_scales


class WaitRequest(Struct, omit_defaults=True):
    """Addition: a wait. The guest is called again only when `variable` has a version above `newer_than`, or `ms`
    milliseconds have passed. At least one of the two conditions must be given."""

    variable: str | None = None
    newer_than: int = 0
    ms: float | None = None


class _GuestBranches(Struct):
    branches: list[BranchReply] = []
    wait: WaitRequest | None = None
    error: str | None = None  # addition: the guest ends with this error


class _Prompt(Struct):
    prompt: list[TokenId] | UnsetType = UNSET


class _Splice1(Struct):
    backtrack: Count = 0
    ff_tokens: list[TokenId] = []


class _Mid1(Struct):
    sample: Any = msgspec.field(name="SampleWithBias", default=UNSET)
    splice: _Splice1 | UnsetType = msgspec.field(name="Splice", default=UNSET)


class _Pre1(Struct):
    suspend: bool = False
    num_forks: Count = 1
    ff_tokens: list[TokenId] = []


class _Post1(Struct):
    stop: bool = False


_branches_decoder = msgspec.json.Decoder(_GuestBranches)
_prompt_decoder = msgspec.json.Decoder(_Prompt)
_mid1_decoder: msgspec.json.Decoder[str | _Mid1] = msgspec.json.Decoder(str | _Mid1)
_pre1_decoder = msgspec.json.Decoder(_Pre1)
_post1_decoder = msgspec.json.Decoder(_Post1)


@dataclass(slots=True)
class GuestDecision:
    """The decision of a guest for its next step. A branch's `sample_mask` is an index into `masks`. A decision without
    branches stops the sequence."""

    branches: list[BranchReply]
    masks: list[bytes] = field(default_factory=list)
    wait: WaitRequest | None = None

    @property
    def is_noop(self) -> bool:
        """Return whether the decision is a single branch that changes nothing, so that the sequence waits one step."""
        return len(self.branches) == 1 and is_noop(self.branches[0])


def noop() -> BranchReply:
    """Return the branch that changes nothing."""
    return BranchReply(splices=[SpliceReply()])


def resting(waits_for: list[tuple[str, int]] | UnsetType = UNSET) -> BranchReply:
    """Return the branch that changes nothing and may last several steps; `waits_for` is as in `BranchReply`."""
    return BranchReply(splices=[SpliceReply()], wait=True, waits_for=waits_for)


def is_noop(branch: BranchReply) -> bool:
    return branch.sample_mask is None and not any(s.backtrack or s.ff_tokens for s in branch.splices)


class _Guest:
    """Methods that guests of both dialects have in common."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    def init_prompt(self, prompt: Sequence[int], budget_ms: float) -> list[int]:
        """Show the prompt to the guest, which may rewrite it."""
        data = self.instance.callback("aici_init_prompt", msgspec.json.encode({"prompt": list(prompt)}), budget_ms)
        result: _Prompt = self._decode(_prompt_decoder, data, "aici_init_prompt")
        if result.prompt is UNSET:
            return list(prompt)
        limit = self.instance.surroundings.limits.max_prompt
        if len(result.prompt) > limit:
            raise self._broke(f"the prompt has {len(result.prompt)} tokens; at most {limit}")
        self._check_tokens(result.prompt, "the prompt")
        return result.prompt

    def _decode(self, decoder: msgspec.json.Decoder[Any], data: bytes, name: str) -> Any:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            shown = data[:200].decode(errors="replace")
            raise self._broke(f"malformed result of {name}: {error}; the result was {shown!r}") from None

    def _check_tokens(self, tokens: Iterable[int], where: str) -> None:
        size = self.instance.surroundings.vocabulary.size
        worst = max(tokens, default=0)
        if worst >= size:
            raise self._broke(f"token {worst} in {where} is outside the vocabulary of {size} tokens")

    def _check_forced(self, tokens: list[int]) -> None:
        limit = self.instance.surroundings.limits.max_forced_tokens
        if len(tokens) > limit:
            raise self._broke(f"{len(tokens)} forced tokens exceed the limit of {limit} in one answer")
        self._check_tokens(tokens, "ff_tokens")

    def _broke(self, text: str) -> ControllerError:
        return self.instance.broke(ControllerTrap(text))


def own_number(seq_id: int) -> int:
    """Return the 32-bit sequence number that a guest gets from `aici_host_self_seq_id`. The removed higher bits
    distinguish the controllers of one output."""
    return seq_id & 0xFFFFFFFF


class Guest2(_Guest):
    """A guest of dialect 2."""

    def mid(
        self,
        backtrack: int,
        tokens: Sequence[int],
        sampled: int | None,
        fork_group: Sequence[int],
        candidates: Sequence[tuple[int, float]] | None,
        budget_ms: float,
        changes: Sequence[tuple[int, int, int, str]] = (),
        probes: Sequence[float] = (),
    ) -> GuestDecision:
        argument: dict[str, Any] = {
            "backtrack": backtrack,
            "tokens": tokens,
            "sampled": sampled,
            "fork_group": [own_number(seq_id) for seq_id in fork_group],
        }
        if candidates is not None:
            argument["candidates"] = candidates
        if changes:
            argument["changes"] = changes
        if probes:
            argument["probes"] = probes
        data = self.instance.callback("aici_mid_process", msgspec.json.encode(argument), budget_ms)
        result: _GuestBranches = self._decode(_branches_decoder, data, "aici_mid_process")
        if result.error is not None:
            raise self._broke(result.error)
        if result.wait is not None:
            return self._waiting(result)
        for branch in result.branches:
            self._check_branch(branch)
        self._add_options(result.branches)
        return GuestDecision(result.branches, self.instance.masks)

    def _waiting(self, result: _GuestBranches) -> GuestDecision:
        wait = result.wait
        assert wait is not None
        if wait.variable is None and wait.ms is None:
            raise self._broke("the field wait has neither a variable nor a time")
        if wait.ms is not None and not 0 <= wait.ms < math.inf:
            raise self._broke(f"wait of {wait.ms} ms")
        if any(not is_noop(branch) for branch in result.branches) or len(result.branches) > 1:
            raise self._broke("a result that waits must not do anything else")
        return GuestDecision([resting()], [], wait)

    def _check_branch(self, branch: BranchReply) -> None:
        limits = self.instance.surroundings.limits
        if branch.sample_mask is not None:
            branch.sample_mask = self._mask_index(branch.sample_mask)
        elif len(branch.splices) != 1 or branch.splices[0].when_sampled:
            raise self._broke("a branch without sample_mask needs exactly one splice without when_sampled")
        if len(branch.splices) > limits.max_branch_splices:
            raise self._broke(f"a branch has {len(branch.splices)} splices; at most {limits.max_branch_splices}")
        for splice in branch.splices:
            self._check_forced(splice.ff_tokens)
            self._check_tokens(splice.when_sampled, "when_sampled")
        if branch.temperature is not None and not 0 <= branch.temperature < math.inf:
            raise self._broke(f"temperature is {branch.temperature}; must be a number of at least 0")
        self._check_additions(branch)

    def _add_options(self, branches: list[BranchReply]) -> None:
        """Add the texts of a choice to the decision's branch, if it is the only one and has no other effect. A splice
        has no effect if the mask forbids all tokens that trigger it."""
        branch = branches[0] if len(branches) == 1 else None
        if branch is None or branch.sample_mask is None or branch.bias or branch.top_logprobs or branch.control_vectors:
            return
        options, mask = self.instance.mask_options.get(branch.sample_mask), self.instance.masks[branch.sample_mask]
        awaited = [token for splice in branch.splices for token in splice.when_sampled]
        is_idle = all(splice.when_sampled for splice in branch.splices) and not any(
            token < 8 * len(mask) and mask[token >> 3] >> (token & 7) & 1 for token in awaited
        )
        if options is not None and is_idle:
            branch.options, branch.splices = options, []

    def _mask_index(self, name: int) -> int:
        """Return the index of a mask from its name, a number that the guest got in this callback. Guests of dialect 2.0
        always pass 0, which means the last mask."""
        count = len(self.instance.masks)
        index = count - 1 if self.instance.program.facts.old_bias and name == 0 else name - 1
        if not 0 <= index < count:
            raise self._broke(f"sample_mask {name} was not created in this callback, which created {count} masks")
        return index

    def _check_additions(self, branch: BranchReply) -> None:
        limit = self.instance.surroundings.limits.max_bias_entries
        if branch.sampling is not UNSET:
            for name, value in branch.sampling.items():
                if not math.isfinite(value):
                    raise self._broke(f"sampling parameter {name[:40]!r} is {value}")
        if branch.bias is not UNSET:
            if len(branch.bias) > limit:
                raise self._broke(f"a branch has {len(branch.bias)} bias entries; at most {limit}")
            self._check_tokens((token for token, _ in branch.bias), "bias")
            if not all(math.isfinite(value) for _, value in branch.bias):
                raise self._broke("bias has a number that is not finite")
        if branch.control_vectors is not UNSET:
            try:
                check_scales(branch.control_vectors)
            except InvalidRequest as error:
                raise self._broke(str(error)) from None
        if branch.top_logprobs is not UNSET and branch.top_logprobs > 100:
            raise self._broke(f"top_logprobs {branch.top_logprobs} exceeds the limit of 100")
        if branch.draft is not UNSET:
            if len(branch.draft) > self.instance.surroundings.limits.max_draft:
                most = self.instance.surroundings.limits.max_draft
                raise self._broke(f"a draft of {len(branch.draft)} tokens exceeds the limit of {most}")
            self._check_tokens(branch.draft, "draft")


@dataclass(slots=True)
class MidResult1:
    """The result of a dialect-1 guest's mid callback. Without a splice, the next token is sampled under `mask`, which
    is None if the guest set no mask."""

    mask: bytes | None = None
    is_stop: bool = False
    splice: tuple[int, list[int]] | None = None  # backtrack without the sampled token, tokens


class Guest1(_Guest):
    """A guest of dialect 1."""

    def post(self, tokens: Sequence[int], backtrack: int, budget_ms: float) -> bool:
        """Report the last step to the guest. Returns whether the guest wants to stop."""
        argument = msgspec.json.encode({"tokens": tokens, "backtrack": backtrack})
        data = self.instance.callback("aici_post_process", argument, budget_ms)
        result: _Post1 = self._decode(_post1_decoder, data, "aici_post_process")
        return result.stop

    def pre(self, budget_ms: float) -> PreResult:
        data = self.instance.callback("aici_pre_process", b"{}", budget_ms)
        result: _Pre1 = self._decode(_pre1_decoder, data, "aici_pre_process")
        self._check_forced(result.ff_tokens)
        if result.ff_tokens and (result.num_forks != 1 or result.suspend):
            raise self._broke("a pre-process result with ff_tokens must ask for one fork and must not suspend")
        if result.suspend:
            return PreResult(suspend=True)
        return PreResult(False, result.num_forks, result.ff_tokens)

    def mid(self, fork_group: Sequence[int], budget_ms: float) -> MidResult1:
        argument = msgspec.json.encode({"fork_group": [own_number(seq_id) for seq_id in fork_group]})
        data = self.instance.callback("aici_mid_process", argument, budget_ms)
        result: str | _Mid1 = self._decode(_mid1_decoder, data, "aici_mid_process")
        masks = self.instance.masks
        if isinstance(result, str):
            if result == "Stop":
                return MidResult1(is_stop=True)
        elif result.splice is not UNSET:
            self._check_forced(result.splice.ff_tokens)
            if not result.splice.backtrack and not result.splice.ff_tokens:
                raise self._broke("a splice must remove or append tokens")
            return MidResult1(splice=(result.splice.backtrack, result.splice.ff_tokens))
        elif result.sample is not UNSET:
            return MidResult1(mask=masks[-1] if masks else None)
        raise self._broke(f"malformed result of aici_mid_process: {data[:200]!r}")


Guest = Guest1 | Guest2


def guest_of(instance: Instance) -> Guest:
    """Wrap the instance in the guest class of its dialect."""
    return Guest1(instance) if instance.dialect == 1 else Guest2(instance)
