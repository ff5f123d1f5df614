"""Tests of JavaScript scripts with labels, rewinds, forks, waits, and steps written against both versions of the
protocol."""

from __future__ import annotations

import pytest

from tests.controllers.conftest import Run


def test_fixed_texts_are_handed_over_together(js: Run) -> None:
    source = """
        import { getTokens, Label, log, test } from "aici"
        test(async () => {
          const start = new Label()
          for (let i = 0; i < 5; i++) await $`${i},`
          log(start.textSince(), start.tokensSince().length, getTokens().length)  // the script runs ahead
        })
    """
    ran = js(source, prompt="P")
    assert ran.text() == "0,1,2,3,4," and "0,1,2,3,4, 10 12\n" in ran.logs("a")
    usage = ran.end("a").usage
    assert (usage.sampled_tokens, usage.forced_tokens) == (0, 10)


def test_labels_take_back_and_replace(js: Run) -> None:
    source = """
        import { Label } from "aici"
        start(async () => {
          await fixed("3")
          const label = new Label()
          await fixed("+2")
          await gen({ regex: "=[0-9]\\\\." })
          console.log(label.textSince())
          await label.fixedAfter("+4")
          await gen({ regex: "=[0-9]\\\\." })
          await new Label(label.ptr + 2).rewind()
          await label.fixedAfter("!")
          await label.fixedAfter("")
          await $`?`
        })
    """
    ran = js(source, "3+2=5. ", "3+4=7. ")
    assert ran.text() == "3?"
    assert '+2=5.\nBACKTRACK 5 FIXED "+4"' in ran.logs("a")
    assert 'BACKTRACK 3 FIXED ""' in ran.logs("a") and 'BACKTRACK 2 FIXED "!"' in ran.logs("a")


def test_the_prompt_can_be_taken_back(js: Run) -> None:
    source = """
        import { getPromptLen, Label } from "aici"
        start(async () => {
          await new Label(getPromptLen() - 2).fixedAfter("yz")
          await gen({ maxTokens: 1 })
        })
    """
    ran = js(source, "wxyz!", prompt="wxab")
    assert ran.text().endswith("yz!")
    assert "!" in ran.text() and ran.error() == ""


def test_a_label_ahead_of_the_text_is_an_error(js: Run) -> None:
    source = """
        import { Label } from "aici"
        start(async () => { const label = new Label(999); await label.fixedAfter("x") })
    """
    assert "backtrack is -" in js(source).error()


def test_forks_know_who_they_are_and_share_variables(js: Run) -> None:
    source = """
        import { appendVar, setVar, selfSeqId } from "aici"
        start(async () => {
          await fixed("hello in ")
          const language = await fork(3)
          const name = ["French", "German", "Dutch"][language]
          await $`${name} is `
          const word = await gen({ regex: "[a-z]+[.]", maxTokens: 9 })
          setVar(name, word)
          const words = await waitVars("French", "German", "Dutch")
          await $`: ${words.map(String).join("/")}`
          appendVar("ids", `${selfSeqId()};`)
        })
    """
    ran = js(source, "French is bonjour.", "German is hallo.", "Dutch is hoi.")
    for index, own in enumerate(("French is bonjour.", "German is hallo.", "Dutch is hoi.")):
        assert ran.text("a", index) == f"hello in {own}: bonjour./hallo./hoi."
    assert len(set(ran.variables()["ids"].decode().split(";"))) == 4
    assert ran.variables()["German"] == b"hallo."


def test_forks_of_forks_know_their_paths(js: Run) -> None:
    source = """
        start(async () => {
          const path = [await fork(2), await fork(2)]
          await $`${path.join("")}${await fork(1)}`
        })
    """
    ran = js(source)
    assert sorted(ran.text("a", index) for index in range(4)) == ["000", "010", "100", "110"]


def test_a_fork_into_branches_of_its_own(js: Run) -> None:
    source = """
        import { Branch, Splice, TokenSet } from "aici"
        start(async () => {
          await fixed("Q")
          const way = await fork([
            new Branch({ splices: [new Splice(0, [65])] }),
            new Branch({ mask: new TokenSet().add(66) }),
            new Branch({ splices: [new Splice(1, [67])] }),
          ])
          await $`${way}`
        })
    """
    ran = js(source)
    assert [ran.text("a", index) for index in range(3)] == ["QA0", "QB1", "C2"]


@pytest.mark.parametrize(
    ("script", "error"),
    [("await fork(0)", "at least one way"), ("await waitVars('never')", "never")],
)
def test_what_cannot_be_done_ends_with_its_reason(js: Run, script: str, error: str) -> None:
    assert error in js(f"start(async () => {{ await fixed('x'); {script} }})").error()


def test_surplus_forks_are_refused(js: Run) -> None:
    ran = js("start(async () => { await fixed('x'); await fork(40) })")
    refused = [error for error in (ran.error(index=index) for index in range(40)) if error]
    assert len(refused) == 24 and all("16" in error for error in refused)


