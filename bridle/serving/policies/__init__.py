"""What an operator demands of texts: read from a file, chosen for each request, and held by the engine.

`policy_registry.py` has the policies in force and which of them a request gets, `kinds.py` what each kind of policy
makes of its settings, `fields.py` how settings are checked. docs/policies.md has the meaning.
"""

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
