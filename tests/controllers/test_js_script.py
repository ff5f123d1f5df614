"""Tests of JavaScript scripts: how they start, end, print and fail, and which functions need no model."""

from __future__ import annotations

import re

import pytest

from bridle.outputs import FinishReason
from tests.controllers.conftest import Run

ULTIMATE = "Ultimate answer is to the life, universe and everything is "


def test_the_first_sample_of_the_protocol(js: Run) -> None:
    source = f"""
        async function main() {{
          await $`{ULTIMATE}`
          await gen({{ regex: /\\d\\d/ }})
        }}
        start(main)
    """
    ran = js(source, ULTIMATE + "42 of course")
    assert ran.text() == ULTIMATE + "42"
    assert ran.logs("a").splitlines() == [
        f'FIXED "{ULTIMATE}"',
        "GEN-OPT {regex: /\\d\\d/}",
        'regex constraint: "\\\\d\\\\d"',
        'GEN "42"',
        "JsCtrl: done",
    ]
    assert ran.end("a").reason is FinishReason.CONTROLLER
    assert ran.end("a").usage.sampled_tokens == 2


def test_without_start_the_script_itself_is_the_controller(js: Run) -> None:
    assert js('await $`a${1}`\nawait $`b${{ x: ["y"] }}`').text() == 'a1b{x: ["y"]}'


def test_a_test_says_that_it_went_well(js: Run) -> None:
    ran = js('import { test } from "aici"\ntest(async () => { await fixed("x") })')
    assert ran.text() == "x" and "TEST OK\n" in ran.logs("a")


LIBRARY = r"""
import * as aici from "aici"
import * as native from "_aici"
const {
  inspect, tokenize, detokenize, eosToken, tokenRepr, tokensRepr, TokenSet, allTokens, getVar, setVar, appendVar,
  checkVar, checkVars, AssertionError, getConfig, forkSupported, backtrackSupported, selfSeqId, getPrompt,
  getPromptLen, getTokens, helpers, log, setLogLevel, test,
} = aici
const equal = (found, expected) => {
  assert(inspect(found) === inspect(expected), `${inspect(found)}, not ${inspect(expected)}`)
}
const throws = (action, kind, part) => {
  try { action() } catch (error) {
    assert(error instanceof kind && String(error).includes(part), inspect(error))
    return
  }
  assert(false, `${action} did not throw`)
}
for (const name of ["$", "fixed", "assert", "gen", "genTokens", "start", "waitVars", "fork"]) {
  assert(typeof globalThis[name] === "function" && globalThis[name] === (aici[name] ?? globalThis[name]), name)
}
for (const name of ["regexConstraint", "cfgConstraint", "substrConstraint"]) equal(helpers[name], native[name])

test(async () => {
  // tokens
  equal(tokenize("hello"), [256, 257, 111])
  equal(tokenize("hé".toBuffer()), [104, 195, 169])
  equal(detokenize([256, 257, 111, eosToken()]).decode(), "hello")
  equal([eosToken(), tokenRepr(65), tokenRepr(258), tokensRepr([256, 258])], [258, '"A"', "EOS", '["he", EOS]'])
  throws(() => detokenize([99999]), RangeError, "outside the vocabulary of 260")
  throws(() => detokenize([-1]), RangeError, "token -1")
  // sets
  const set = new TokenSet()
  equal([set.length, set.numSet(), [...set]], [260, 0, []])
  set.add(65).add(259)
  set.delete(65)
  equal([set.has(259), set.has(65), [...set]], [true, false, [259]])
  set.setAll(true)
  equal([set.numSet(), set.has(260), String(set)], [260, false, "TokenSet: all but 0 of 260 tokens"])
  set.clear()
  equal([set.numSet(), allTokens().numSet()], [0, 260])
  throws(() => set.add(260), RangeError, "token 260")
  equal(String(new TokenSet().add(65)), 'TokenSet: {"A"}')
  // variables
  equal(getVar("x"), null)
  setVar("x", "hé")
  appendVar("x", new Uint8Array([33]))
  equal([getVar("x") instanceof Uint8Array, String(getVar("x")), String.fromBuffer(getVar("x"))], [true, "hé!", "hé!"])
  checkVar("x", "hé!")
  checkVars({ x: "hé!" })
  throws(() => checkVar("x", "no"), AssertionError, 'variable x is "hé!"; expected "no"')
  throws(() => checkVars({ y: "no" }), AssertionError, "variable y is null")
  throws(() => assert(false, "why"), AssertionError, "why")
  // engine and sequence
  equal([getConfig("fork"), getConfig("no such"), forkSupported(), backtrackSupported()], [1, 0, true, true])
  assert(selfSeqId() >= 0)
  equal(await getPrompt(), [259, 72, 105])
  equal([getPromptLen(), getTokens()], [3, [259, 72, 105]])
  // the sandbox
  equal([Date.now(), new Date().getTime(), performance.now()], [0, 0, 0])
  for (const name of ["process", "require", "fetch", "std", "os"]) equal(typeof globalThis[name], "undefined")
  // showing values
  class Point { x = 1 }
  const loop = []
  loop.push(loop)
  assert(inspect(new Point()) === "Point {x: 1}" && inspect(loop) === "[[circular]]")
  assert(inspect({ "a b": [null, undefined, 1n, "q", /x/gi, new Map([[1, new Set([2])]])] })
    === '{"a b": [null, undefined, 1n, "q", /x/gi, Map {1 => Set {2}}]}')
  log("shown", 1, { a: [1] })
  for (const print of Object.values(console)) print("printed")
  setLogLevel(0)
  await fixed("silent")
})
"""


