"""Tests of generation from JavaScript: constraints, ends of texts, sampling, candidates, and constraints in a
script."""

from __future__ import annotations

import json

import pytest

from tests.controllers.conftest import Run


def gen(options: str, before: str = "Q: ") -> str:
    return f"start(async () => {{ await fixed({json.dumps(before)}); await gen({options}) }})"


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("options", "line", "expected"),
    [
        ("{ regex: /[0-9]+x/ }", "Q: 12x34", "12x"),
        ("{ regex: /ABC/i }", "Q: abcd", "abc"),
        ("{ regex: '[a-c]{2}' }", "Q: xyz", "aa"),
        ("{ regex: /a\\/b/ }", "", "a/b"),
        ('{ yacc: \'%start s\\n%%\\ns : NUM | s "+" NUM ;\\nNUM : "/[0-9]/" ;\', maxTokens: 3 }', "Q: 1+2", "1+2"),
        ("{ substring: 'the quick brown fox', maxTokens: 30 }", 'Q: quick brown" and', 'quick brown"'),
        ("{ substring: 'the quick fox', substringEnd: '.', maxTokens: 30 }", "Q: fox. Yes", "fox."),
        ("{ options: ['Yes', 'No', 'Yesterday'] }", "Q: Yesterday it", "Yesterday"),
        ("{ options: ['Yes', 'No', 'Yesterday'] }", "Q: Yes", "Yes"),
        ("{ choice: ['red', 'green'] }", "Q: green", "green"),
        ("{ lark: 'start: \"a\" /[0-9]/' }", "Q: b7", "a0"),
        ("{ jsonObject: true, maxTokens: 30 }", 'Q: {"a": 1}', '{"a": 1}'),
        ("{ constraint: { any_of: ['up', { regex: '[0-9]{2}' }] } }", "Q: 77", "77"),
        ("{ stopAt: '\\n' }", "Q: one\ntwo", "one\n"),
        ("{ stopAt: ['two', 'ne'] }", "Q: one\ntwo", "one"),
        ("{ regex: 'abc[.]def', stopAt: '.' }", "", "abc."),
        ("{ regex: 'abcdef', maxTokens: 4 }", "", "abcd"),
        ("{ maxTokens: 3 }", "Q: abcdef", "abc"),
        ("{ maxTokens: 0 }", "Q: abcdef", ""),
        ("{}", "Q: done", "done"),
        ("{ maxTokens: 99 }", "Q: hello", "hello"),
        ("undefined", "Q: 0123456789012345678901234567890", "01234567890123456789"),
    ],
)
def test_generation_ends_where_it_should(js: Run, options: str, line: str, expected: str) -> None:
    assert js(gen(options), line).text() == "Q: " + expected


@pytest.mark.parametrize("draft", ["'fine, all right'", "tokenize('fine, all right')", "'ill'", "''"])
def test_a_draft_changes_nothing_but_the_steps(js: Run, draft: str) -> None:
    source = 'import { tokenize } from "aici"; ' + gen(f"{{ maxTokens: 15, draft: {draft} }}")
    plain, ran = (js(source, "Q: fine, all right", speculate=speculate) for speculate in (0, 6))
    assert plain.text() == ran.text() == "Q: fine, all right"
    assert (ran.end("a").usage.drafted_tokens > 0) is ("fine" in draft)


def test_json_by_schema_writes_by_itself_what_is_no_choice(js: Run) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    text = '{"name": "Bob", "age": 42}'
    ran = js(gen(f"{{ jsonSchema: {json.dumps(schema)}, maxTokens: 40 }}"), "Q: " + text)
    assert ran.text() == "Q: " + text
    assert ran.end("a").usage.sampled_tokens < len(text) // 2
    as_text = js(gen(f"{{ jsonSchema: {json.dumps(json.dumps(schema))}, maxTokens: 40 }}"), "Q: " + text)
    assert as_text.text() == ran.text()


def test_what_came_out_and_why(js: Run) -> None:
    source = """
        import { generate, checkVar, inspect, test } from "aici"
        const seen = []
        test(async () => {
          for (const options of [
            { regex: "ab", storeVar: "v" }, { maxTokens: 2 }, { stopAt: "b" }, { options: ["ab"] }, { regex: "" }, {},
          ]) {
            await fixed("Q: ")
            const { text, bytes, tokens, reason } = await generate(options)
            seen.push(`${text}/${bytes}/${tokens}/${reason}`)
          }
          checkVar("v", "ab")
          console.log(seen.join(" "))
          assert(inspect(await genTokens({ regex: "hello" })) === "[256, 257, 111]")
        })
    """
    ran = js(source, "Q: ab")
    assert ran.error() == ""
    assert "ab/ab/97,98/constraint ab/ab/97,98/maxTokens ab/ab/97,98/stopAt ab/ab/97,98/constraint //258/eos" in (
        ran.logs("a")
    )
    assert " ab/ab/97,98,258/eos\n" in ran.logs("a") and "TEST OK" in ran.logs("a")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("{ regex: 'a', options: ['b'] }", "regex and options: at most one constraint"),
        ("{ maxToken: 3 }", "unknown option maxToken; there are regex"),
        ("{ maxTokens: -1 }", "maxTokens is -1"),
        ("{ regex: '(' }", "unclosed group"),
        ("{ regex: 'a(?=b)' }", "constraint:"),
        ("{ yacc: 'nonsense' }", "yacc"),
        ("{ lark: 'start: x' }", "constraint:"),
        ("{ jsonSchema: { type: 'banana' } }", "constraint:"),
        ("{ options: 'ab' }", 'options is "ab"; must be a list of texts'),
        ("{ constraint: { regexp: 'a' } }", "must have exactly one"),
        ("{ topP: 7 }", "top_p is 7"),
        ("{ bias: [[99999, 1]] }", "99999"),
        ("{ topLogprobs: 101 }", "101"),
    ],
)
def test_bad_options_are_told(js: Run, options: str, error: str) -> None:
    assert error in js(gen(options)).error()


