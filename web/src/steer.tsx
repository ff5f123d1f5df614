// Steering: a program or a form on one side, what it makes of the model's text on the other.

import { signal } from "@preact/signals"
import { models } from "./api"
import { Editor } from "./editor"
import { LANGUAGES, type Language } from "./examples"
import { Notice, TextBox } from "./parts"
import { asMessage, chosen, hasTwin, language, programs, promptOf, prompts, textOf } from "./programs"
import { type Request, type Run, current, newRun, start, stop } from "./runs"
import { RunView } from "./runview"
import { model, sampling, samplingFields, seedOrNew } from "./settings"

const wrong = signal("")
/** Settings of examples where none are set: small models then write sense more often, and come to an end. */
const CALM = { temperature: 0.2, max_tokens: 120 }
const calm = () => Object.fromEntries(Object.entries(CALM).filter(([name]) => !sampling.value[name as keyof typeof CALM]))

/** The fields that say how a text is steered. Throws for what is no JSON. */
function steering(of: Language, text: string): Record<string, unknown> {
  if (of.controller) return { controller: of.controller, controller_arg: text, rewind: "event" }
  if (of.id === "regex") return { constraint: { regex: text.replace(/\n$/, "") } }
  if (of.id === "lark") return { constraint: { lark: text } }
  return { constraint: { json_schema: JSON.parse(text) } }
}

/** What the model begins with: a message, or a text as it is. Programs that write all of it themselves need neither. */
function beginning(text: string, isExample: boolean): Request {
  const isMessage = asMessage.value && text.trim() !== "" && models.value.find(each => each.id === model.value)?.has_chat_template !== false
  const common = { model: model.value || undefined, seed: seedOrNew(), ...samplingFields(), ...(isExample ? calm() : {}) }
  if (!isMessage) return { path: "v1/completions", body: { ...common, prompt: text } }
  return { path: "v1/chat/completions", body: { ...common, messages: [{ role: "user", content: text }] } }
}

/** Starts a steered run, and beside it the same request without what steers it. */
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
  const isExample = of.examples.some(example => example.text === text)
  const { path, body } = beginning(promptOf(of), isExample)
  const twin = hasTwin.value && promptOf(of).trim() ? newRun("twin", "Unsteered", { path, body }) : null
  const title = `${of.name}: ${text.trim().split("\n")[0].slice(0, 40)}`
  const made = newRun("steer", title, { path, body: { ...body, ...fields } }, { program: { language: of.id, text }, twin })
  current.steer.value = made
  void start(made)
  if (twin) void start(twin)
}

function Outcome({ run }: { run: Run }) {
  if (!run.twin) return <RunView run={run} />
  return (
    <div class="twins">
      <section aria-label="Steered"><h2>Steered</h2><RunView run={run} /></section>
      <section aria-label="Unsteered twin"><h2>Unsteered, same seed</h2><RunView run={run.twin} isSmall /></section>
    </div>
  )
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
  const example = of.examples[at]
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
        {example?.expect && <p class="expect">{example.expect}</p>}
        <div class="row steer-options">
          <label class="check"><input type="checkbox" checked={asMessage.value} onChange={event => (asMessage.value = event.currentTarget.checked)} /> as a message</label>
          <label class="check"><input type="checkbox" checked={hasTwin.value} onChange={event => (hasTwin.value = event.currentTarget.checked)} /> unsteered twin</label>
        </div>
        <div class="steer-prompt">
          <span>Prompt</span>
          <TextBox id="steer-prompt" value={promptOf(of)} label="Prompt" placeholder={of.controller ? "none" : "A text to continue"}
            onInput={text => (prompts.value = { ...prompts.value, [of.id]: text })} onSend={() => !isBusy && run()} />
        </div>
      </section>
      <section class="outcome" aria-label="Outcome">
        {wrong.value ? <Notice text={wrong.value} /> : made ? <Outcome run={made} /> : (
          <div class="welcome small"><p>The program decides what may come next, and the model chooses among it. Run it to see
            which tokens were sampled, forced and rolled back, and where the text forked.</p></div>
        )}
      </section>
    </div>
  )
}
