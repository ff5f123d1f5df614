"""The active policies, and the selection of the policies that apply to a request. Front ends use only this module of
the package."""

from __future__ import annotations

import threading
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from bridle.controllers.beams import BeamSearch
from bridle.controllers.composition import Demand, demand, parts_of
from bridle.engine.guardrails.guardrails import Guardrails, OnFailure
from bridle.errors import BridleError, InvalidRequest
from bridle.safe_repr import short_repr
from bridle.sampling import SamplingParams
from bridle.sampling_values import Watermark
from bridle.serving.policies.fields import PolicyFields
from bridle.serving.policies.kinds import KINDS, CompiledPolicy, ForModel, PolicySettings, allowed_tokens

if TYPE_CHECKING:
    from bridle.serving.tenancy.keys import Identity
    from bridle.tokenizer import Tokenizer

#: Maximum number of policies in a file.
MAX_POLICIES = 256
_MAX_FILE_BYTES = 4 << 20
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
#: Settings by which a policy may select requests.
_SCOPES = ("models", "adapters", "users", "roles", "routes")


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The properties of a request that decide which policies apply to it. `route` is a path, `lmtp` or `llm`."""

    model: str
    adapter: str | None = None
    user: str = "localhost"
    role: str = "admin"
    route: str = "llm"

    @classmethod
    def of(cls, model: str, adapter: str | None, identity: Identity, route: str) -> PolicyContext:
        """Return the properties of a front end's request that select its policies. `route` is the route in the
        request's record."""
        kind, _, rest = route.partition(" ")
        path = "lmtp" if kind == "LMTP" else rest or kind
        return cls(model, adapter, identity.user, "admin" if identity.is_admin else "user", path)


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy of an operator. `scope` has patterns for each kind of name (such as models or users). The policy
    applies if, for each kind of name in `scope`, one pattern matches. Without patterns, the policy applies to all
    requests."""

    name: str
    kind: str
    version: str = ""
    order: int = 0
    on_failure: OnFailure = "end"
    scope: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    made: CompiledPolicy = field(default_factory=CompiledPolicy)

    @property
    def label(self) -> str:
        """Return the name and the version of the policy."""
        return f"{self.name}@{self.version}" if self.version else self.name

    def applies(self, asking: PolicyContext) -> bool:
        """Return whether the policy applies to a request."""
        has = {
            "models": asking.model,
            "adapters": asking.adapter or "",
            "users": asking.user,
            "roles": asking.role,
            "routes": asking.route,
        }
        return all(any(fnmatchcase(has[what], each) for each in patterns) for what, patterns in self.scope.items())


@dataclass(frozen=True, slots=True)
class Applied:
    """The policies of one request, in the form that the engine needs."""

    policies: tuple[Policy, ...] = ()
    guard: Guardrails | None = None
    controllers: tuple[tuple[Demand, object], ...] = ()
    max_tokens: int | None = None
    watermark: Watermark | None = None
    has_header: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names and the versions of the policies, in order."""
        return tuple(policy.label for policy in self.policies)

    def limit(self, sampling: SamplingParams, room: int) -> SamplingParams:
        """Return the sampling parameters with the watermark and the token limit that the policies set. If the request
        sets no token limit, `room` limits the number of tokens too."""
        if self.watermark is not None:
            sampling = sampling.with_(watermark=self.watermark)
        if self.max_tokens is None or room < 1:
            return sampling
        most = min(self.max_tokens, room if sampling.max_tokens is None else sampling.max_tokens)
        return sampling.with_(max_tokens=most, min_tokens=min(sampling.min_tokens, most))

    def steer(self, controller: object | None) -> object | None:
        """Return the request's controller together with the controllers that policies require. Raises `InvalidRequest`
        if the policies cannot be enforced together with the request's controller."""
        if self.guard is not None and any(isinstance(part, BeamSearch) for part in parts_of(controller)):
            raise InvalidRequest(
                "use_beam_search is not supported, because policies apply to this server's outputs", "use_beam_search"
            )
        return demand(self.controllers, controller)


NO_POLICIES = Applied()


class PolicySet:
    """The active policies, in their order. Safe from any thread."""

    def __init__(self, policies: Iterable[Policy] = (), *, has_header: bool = False) -> None:
        self.policies = tuple(sorted(policies, key=lambda policy: policy.order))
        self.has_header = has_header
        self.may_take_long = any(policy.made.allowed is not None for policy in self.policies)
        self._lock = threading.Lock()
        self._masks: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], bytes]] = WeakKeyDictionary()

    def select(self, asking: PolicyContext, model: ForModel) -> Applied:
        """Return the policies that apply to a request for `model`. The first call may take a moment if a policy limits
        the characters of outputs. Raises the error of a policy that cannot be enforced, unless that policy may be left
        out."""
        chosen = tuple(policy for policy in self.policies if policy.applies(asking))
        if not chosen:
            return NO_POLICIES
        made = [policy.made for policy in chosen]
        texts = tuple(rule for each in made for rule in each.texts)
        loops = tuple(rule for each in made for rule in each.loops)
        budgets = tuple(rule for each in made for rule in each.budgets)
        patterns = tuple(dict.fromkeys(each.allowed for each in made if each.allowed is not None))
        guard = Guardrails(texts, loops, budgets, self._allowed(model, patterns)) if texts or loops or budgets else None
        limits = [each.max_tokens for each in made if each.max_tokens is not None]
        controllers = tuple(each for policy in chosen for each in _controllers(policy, model))
        mark = next((each.watermark for each in made if each.watermark is not None), None)
        return Applied(chosen, guard, controllers, min(limits, default=None), mark, self.has_header)

    def _allowed(self, model: ForModel, patterns: tuple[str, ...]) -> bytes | None:
        if not patterns:
            return None
        with self._lock:
            known = self._masks.setdefault(model.tokenizer, {})
            if patterns not in known:
                known[patterns] = allowed_tokens(model, patterns)
            return known[patterns]


