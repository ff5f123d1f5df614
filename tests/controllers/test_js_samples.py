"""Tests like AICI's sample scripts, rewritten in JavaScript, over a fake model that has memorized the answers."""

from __future__ import annotations

from tests.controllers.conftest import Run
from tests.controllers.pykit import Scripts


def passed(ran: Scripts, *texts: str) -> None:
    logs = "".join(ran.logs("a", index) for index in range(len(texts)))
    assert logs.count("TEST OK") == len(texts), ran.error() or logs
    for index, text in enumerate(texts):
        assert ran.text("a", index) == text


def test_a_script_reads_and_writes_variables_and_tokens(js: Run) -> None:
    source = """
        import { checkVars, getVar, setVar, tokenize, detokenize, test } from "aici"
        test(async () => {
          setVar("greeting", "hi")
          assert(getVar("greeting").decode() === "hi" && getVar("missing") === null)
          assert(detokenize(tokenize("I am about ")).decode() === "I am about ")
          await fixed("I am about ")
          await gen({ maxTokens: 5, storeVar: "first" })
          await fixed("The word 'hello' in French is")
          await gen({ regex: / "[a-z]+"/, storeVar: "french", maxTokens: 15 })
          await fixed(" and it was invented in ")
          await gen({ regex: "[0-9]+", storeVar: "year", maxTokens: 5 })
          await fixed("\\nYes or no? ")
          const answer = await gen({ options: ["Yes", "No"], storeVar: "answer" })
          checkVars({ greeting: "hi", first: "to go", french: ' "salut"', year: "1876", answer })
        })
    """
    lines = ("I am about to go home", 'in French is "salut" and', "invented in 1876", "or no? No, never")
    passed(
        js(source, *lines),
        "I am about to goThe word 'hello' in French is \"salut\" and it was invented in 1876\nYes or no? No",
    )


def test_a_script_numbers_a_list(js: Run) -> None:
    source = """
        import { test } from "aici"
        test(async () => {
          await $`Here is a list of ${3} things:\\n`
          for (let i = 1; i <= 3; i++) {
            await $`${i}. `
            await gen({ stopAt: "\\n", maxTokens: 20 })
          }
        })
    """
    passed(js(source, "1. sun\n", "2. moon\n", "3. star\n"), "Here is a list of 3 things:\n1. sun\n2. moon\n3. star\n")


def test_text_since_a_label_is_what_was_generated_in_javascript(js: Run) -> None:
    source = """
        import { Label, test } from "aici"
        test(async () => {
          await fixed("3")
          const label = new Label()
          await fixed("+2")
          await gen({ regex: "=.*\\\\.", maxTokens: 4, stopAt: "." })
          assert(label.textSince() === "+2=5.")
          await label.fixedAfter("+4")
          await gen({ regex: "=.*\\\\.", maxTokens: 4, stopAt: "." })
        })
    """
    passed(js(source, "3+2=5. and", "3+4=7. and"), "3+4=7.")


FORK = """
    import { checkVar, setVar, test } from "aici"
    test(async () => {
      await fixed("The word 'hello' in")
      const id = await fork(3)
      if (id === 0) {
        await fixed(" French is '")
        await gen({ regex: "[a-z]+'", storeVar: "french", maxTokens: 9 })
      } else if (id === 1) {
        await fixed(" German is '")
        await gen({ regex: "[a-z]+'", storeVar: "german", maxTokens: 9 })
      } else {
        const [french, german] = await waitVars("french", "german")
        await $` both: ${french.decode()} ${german.decode()}`
        checkVar("french", "salut'")
      }
    })
"""


def test_a_script_forks_and_joins(js: Run) -> None:
    ran = js(FORK, "French is 'salut' and", "German is 'hallo' and")
    hello = "The word 'hello' in"
    passed(ran, f"{hello} French is 'salut'", f"{hello} German is 'hallo'", f"{hello} both: salut' hallo'")


def test_labels_go_back_to_their_places_in_javascript(js: Run) -> None:
    source = """
        import { checkVars, Label, test } from "aici"
        test(async () => {
          await fixed("The word 'hello' in")
          const label = new Label()
          await label.fixedAfter(" French is '")
          await gen({ regex: "[a-z]+'", storeVar: "french", maxTokens: 9 })
          await label.fixedAfter(" German is '")
          await gen({ regex: "[a-z]+'", storeVar: "german", maxTokens: 9 })
          checkVars({ french: "salut'", german: "hallo'" })
        })
    """
    passed(js(source, "French is 'salut' and", "German is 'hallo' and"), "The word 'hello' in German is 'hallo'")


def test_lines_are_generated_one_by_one_in_javascript(js: Run) -> None:
    source = """
        import { checkVars, Label, test } from "aici"
        test(async () => {
          const begin = new Label()
          await fixed("Text: aspirin and ibuprofen.\\nDrugs:")
          const drugs = []
          for (let i = 0; i < 5; i++) {
            const line = await gen({ stopAt: "\\n", maxTokens: 20 })
            if (!line.trim()) break
            drugs.push(line.trim())
          }
          await begin.fixedAfter("Which is older? ")
          await gen({ options: drugs, storeVar: "older" })
          assert(begin.textSince() === "Which is older? aspirin")
          checkVars({ older: "aspirin" })
        })
    """
    passed(js(source, "Drugs: aspirin\n ibuprofen\n\n", "older? aspirin."), "Which is older? aspirin")


