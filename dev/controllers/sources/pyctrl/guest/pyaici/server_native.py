"""What AICI's interpreter offers natively; `pyaici.server` has all of it too."""

# ruff: noqa: F401 -- these names are for scripts
from __future__ import annotations

from pyaici.constraints import CfgConstraint, Constraint, DynamicLexer, RegexConstraint, SubStrConstraint
from pyaici.driver import register
from pyaici.sequence import get_config, self_seq_id
from pyaici.tokens import TokenSet, detokenize, eos_token, token_repr, tokenize, tokens_repr
from pyaici.variables import append_var, get_var, set_var


def is_server_side() -> bool:
    """True: this is the server."""
    return True