def _controllers(policy: Policy, model: ForModel) -> Iterable[tuple[Demand, object]]:
    """Return the controllers that a policy requires for requests to a model."""
    if policy.made.controller is None:
        return
    try:
        controller = policy.made.controller(model)
    except BridleError as error:
        if policy.on_failure == "end":
            raise InvalidRequest(
                f"policy {policy.name} cannot be enforced on this server: {error}", "policies"
            ) from None
        return
    if controller is not None:
        yield Demand(policy.name, policy.on_failure), controller


# -- files -------------------------------------------------------------------------------------------------


def read_policies(source: Path | str | Mapping[str, Any]) -> PolicySet:
    """Read the policies of a TOML file, or of its parsed content. Raises an `InvalidRequest` that names the file, the
    policy, the key and the value."""
    if isinstance(source, Mapping):
        return _parse("policies", source)
    path = Path(source)
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} has {path.stat().st_size} bytes; at most {_MAX_FILE_BYTES}", "policies")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}", "policies") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not a valid TOML file: {error}", "policies") from None
    return _parse(str(path), values)


def _parse(where: str, values: Mapping[str, Any]) -> PolicySet:
    unknown = next((key for key in values if key not in ("policy", "header")), None)
    if unknown is not None:
        raise InvalidRequest(
            f"{where}: {short_repr(unknown)} is not a setting; the settings are policy and header", "policies"
        )
    header, tables = values.get("header", False), values.get("policy", [])
    if not isinstance(header, bool):
        raise InvalidRequest(f"{where}: header is {short_repr(header)}; must be true or false", "policies")
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise InvalidRequest(
            f"{where}: policy is {short_repr(tables)}; must be a list of tables, each with the heading [[policy]]",
            "policies",
        )
    if len(tables) > MAX_POLICIES:
        raise InvalidRequest(f"{where}: the file has {len(tables)} policies; at most {MAX_POLICIES}", "policies")
    policies = [_policy(where, number, table) for number, table in enumerate(tables, 1)]
    names = [policy.name for policy in policies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"{where}: two policies have the name {twice!r}", "policies")
    return PolicySet(policies, has_header=header)


def _policy(where: str, number: int, table: Mapping[str, Any]) -> Policy:
    """Return one policy of a file."""
    name = table.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 64 or not _NAME_CHARS.issuperset(name):
        raise InvalidRequest(
            f"{where}: policy {number}: name is {short_repr(name)}; must be 1 to 64 letters, digits, '.', '_' or '-'",
            "policies",
        )
    fields = PolicyFields(where, name, {key: value for key, value in table.items() if key != "name"})
    kind = fields.need("kind", str)
    if kind not in KINDS:
        raise fields.wrong("kind", kind, f"one of {', '.join(KINDS)}")
    version = fields.text("version", most=64)
    if not _NAME_CHARS.issuperset(version):
        raise fields.wrong("version", version, "letters, digits, '.', '_' or '-'")
    order = fields.count("order", 0, least=-1_000_000, most=1_000_000) or 0
    on_failure = cast("OnFailure", fields.choice("on_failure", ("end", "skip"), "end"))
    scope = {what: fields.texts(what, ()) for what in _SCOPES}
    made = KINDS[kind](fields, PolicySettings(name, version, on_failure))
    fields.end(kind)
    return Policy(name, kind, version, order, on_failure, {what: each for what, each in scope.items() if each}, made)


class PolicyRegistry:
    """The policies for new requests. Running requests keep the policies with which they began."""

    def __init__(self, path: Path | None = None, current: PolicySet | None = None) -> None:
        self.path = path
        self.current = current or (PolicySet() if path is None else read_policies(path))
        self.num_loads = 1
        self.error: str | None = None  # why the last attempt to read the file failed
        self.applied: Counter[str] = Counter()  # number of requests by policy name and version

    def count(self, policies: Iterable[Policy]) -> None:
        """Count a request to which the policies apply."""
        self.applied.update(policy.label for policy in policies)

    def reload(self) -> PolicySet:
        """Read the file of policies again. If the file is invalid, the current policies stay, and the error is
        raised."""
        if self.path is None:
            raise InvalidRequest("this server has no policies file; start it with --policies FILE", "policies")
        try:
            self.current = read_policies(self.path)
        except InvalidRequest as error:
            self.error = str(error)
            raise
        self.num_loads, self.error = self.num_loads + 1, None
        return self.current