def test_a_script_branches_on_a_choice(js: Run) -> None:
    source = """
        import { test } from "aici"
        test(async () => {
          await fixed("Do you want a joke or a poem? A ")
          const answer = await gen({ options: ["joke", "poem"] })
          await $`${answer === "joke" ? "\\nKnock" : "\\nRoses"}`
          await gen({ stopAt: "\\n" })
        })
    """
    passed(js(source, "poem? A joke", "Knock knock\n"), "Do you want a joke or a poem? A joke\nKnock knock\n")


def test_hello_prompt_backtrack_and_noop(js: Run) -> None:
    source = """
        import { getPrompt, Label, Noop, test } from "aici"
        test(async () => {
          const prompt = await getPrompt()
          assert(prompt.length > 2)
          const label = new Label()
          await new Noop().run()
          await fixed(", world")
          await new Noop().run()
          await gen({ regex: "!" })
          await new Noop().run()
          await fork(1)
          await new Noop().run()
          await label.fixedAfter(" there")
          await new Noop().run()
          await gen({ options: ["!", "?"] })
        })
    """
    passed(js(source, "there?", prompt="Hello"), " there?")


def test_a_grammar_used_twice(js: Run) -> None:
    source = r"""
        import { test } from "aici"
        const yacc = `%start list
        %%
        list : "[" items "]" ;
        items : NUMBER | NUMBER "," items ;
        NUMBER : "/[0-9]+/" ;
        SKIP : "/ /" ;`
        test(async () => {
          await fixed("A: ")
          await gen({ yacc, maxTokens: 20 })
          await fixed("\nB: ")
          await gen({ yacc, maxTokens: 20 })
        })
    """
    passed(js(source, "A: [1, 2]", "B: [34]."), "A: [1, 2]\nB: [34]")


def test_a_quote_goes_on_behind_its_end(js: Run) -> None:
    source = """
        import { test } from "aici"
        test(async () => {
          await fixed('He wrote "')
          await gen({ substring: "to be or not to be", maxTokens: 30 })
          await gen({ stopAt: "." })
        })
    """
    passed(js(source, 'He wrote "not to be" once.'), 'He wrote "not to be" once.')


def test_later_pieces_of_json_depend_on_earlier_ones(js: Run) -> None:
    """A script forces the frame of a JSON object and generates its values, of which later ones depend on earlier
    ones."""
    source = """
        import { test } from "aici"
        const fields = { name: { regex: /[A-Z][a-z]+/ }, kind: { options: ["cat", "dog"] }, age: { regex: /[1-9]/ } }
        test(async () => {
          const made = {}
          let separator = "{"
          for (const [name, options] of Object.entries(fields)) {
            const quote = name === "age" ? "" : '"'
            await $`${separator}"${name}": ${quote}`
            made[name] = await gen({ ...options, maxTokens: 8 })
            await $`${quote}`
            separator = ", "
          }
          await fixed("}")
          assert(made.name === "Tom" && made.kind === "cat")
        })
    """
    passed(js(source, '"name": "Tom', '"kind": "cat"', '"age": 7'), '{"name": "Tom", "kind": "cat", "age": 7}')


def test_one_question_for_many_texts(js: Run) -> None:
    """A long common text is kept, and a script replaces the question after it again and again."""
    source = """
        import { appendVar, Label, test } from "aici"
        test(async () => {
          await fixed("sun: yellow. sky: blue. grass: green. ")
          const label = new Label()
          let count = 0
          for (const thing of ["sun", "sky", "grass"]) {
            await label.fixedAfter(`${thing} is yellow? `)
            if ((await gen({ options: ["yes", "no"] })) === "yes") count++
            appendVar("seen", thing[0])
          }
          await label.fixedAfter(`Yellow things: ${count}`)
        })
    """
    ran = js(source, "sun is yellow? yes", "sky is yellow? no", "grass is yellow? no")
    passed(ran, "sun: yellow. sky: blue. grass: green. Yellow things: 1")
    assert ran.variables() == {"seen": b"ssg"}


def test_too_many_forks_and_a_deadlock_are_told(js: Run) -> None:
    ran = js("start(async () => { await fixed('x'); await fork(20) })")
    refused = [error for error in (ran.error(index=index) for index in range(20)) if error]
    assert len(refused) == 4 and all("16" in error for error in refused)  # the others go on
    ran = js("start(async () => { await fixed('x'); await fork(2); await waitVars('never') })")
    assert "never" in ran.error("a", 0) and "never" in ran.error("a", 1)


def test_choices_of_which_there_are_none(js: Run) -> None:
    """With an empty list of options only the end token is allowed, and the script continues after it."""
    source = """
        import { Label, test } from "aici"
        test(async () => {
          const begin = new Label()
          await $`Mark each <fruit>name</fruit>: `
          const marked = [...(await gen({ maxTokens: 30 })).matchAll(/<fruit>([^<]*)<.fruit>/g)]
          await begin.fixedAfter("Take <fruit>")
          assert((await gen({ options: marked.map(([, name]) => name), storeVar: "none" })) === "")
          await $` home`
        })
    """
    ran = js(source, "</fruit>: no fruit here", "Take <fruit>apple</fruit>", ignore_eos=True)
    passed(ran, "Take <fruit> home")
    assert ran.variables()["none"] == b""