def test_sampling_of_one_generation(js: Run) -> None:
    source = """
        start(async () => {
          await fixed("Q: ")
          await gen({ regex: "[a-z]{30}", temperature: 100, topK: 3, maxTokens: 30 })
          await fixed("\\nQ: ")
          await gen({ regex: "[a-z]{3}", bias: { 113: 99 } })
          await gen({ regex: "[a-z]{3}", bias: new Map([[114, 99]]) })
          await gen({ regex: "[a-z]{3}", bias: [[115, 99]] })
        })
    """
    hot, cold = js(source, "Q: abc", seed=5).text().split("\n")
    assert set(hot.removeprefix("Q: ")) == set("abc") and cold == "Q: qqqrrrsss"


def test_candidates_of_a_draw(js: Run) -> None:
    source = """
        import { candidates, generate, getTokens, test } from "aici"
        test(async () => {
          await fixed("Q: ")
          const before = getTokens().length
          const [best, next] = await candidates(2)
          assert(best.text === "N" && best.logprob > -0.01 && next.logprob < -20, "free")
          const among = await candidates(3, { options: ["Yes", "No"] })
          assert(among[0].text === "N" && among[1].text === "Y" && among[2]?.logprob !== 0, "constrained")
          const even = await candidates(2, { regex: "[01]" })
          assert(even.every(({ logprob }) => Math.abs(Math.exp(logprob) - 0.5) < 1e-6), "after the mask")
          assert(getTokens().length === before, "nothing is appended")
          const { text, candidates: seen } = await generate({ maxTokens: 2, topLogprobs: 1 })
          assert(text === "No" && seen.map(([{ text }]) => text).join() === "N,o", "while generating")
        })
    """
    ran = js(source, "Q: No")
    assert "TEST OK" in ran.logs("a"), ran.error()
    assert ran.text() == "Q: No"


def test_constraints_in_the_script(js: Run) -> None:
    source = """
        import { ChooseConstraint, ConstrainedToken, Constraint, cfgConstraint, eosToken, inspect, jsonConstraint,
          larkConstraint, regexConstraint, substrConstraint, test, TokenSet } from "aici"
        const [a, b, c] = [97, 98, 99]
        function check(constraint, text) {
          const set = new TokenSet()
          constraint.allowTokens(set)
          const all = [a, b, c, eosToken()].filter((token) => constraint.tokenAllowed(token))
          assert(all.every((token) => set.has(token)), "one by one as all together")
          const letters = all.map((token) => "abc"[token - a] ?? ".").join("")
          const found = `${letters} ${constraint.eosAllowed()} ${constraint.eosForced()}`
          assert(found === text, `${found}, not ${text}`)
          return constraint
        }
        class Vowels extends Constraint {
          allowTokens(set) { set.clear(); for (const vowel of "aeiou") set.add(vowel.charCodeAt(0)) }
          eosForced() { return this.count >= 3 }
          count = 0
          appendToken(token) { this.count++ }
        }
        test(async () => {
          check(new Constraint(), "abc. true false")
          const regex = check(regexConstraint("ab*c?"), "a false false")
          regex.appendToken(a)
          check(regex, "bc. true false").appendToken(c)
          check(regex, ". true true")
          const choice = check(new ChooseConstraint(["ab", "ac", "a"]), "a false false")
          choice.appendToken(a)
          check(choice, "bc. true false").appendToken(b)
          check(choice, ". true true")
          check(cfgConstraint('%start s\\n%%\\ns : "a" | "b" ;'), "ab false false")
          check(larkConstraint('start: "c"'), "c false false")
          check(substrConstraint("b c", ""), "bc false false")
          check(jsonConstraint({ type: "integer" }), " false false")
          let problem = ""
          try { regexConstraint("a").appendToken(b) } catch (error) { problem = error.message }
          assert(problem.includes('does not allow "b"'), problem)
          await fixed("Q: ")
          const made = []
          const step = new ConstrainedToken(() => made[made.push(new Vowels()) - 1])
          assert(made.length === 0, "made when needed")
          while (!step.finished) assert((await step.run()).length === 1)
          assert(made.length === 1)
          await gen({ constraint: regexConstraint("[0-9]") })
          for (let i = 0; i < 100; i++) regexConstraint("a")  // handles are given back
        })
    """
    ran = js(source, "Q: ixuzz")
    assert "TEST OK" in ran.logs("a"), ran.error()
    assert ran.text() == "Q: iaa0"


def test_a_constraint_that_allows_nothing_explains_itself(js: Run) -> None:
    source = """
        import { Constraint, TokenSet } from "aici"
        class Nothing extends Constraint { allowTokens(set) { set.clear() } }
        start(async () => { await gen({ constraint: new Nothing() }); await fixed("on") })
    """
    ran = js(source)
    assert "the constraint allows no token; adding EOS" in ran.logs("a") and ran.text() == "on"
