"""Tests that scripts have every name of AICI's interface, with its parameters and members."""

from __future__ import annotations

import json
import textwrap

from tests.controllers.conftest import Run
from tests.controllers.pykit import PRELUDE, script

#: Names of `pyaici.server`: functions with their parameters as AICI's scripts may name them, in order.
PY_FUNCTIONS = """
tokenize(text) detokenize(tokens) get_var(name) set_var(name, value) append_var(name, value) eos_token()
register(callbacks) is_server_side() token_repr(token) tokens_repr(tokens) get_config(name) start(coroutine)
test(coroutine) get_tokens()
gen_tokens(regex, yacc, substring, substring_end, options, store_var, stop_at, max_tokens)
gen_text(regex, yacc, substring, substring_end, options, store_var, stop_at, max_tokens)
fork(forks) wait_vars(names) check_var(name, value) check_vars(values) get_prompt_len() all_tokens() fork_supported()
backtrack_supported() self_seq_id()
"""
#: Its classes with their members, of both generations.
PY_CLASSES = {
    "TokenSet": "__getitem__ __setitem__ __len__ set_all num_set __repr__",
    "Constraint": "eos_allowed eos_forced token_allowed append_token allow_tokens",
    "RegexConstraint": "allow_tokens",
    "CfgConstraint": "allow_tokens",
    "SubStrConstraint": "allow_tokens",
    "ChooseConstraint": "eos_allowed eos_forced token_allowed append_token allow_tokens",
    "DynamicLexer": "add constraint",
    "Label": "tokens_since text_since",
    "FixedTokens": "mid_process post_process is_fixed __await__",
    "NextToken": "pre_process mid_process post_process is_fixed __await__",
    "ConstrainedToken": "mid_process post_process __await__",
    "StopToken": "mid_process __await__",
    "PreToken": "pre_process mid_process __await__",
    "Noop": "mid_process __await__",
    "GetPrompt": "__await__",
    "AiciCallbacks": "init_prompt mid_process",
    "AiciAsync": "instance step init_prompt mid_process",
    "PreProcessResult": "continue_ suspend fork ff_tokens_pre",
    "PostProcessResult": "continue_ stop from_tokens",
    "MidProcessResult": "is_splice bias splice stop noop skip",
    "Branch": "is_splice noop",
    "Splice": "add_splice",
}
PY_OTHERS = "Token SeqId CbType log_level"
#: Names of `pyaici.server_native`.
PY_NATIVE = """
tokenize detokenize get_var set_var append_var eos_token self_seq_id register is_server_side TokenSet Constraint
RegexConstraint CfgConstraint SubStrConstraint token_repr tokens_repr get_config DynamicLexer
"""


def test_python_has_every_name(py: Run) -> None:
    functions = [part.strip() + ")" for part in PY_FUNCTIONS.split(")") if part.strip()]
    body = f"""
import inspect, json
import pyaici.server_native as native
missing = []
for text in {functions!r}:
    name, _, parameters = text[:-1].partition("(")
    function = getattr(aici, name, None)
    found = [] if function is None else list(inspect.signature(function).parameters)
    wanted = [word for word in parameters.split(", ") if word]
    if function is None or found[:len(wanted)] != wanted:
        missing.append(f"{{text}}: {{found}}")
for name, members in {PY_CLASSES!r}.items():
    missing += [f"{{name}}.{{member}}" for member in members.split() if not hasattr(getattr(aici, name, None), member)]
missing += [name for name in {PY_OTHERS.split()!r} if not hasattr(aici, name)]
missing += [f"server_native.{{name}}" for name in {PY_NATIVE.split()!r} if not hasattr(native, name)]
print(json.dumps(missing))
"""
    ran = py(script(body))
    assert ran.error() == "" and json.loads(ran.logs("a")) == []


#: What module `aici` exports: functions and values, then classes with their members ("static" ones marked).
JS_NAMES = """
$ fixed gen genTokens start test fork waitVars getTokens inspect log assert tokenize detokenize getVar setVar appendVar
eosToken selfSeqId checkVar checkVars getPrompt getPromptLen getConfig forkSupported setLogLevel tokenRepr tokensRepr
allTokens helpers AssertionError
"""
JS_CLASSES = {
    "Label": "tokensSince textSince fixedAfter",
    "TokenSet": "add delete has clear length setAll numSet toString",
    "Constraint": "eosAllowed eosForced tokenAllowed appendToken allowTokens",
    "ChooseConstraint": "eosAllowed eosForced tokenAllowed appendToken allowTokens",
    "NextToken": "run preProcess midProcess postProcess isFixed",
    "ConstrainedToken": "run midProcess postProcess",
    "PreToken": "run preProcess",
    "MidProcessResult": "isSplice static.bias static.splice static.stop static.noop static.skipMe",
    "PreProcessResult": "static.continue static.suspend static.fork static.ffTokens",
    "PostProcessResult": "static.continue static.stop static.fromTokens",
    "Branch": "isSplice static.noop",
    "Splice": "addSplice",
    "AiciAsync": "step static.instance",
}
JS_HELPERS = "regex_constraint cfg_constraint substr_constraint FixedTokens StopToken panic"
JS_GLOBALS = "$ fixed assert gen genTokens start waitVars fork console"
JS_NATIVE = """
tokenize detokenize tokenRepr tokensRepr selfSeqId panic getVar setVar appendVar getConfig eosToken stringToBuffer
bufferToString bufferRepr TokenSet Constraint regexConstraint cfgConstraint substrConstraint
"""