def test_what_needs_no_model(js: Run) -> None:
    ran = js(LIBRARY, prompt="Hi")
    assert ran.error() == ""
    assert ran.text() == "silent" and ran.variables() == {"x": "hé!".encode()}
    assert ran.logs("a") == "shown 1 {a: [1]}\n" + 6 * "printed\n" + "TEST OK\nJsCtrl: done\n"


# -- failing ------------------------------------------------------------------------------------------------


FAILURES = [
    ("start(async () => {\n  await fixed('a')\n  null.x\n})", r"TypeError: cannot read .*'x' of null\n +at .*main:3:"),
    ("function deep() { throw new Error('no') }\ndeep()", r"Error: no\n +at deep \(main:1:.*\n +at .*main:2:"),
    ("let a = 1\nlet b = = 2", r"SyntaxError: .*\n    at main:2:"),
    ("\nstart(async () => { Promise.reject(Error('lost')); await fixed('x') })", r"Error: lost\n    at .*main:2:"),
    ("start(async () => { throw 'plain' })", r"Error: plain"),
    ("start(() => { throw Error('outer', { cause: Error('inner') }) })", r"(?s)Error: outer.*caused by Error: inner"),
    ("let x = 1", r"the script called neither start\(\) nor test\(\)"),
    ("start(5)", r"TypeError: start\(\) needs a function"),
    ("start(async () => {}); start(async () => {})", r"called before"),
    ("import fs from 'fs'", r"no module 'fs'; a script can import 'aici'"),
    ("import { nothing } from 'aici'", r"SyntaxError: .*nothing"),
    ("start(async () => { await new Promise(() => {}) })", r"awaits something that nothing can settle"),
    ("import { panic } from 'aici'\nstart(async () => { try { panic('enough') } catch {} })", r"Error: enough"),
    ("start(async () => { fixed('a'); await gen() })", r"another step is under way"),
    ("start(async () => { (function f() { f() })() })", r"Maximum call stack size exceeded"),
    ("start(async () => { let a = []; for (;;) a.push(new Uint8Array(1e6)) })", r"out of memory"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "error"), FAILURES)
def test_failures_say_where(js: Run, source: str, error: str) -> None:
    ran = js(source)
    assert ran.end("a").reason is FinishReason.ERROR
    assert re.match(error, ran.error()) or re.search(error, ran.error().splitlines()[0]), ran.error()
    assert "wasm backtrace" not in ran.error()


def test_a_failure_in_a_later_step_is_in_the_log_too(js: Run) -> None:
    ran = js("start(async () => {\n  await gen({ maxTokens: 2 })\n  undefined()\n})", "abc")
    assert ran.logs("a").endswith("TypeError: not a function\n    at <anonymous> (main:3:3)\n")


def test_an_endless_loop_ends_its_own_request(js: Run) -> None:
    ran = js("start(async () => { await fixed('x'); for (;;); })")
    assert "timeout" in ran.error()


def test_an_exception_that_is_caught_harms_nobody(js: Run) -> None:
    source = """
        start(async () => {
          try {
            await gen({ regex: "(" })
          } catch (error) {
            await fixed(error.message.includes("unclosed") ? "bad" : "?")
          }
        })
    """
    assert js(source).text() == "bad"


def test_the_same_seed_gives_the_same_script(js: Run) -> None:
    source = "start(async () => { await fixed(String(Math.random())) })"
    assert js(source).text() == js(source).text()
