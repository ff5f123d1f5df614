"""Several controllers on one request: the value that names the controllers, and the rules for their joint decision.

docs/composition.md describes the rules. This module has the stateless parts: the controllers of a request, the combined
masks, and the errors for conflicts. `composite_output.py` has the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from bridle.engine.control.decision import Branch, Outside, Splice, mask_allows
from bridle.engine.request import name_of
from bridle.errors import ControllerError, InvalidRequest

#: Maximum number of controllers of one request, a constraint included.
MAX_CONTROLLERS = 8

#: One continuation by one controller: a branch that samples, or a splice of forced tokens.
Way = Branch | Splice


@dataclass(frozen=True, slots=True)
class Demand:
    """An operator's controller: its policy, and the action for the output if it fails."""

    policy: str
    on_failure: str = "end"


@dataclass(frozen=True, slots=True)
class Composed:
    """The controllers of one request, the outer one first. Create it with `compose`. `demand` adds an operator's
    controllers before these; `demands` describes the added ones."""

    parts: tuple[object, ...]
    demands: tuple[Demand, ...] = ()

    @property
    def __name__(self) -> str:
        """Return the controllers' names, as logs and traces show them."""
        return "+".join(self.names)

    @property
    def names(self) -> list[str]:
        """Return the name of each controller for errors; an operator's controller has the name of its policy."""
        demanded = [f"policy {demand.policy}" for demand in self.demands]
        return demanded + [name_of(part) for part in self.parts[len(demanded) :]]

    @property
    def max_rewind(self) -> int | None:
        """Return how many tokens all controllers together may roll back at once; None if one has no `max_rewind`."""
        total = 0
        for part in self.parts:
            announced = announced_rewind(part)
            if announced is None:
                return None
            total += announced
        return total


def compose(*controllers: object | None) -> object | None:
    """Return one controller composed of several, which may be composed themselves; None for no controllers."""
    parts = tuple(part for each in controllers for part in parts_of(each))
    if len(parts) > MAX_CONTROLLERS:
        raise InvalidRequest(f"the request has {len(parts)} controllers; at most {MAX_CONTROLLERS}", "controllers")
    return Composed(parts) if len(parts) > 1 else next(iter(parts), None)


def demand(demanded: Sequence[tuple[Demand, object]], controller: object | None) -> object | None:
    """Return the operator's demands composed with the controllers of a request."""
    if not demanded:
        return controller
    return Composed((*(part for _, part in demanded), *parts_of(controller)), tuple(each for each, _ in demanded))


def user_controllers(controller: object | None) -> object | None:
    """Return the request's own controllers as one controller."""
    if not isinstance(controller, Composed) or not controller.demands:
        return controller
    return compose(*controller.parts[len(controller.demands) :])


def parts_of(controller: object | None) -> tuple[object, ...]:
    """Return the controllers that a controller is made of."""
    if controller is None:
        return ()
    return controller.parts if isinstance(controller, Composed) else (controller,)


def announced_rewind(controller: object) -> int | None:
    """Return the number of tokens a controller may roll back at once, from its attribute `max_rewind`; None if
    absent."""
    announced = getattr(controller, "max_rewind", None)
    return announced if isinstance(announced, int) and announced >= 0 else None


def is_lenient(controller: object) -> bool:
    """Return whether a controller can give alternatives to its forced tokens (its attribute `is_lenient`)."""
    return getattr(controller, "is_lenient", False) is True


@dataclass(frozen=True, slots=True)
class DecisionConflict:
    """A conflict between the decisions of controllers. `names` are the names of all controllers; the first
    `num_demands` names are those of an operator's controllers. `position` is the position of the token, counted from
    the start of the prompt."""

    names: Sequence[str]
    position: int
    num_demands: int = 0

    def between(self, one: int, other: int, what: str) -> ControllerError:
        """Return the error for two controllers, by their numbers. The error does not reveal a policy's rules."""
        if min(one, other) < self.num_demands:
            first, second = (shown_number(number, self.names, self.num_demands) for number in sorted((one, other)))
            return ControllerError(f"{first} and {second} cannot be reconciled at position {self.position}")
        first, second = (f"{number + 1 - self.num_demands} ({self.names[number]})" for number in sorted((one, other)))
        return ControllerError(
            f"controllers {first} and {second} cannot be reconciled at position {self.position}: {what}"
        )


def shown_number(number: int, names: Sequence[str], num_demands: int) -> str:
    """Return the name of a controller in errors: a client's controllers count from 1, a policy has only its name."""
    return names[number] if number < num_demands else f"controller {number + 1 - num_demands} ({names[number]})"


# -- sampling ----------------------------------------------------------------------------------------------


def is_wish(branch: Branch) -> bool:
    """Return whether a branch changes how the next token is sampled."""
    return bool(
        branch.mask is not None
        or branch.bias
        or branch.sampling is not None
        or branch.splices
        or branch.top_logprobs
        or branch.control_vectors
    )


def draw_of(branches: Sequence[Branch], vocabulary: int, clash: DecisionConflict) -> Branch:
    """Return the joint branch for sampling. If a splice depends on the sampled token, only its rewind is kept, because
    forced tokens must first be shown to the others. `vocabulary` has a bit for each token."""
    mask = branches[0].mask
    bias, sampling, splices, top = branches[0].bias, branches[0].sampling, branches[0].splices, branches[0].top_logprobs
    for number in range(1, len(branches)):
        other = branches[number]
        if other.mask is not None:
            mask = other.mask if mask is None else _intersection(branches, number, mask, vocabulary, clash)
        if other.bias:
            bias = (*bias, *other.bias)
        if other.splices:
            splices = (*splices, *other.splices)
        sampling = sampling or other.sampling
        top = max(top, other.top_logprobs)
    if splices:
        splices = tuple(Splice(splice.backtrack, (), splice.when_sampled) for splice in splices)
    return Branch(True, mask, bias, sampling, splices, top, control_vectors=joint_scales(branches))