def test_javascript_has_every_name(js: Run) -> None:
    source = f"""
import * as aici from "aici"
import * as native from "_aici"
const missing = []
const check = (where, holder, names) => {{
  for (const name of names) if (!(name in holder)) missing.push(where + name)
}}
start(() => {{
  check("", aici, {JS_NAMES.split()})
  for (const [name, members] of Object.entries({json.dumps(JS_CLASSES)})) {{
    const type = aici[name]
    if (typeof type !== "function") missing.push(name)
    else for (const member of members.split(" ")) {{
      const isStatic = member.startsWith("static.")
      check(name + ".", isStatic ? type : type.prototype, [member.replace("static.", "")])
    }}
  }}
  check("helpers.", aici.helpers, {JS_HELPERS.split()})
  check("global ", globalThis, {JS_GLOBALS.split()})
  check("_aici.", native, {JS_NATIVE.split()})
  check("console.", console, ["log", "info", "warn", "debug", "trace"])
  check("String.", String, ["fromBuffer"])
  check("String.prototype.", String.prototype, ["toBuffer"])
  check("Uint8Array.prototype.", Uint8Array.prototype, ["decode"])
  console.log(JSON.stringify(missing))
}})
"""
    ran = js(source)
    assert ran.error() == "" and json.loads(ran.logs("a").splitlines()[0]) == []


def test_splices_are_added_up_in_python(py: Run) -> None:
    body = """
first = aici.Splice(backtrack=1, ff_tokens=[1, 2, 3])
first.add_splice(aici.Splice(backtrack=2, ff_tokens=[4]))
assert (first.backtrack, first.ff_tokens) == (1, [1, 4]), first
first.add_splice(aici.Splice(backtrack=5, ff_tokens=[6]))
assert (first.backtrack, first.ff_tokens) == (4, [6]), first
assert aici.MidProcessResult.splice(1, [2]).is_splice() and aici.Branch.noop().is_splice()
assert not aici.MidProcessResult.bias(aici.all_tokens()).is_splice() and not aici.MidProcessResult.stop().is_splice()
assert aici.MidProcessResult(skip_me=True).skip_me and aici.MidProcessResult.skip().skip_me
"""
    assert py(script(body)).error() == ""


def test_splices_are_added_up_in_javascript(js: Run) -> None:
    source = """
import { Branch, MidProcessResult, Splice, TokenSet, allTokens } from "aici"
const first = new Splice(1, [1, 2, 3])
first.addSplice(new Splice(2, [4]))
assert(first.backtrack === 1 && `${first.ffTokens}` === "1,4", inspect(first))
first.addSplice(new Splice(5, [6]))
assert(first.backtrack === 4 && `${first.ffTokens}` === "6")
assert(MidProcessResult.splice(1, [2]).isSplice() && Branch.noop().isSplice())
assert(!MidProcessResult.bias(allTokens()).isSplice() && !MidProcessResult.stop().isSplice())
assert(MidProcessResult.skipMe().skip_me && !MidProcessResult.noop().skip_me)
assert(new Branch({ sampleMask: new TokenSet() }).mask instanceof TokenSet)
start(() => {})
"""
    assert js(source.replace("inspect(first)", "'sum'")).error() == ""


def test_callbacks_of_the_second_generation(py: Run) -> None:
    """Callbacks of the second version receive the sampled tokens and return the next step, also in a subclass of
    `AiciAsync`."""
    source = f"""{PRELUDE}
class Two(aici.AiciCallbacks):
    seen = []
    def mid_process(self, backtrack, tokens, fork_group):
        self.seen.append((backtrack, tokens, len(fork_group)))
        print(self.seen[-1])
        if len(self.seen) == 3:
            return aici.MidProcessResult.stop()
        return super().mid_process(backtrack, tokens, fork_group)

aici.register(Two())
"""
    ran = py(source, "Q: yes", prompt="Q: ")
    assert (ran.error(), ran.text(), ran.logs("a")) == ("", "ye", "(0, [], 1)\n(0, [121], 1)\n(0, [101], 1)\n")
    watched = f"""{PRELUDE}
class Watched(aici.AiciAsync):
    def mid_process(self, backtrack, tokens, fork_group):
        print(tokens)
        return super().mid_process(backtrack, tokens, fork_group)

class Yes(aici.NextToken):
    def post_process(self, backtrack, tokens):
        self.value = "yes" if tokens == [121] else "no"

async def main():
    assert aici.AiciAsync.instance is watched
    print(await Yes())

watched = Watched(main())
"""
    ran = py(watched, "Q: yes", prompt="Q: ")
    assert (ran.error(), ran.text(), ran.logs("a")) == ("", "y", "[]\n[121]\nyes\n")


def test_a_driver_is_stepped_by_hand_in_javascript(js: Run) -> None:
    source = """
    import { AiciAsync, NextToken, PreProcessResult, MidProcessResult, PreToken } from "aici"
    class Polite extends NextToken {
      preProcess() {
        console.log("before")
        return super.preProcess()
      }
      postProcess(backtrack, tokens) {
        console.log(`${this.finished} ${this.currTokens}`)
      }
    }
    const driver = start(async () => {
      const told = await new Polite().run()
      console.log(`told ${told}`)
      await new Polite().run()
    })
    assert(driver === AiciAsync.instance)
    await driver.step([7])
    console.log("stepped")
    """
    ran = js(textwrap.dedent(source), "Q: yes", prompt="Q: ")
    assert ran.error() == "" and ran.text() == "y"
    assert ran.logs("a") == "told 7\nstepped\nbefore\nfalse 121\nJsCtrl: done\n"
