"""The script's view of everything: `import pyaici.server as aici`."""

# ruff: noqa: F401 -- these names are for scripts
from __future__ import annotations

from pyaici.chat import chat, template
from pyaici.constraints import (
    CfgConstraint,
    ChooseConstraint,
    Constraint,
    DynamicLexer,
    JsonConstraint,
    LarkConstraint,
    RegexConstraint,
    SubStrConstraint,
)
from pyaici.driver import AiciAsync, AiciCallbacks, register, start, test
from pyaici.generate import Generation, candidates, choose, gen, gen_text, gen_tokens
from pyaici.results import Branch, MidProcessResult, PostProcessResult, PreProcessResult, Splice
from pyaici.sequence import (
    Candidate,
    Label,
    SeqId,
    backtrack_supported,
    fork_supported,
    get_config,
    get_probes,
    get_prompt_len,
    get_tokens,
    self_seq_id,
    set_control_vectors,
)
from pyaici.server_native import is_server_side
from pyaici.steps import (
    CbType,
    ConstrainedToken,
    FixedTokens,
    GetPrompt,
    NextToken,
    Noop,
    PreToken,
    StopToken,
    fork,
    sleep,
    wait_vars,
)
from pyaici.tokens import Token, TokenSet, all_tokens, detokenize, eos_token, token_repr, tokenize, tokens_repr
from pyaici.tools import ToolCall, ToolError, tool
from pyaici.variables import append_var, check_var, check_vars, get_var, set_var

#: 0: nothing but what the script prints; 1: a line for each step; 2: what constraints allow, too.
log_level = 1