def joint_scales(branches: Iterable[Branch]) -> dict[str, float] | None:
    """Return the scales of control vectors that branches set. If two set the same vector, the outer controller's scale
    is used."""
    scales: dict[str, float] = {}
    for branch in branches:
        for name, scale in (branch.control_vectors or {}).items():
            scales.setdefault(name, scale)
    return scales or None


def _intersection(
    branches: Sequence[Branch], number: int, mask: bytes, vocabulary: int, clash: DecisionConflict
) -> bytes:
    """Return the intersection of `mask`, which combines the branches before, with the mask of branch `number`."""
    other = branches[number].mask or b""
    if other == mask:
        return mask
    if len(other) != len(mask):
        raise ControllerError(
            f"the mask of {shown_number(number, clash.names, clash.num_demands)} has {len(other)} bytes; "
            f"the mask of another controller has {len(mask)} bytes"
        )
    both = int.from_bytes(mask, "little") & int.from_bytes(other, "little")
    if not both & vocabulary:
        masks = [(one, branch.mask) for one, branch in enumerate(branches[:number]) if branch.mask is not None]
        wanted = int.from_bytes(other, "little")
        against = next((one for one, each in masks if not int.from_bytes(each, "little") & wanted & vocabulary), None)
        one = masks[-1][0] if against is None else against
        tokens = " and ".join(_example(branches[each].mask or b"", vocabulary) for each in (one, number))
        raise clash.between(one, number, f"no token is allowed by both controllers; they allow {tokens}")
    return both.to_bytes(len(mask), "little")


def _example(mask: bytes, vocabulary: int) -> str:
    """Return the first token of a mask, for error messages."""
    row = int.from_bytes(mask, "little") & vocabulary
    if not row:
        return "nothing"
    first = f"token {(row & -row).bit_length() - 1}"
    return first if row.bit_count() == 1 else f"{first} and {row.bit_count() - 1} more"


def allows(branch: Branch, token: int) -> bool:
    """Return whether the branch allows sampling `token`."""
    if branch.mask is not None and not mask_allows(branch.mask, token):
        return False
    if any(isinstance(each.when_sampled, Outside) and token in each.when_sampled for each in branch.splices):
        return False  # the token would be rolled back
    return not any(each == token and addend == -float("inf") for each, addend in branch.bias)


def matching(branch: Branch, token: int) -> Splice | None:
    """Return the splice that applies to the sampled token."""
    return next((each for each in branch.splices if not each.when_sampled or token in each.when_sampled), None)


# -- forced tokens -----------------------------------------------------------------------------------------


def piece_of(way: Sequence[Way], clash: DecisionConflict) -> tuple[int, tuple[int, ...]]:
    """Return the first piece of a forced continuation: the number of tokens to roll back, or else the token to append.
    Raises `ControllerError` if the other controllers do not allow it. The other controllers need not allow an empty
    splice."""
    forcing = [
        (number, each)
        for number, each in enumerate(way)
        if isinstance(each, Splice) and (each.backtrack or each.ff_tokens)
    ]
    if not forcing:
        return 0, ()
    first, splice = forcing[0]
    for number, other in forcing[1:]:
        if other.backtrack != splice.backtrack:
            what = f"one takes {splice.backtrack} tokens back and the other {other.backtrack}{_before(splice, other)}"
            raise clash.between(first, number, what)
    if splice.backtrack:
        return splice.backtrack, ()
    token = splice.ff_tokens[0]
    for number, each in enumerate(way):
        if isinstance(each, Branch):
            if not allows(each, token):
                raise clash.between(
                    first, number, f"{clash.names[first]} forces token {token}, which the other controller forbids"
                )
        elif each.ff_tokens and each.ff_tokens[0] != token:
            what = f"one forces token {token}, and the other forces token {each.ff_tokens[0]}"
            raise clash.between(first, number, what)
    return 0, (token,)


def _before(one: Splice, other: Splice) -> str:
    tokens = (*one.ff_tokens, *other.ff_tokens)
    return f", before token {tokens[0]}" if tokens else ""


def rest_of(splice: Splice, piece: tuple[int, tuple[int, ...]]) -> Splice | None:
    """Return what remains of a splice after one piece, or None if nothing remains."""
    backtrack, tokens = piece
    if splice.backtrack:
        rest = Splice(splice.backtrack - backtrack, splice.ff_tokens)
    else:
        rest = Splice(0, splice.ff_tokens[len(tokens) :])
    return rest if rest.backtrack or rest.ff_tokens else None


# -- forks -------------------------------------------------------------------------------------------------


def all_ways(options: Sequence[Sequence[Way]]) -> list[tuple[Way, ...]]:
    """Return every combination of the controllers' branches. In the order of the combinations, the branch of the first
    controller changes fastest."""
    return [way[::-1] for way in product(*reversed(options))]


def branch_numbers(counts: Sequence[int], number: int) -> Iterator[int]:
    """Yield for each controller the number of its own branch in the joint branch `number`. Each joint number has a
    different combination."""
    total = 1
    for count in counts:
        total *= count
    round_, at = divmod(number, total)
    stride = 1
    for count in counts:
        own = at // stride % count
        others = at // (stride * count) * stride + at % stride
        yield (round_ * (total // count) + others) * count + own
        stride *= count