def test_waiting_with_a_deadline(js: Run) -> None:
    source = """
        import { setVar, sleep, TimeoutError } from "aici"
        start(async () => {
          await fixed("x")
          if (await fork(2)) {
            await sleep(20)
            setVar("late", "now")
            return
          }
          try {
            await waitVars("never", { timeout: 10 })
          } catch (error) {
            await $`${error instanceof TimeoutError} ${error.message} `
          }
          await $`${String((await waitVars("late", { timeout: 10000 }))[0])}`
        })
    """
    assert js(source).text() == "xtrue variable never was not set within 10 ms now"


def test_steps_of_dialect_2(js: Run) -> None:
    source = """
        import { FixedTokens, MidProcessResult, NextToken, Noop, Splice, StopToken, TokenSet, test } from "aici"
        class Letter extends NextToken {
          seen = []
          midProcess() { return MidProcessResult.bias(new TokenSet().add(97).add(98)) }
          postProcess(backtrack, tokens) { this.seen.push([backtrack, ...tokens]) }
        }
        class Undone extends NextToken {  // draws, then replaces the draw and the letter before it
          midProcess() { return MidProcessResult.sample({ splices: [new Splice(2, [63])] }) }
          postProcess(backtrack, tokens) { this.told = [backtrack, ...tokens].join() }
        }
        class Ahead extends NextToken {
          isFixed() { return true }
          midProcess() { return MidProcessResult.splice(0, [45]) }
        }
        class Skipped extends NextToken { midProcess() { return MidProcessResult.skip() } }
        test(async () => {
          assert((await new NextToken().run()).length === 1)
          const letter = new Letter()
          await letter.run()
          await letter.run()
          assert(letter.seen.join("|") === "0,98|0,97", letter.seen.join("|"))
          const undone = new Undone()
          await undone.run()
          assert(undone.told === "1,63", undone.told)
          assert((await new Noop().run()).length === 0 && (await new Skipped().run()).length === 0)
          assert((await new Ahead().run()).join() === "45")
          await new FixedTokens("end").run()
          console.log("TEST OK")
          await new StopToken().run()
          await fixed("never")
        })
    """
    ran = js(source, "-bbab", prompt="-")
    assert "TEST OK" in ran.logs("a"), ran.error()
    assert ran.text() == "bb?-end"


def test_steps_of_dialect_1(js: Run) -> None:
    source = """
        import { MidProcessResult, NextToken, PostProcessResult, PreProcessResult, PreToken, TokenSet } from "aici"
        const told = []
        class Forced extends PreToken { preProcess() { return PreProcessResult.ffTokens([65, 66]) } }
        class Waits extends PreToken {
          rounds = 0
          preProcess() { return ++this.rounds < 3 ? PreProcessResult.suspend() : PreProcessResult.continue_() }
        }
        class Letter extends NextToken {
          preProcess() { return PreProcessResult.continue_() }
          midProcess() { return MidProcessResult.bias(new TokenSet().add(99)) }
          postProcess(tokens) { told.push(...tokens); return PostProcessResult.fromTokens(tokens) }
        }
        class Both extends NextToken {
          preProcess() { return PreProcessResult.fork(2) }
          midProcess() { return MidProcessResult.splice(0, [68]) }
        }
        class Last extends NextToken { postProcess(tokens) { return PostProcessResult.stop() } }
        start(async () => {
          await new Forced().run()
          const waits = new Waits()
          await waits.run()
          await new Letter().run()
          await $`${waits.rounds}${told[0]}`
          await new Both().run()
          await new Last().run()
          await fixed("never")
        })
    """
    ran = js(source, "D.", prompt="x")
    assert [ran.text("a", index) for index in (0, 1)] == ["ABc399D.", "ABc399D."]


def test_a_step_that_fails_can_be_caught(js: Run) -> None:
    source = """
        import { NextToken } from "aici"
        class Bad extends NextToken { midProcess() { throw new Error("mid") } }
        class Worse extends NextToken { postProcess() { throw new Error("post") } }
        start(async () => {
          for (const step of [new Bad(), new Worse()]) {
            try { await step.run() } catch (error) { await $`${error.message} ` }
          }
        })
    """
    assert js(source, "x", prompt="x").text().replace("\\0", "") in ("mid post ", "mid \0post ")


def test_many_fixed_tokens_are_handed_over_in_pieces(js: Run) -> None:
    ran = js("start(async () => { for (let i = 0; i < 30; i++) await fixed('x'.repeat(50)) })", max_tokens=1600)
    assert ran.text() == "x" * 1500


def test_a_stop_from_outside_is_no_failure(js: Run) -> None:
    ran = js("start(async () => { await gen({ regex: 'a*', maxTokens: 50 }) })", "a" * 40, prompt="a", max_tokens=7)
    assert ran.text() == "a" * 7 and ran.error() == ""
