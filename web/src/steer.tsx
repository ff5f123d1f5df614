// Steering: a program or a form on one side, what it makes of the model's text on the other.

import { signal } from "@preact/signals"
import { Editor } from "./editor"
import { LANGUAGES, type Language } from "./examples"
import { Notice, TextBox } from "./parts"
import { chosen, language, programs, promptOf, prompts, textOf } from "./programs"
import { current, newRun, start, stop } from "./runs"
import { RunView } from "./runview"
import { model, samplingFields, seedOrNew } from "./settings"

const wrong = signal("")

/** The fields that say how a text is steered. Throws for what is no JSON. */
function steering(of: Language, text: string): Record<string, unknown> {
  if (of.controller) return { controller: of.controller, controller_arg: text, rewind: "event" }
  if (of.id === "regex") return { constraint: { regex: text.replace(/\n$/, "") } }
  if (of.id === "lark") return { constraint: { lark: text } }
  return { constraint: { json_schema: JSON.parse(text) } }
}

function run(): void {
  const of = chosen()
  const text = textOf(of)
  wrong.value = ""
  let fields: Record<string, unknown>
  try {
    fields = steering(of, text)
  } catch (error) {
    wrong.value = `The schema is not JSON: ${(error as Error).message}`
    return
  }
  const body = { model: model.value || undefined, prompt: promptOf(of), seed: seedOrNew(), ...samplingFields(), ...fields }
  const made = newRun("steer", `${of.name}: ${text.trim().split("\n")[0].slice(0, 40)}`, { path: "v1/completions", body }, {
    program: { language: of.id, text },
  })
  current.steer.value = made
  void start(made)
}

export function Steer() {
  const of = chosen()
  const made = current.steer.value
  made?.version.value
  const isBusy = made?.state.value === "running"
  const isThisProgram = made?.program?.language === of.id && made.program.text === textOf(of)
  const choose = (event: Event) => {
    const example = of.examples[Number((event.target as HTMLSelectElement).value)]
    if (!example) return
    programs.value = { ...programs.value, [of.id]: example.text }
    prompts.value = { ...prompts.value, [of.id]: example.prompt ?? of.prompt }
  }
  const at = of.examples.findIndex(example => example.text === textOf(of))
  return (
    <div class="steer">
      <section class="program" aria-label="Program">
        <div class="row toolbar">
          <select aria-label="Language" value={of.id} onChange={event => { language.value = event.currentTarget.value; wrong.value = "" }}>
            {LANGUAGES.map(each => <option key={each.id} value={each.id}>{each.name}</option>)}
          </select>
          <select aria-label="Example" value={String(at)} onChange={choose}>
            {at < 0 && <option value="-1">your own</option>}
            {of.examples.map((example, number) => <option key={example.name} value={String(number)}>{example.name}</option>)}
          </select>
          <span class="spring" />
          {isBusy ? <button class="stop" onClick={() => stop(made)}>Stop</button>
            : <button class="primary" onClick={run} title="Ctrl+Enter">Run</button>}
        </div>
        <Editor text={textOf(of)} language={of.id} label={`${of.name} program`} error={wrong.value || (isThisProgram ? made!.error : "")}
          onChange={text => (programs.value = { ...programs.value, [of.id]: text })} onRun={() => !isBusy && run()} />
        <div class="steer-prompt">
          <span>Prompt</span>
          <TextBox id="steer-prompt" value={promptOf(of)} label="Prompt" placeholder={of.controller ? "none" : "A text to continue"}
            onInput={text => (prompts.value = { ...prompts.value, [of.id]: text })} onSend={() => !isBusy && run()} />
        </div>
      </section>
      <section class="outcome" aria-label="Outcome">
        {wrong.value ? <Notice text={wrong.value} /> : made ? <RunView run={made} /> : (
          <div class="welcome small"><p>The program decides what may come next, and the model chooses among it. Run it to see
            which tokens were sampled, forced and rolled back, and where the text forked.</p></div>
        )}
      </section>
    </div>
  )
}
