"""Policies of an operator: read from a file, chosen for each request, and enforced by the engine.
`policy_registry.py` has the active policies and selects those of a request, `kinds.py` compiles each kind of policy
from its settings, `fields.py` validates settings."""

from bridle.serving.policies.policy_registry import (
    NO_POLICIES,
    Applied,
    Policy,
    PolicyContext,
    PolicyRegistry,
    PolicySet,
    read_policies,
)

__all__ = ["NO_POLICIES", "Applied", "PolicyContext", "Policy", "PolicyRegistry", "PolicySet", "read_policies"]
