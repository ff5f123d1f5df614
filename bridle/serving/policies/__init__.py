"""Policies of an operator: they are read from a file, selected for each request, and enforced by the engine.
`policy_registry.py` has the active policies and selects those that apply to a request. `kinds.py` compiles each kind of
policy from its settings. `fields.py` validates the settings of policies."""

from bridle.serving.policies.policy_registry import NO_POLICIES as NO_POLICIES
from bridle.serving.policies.policy_registry import Applied as Applied
from bridle.serving.policies.policy_registry import Policy as Policy
from bridle.serving.policies.policy_registry import PolicyContext as PolicyContext
from bridle.serving.policies.policy_registry import PolicyRegistry as PolicyRegistry
from bridle.serving.policies.policy_registry import PolicySet as PolicySet
from bridle.serving.policies.policy_registry import read_policies as read_policies
