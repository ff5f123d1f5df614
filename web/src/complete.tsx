// Continuing a text: a prompt, and what became of it, in as many choices as were asked for.

import { TextBox } from "./parts"
import { prompt, promptTextOf } from "./programs"
import { current, newRun, start, stop } from "./runs"
import { RunView } from "./runview"
import { model, samplingFields, sampling, seedOrNew } from "./settings"

const STARTERS = ["Once upon a time", "The capital of France is", "1, 2, 3,", "Dear diary,\n"]

export function complete(text: string): void {
  const fields = samplingFields()
  const n = Number(sampling.value.n)
  const body = { model: model.value || undefined, prompt: text, seed: seedOrNew(), ...fields, ...(n > 1 ? { n } : {}) }
  const run = newRun("complete", text.slice(0, 48) || "(empty)", { path: "v1/completions", body })
  current.complete.value = run
  void start(run)
}

export function Complete() {
  const run = current.complete.value
  run?.version.value
  const isBusy = run?.state.value === "running"
  const go = () => !isBusy && complete(prompt.value)
  const more = () => {
    const line = run!.story.line(run!.selected.value)
    prompt.value = promptTextOf(run!) + line.text
    complete(prompt.value)
  }
  return (
    <div class="page">
      <div class="column wide">
        <div class="ask">
          <TextBox id="prompt" value={prompt.value} label="Prompt" placeholder="A text to continue" onInput={text => (prompt.value = text)} onSend={go} />
          <div class="row">
            {isBusy ? <button class="stop" onClick={() => stop(run)}>Stop</button>
              : <button class="primary" onClick={go}>{run ? "Generate again" : "Generate"}</button>}
            {run && !isBusy && <button class="quiet" onClick={more}>Continue</button>}
            <span class="spring" />
            <kbd>Ctrl</kbd><kbd>Enter</kbd>
          </div>
        </div>
        {run ? <RunView run={run} /> : (
          <div class="welcome small">
            <p>Write the beginning of a text; the model goes on with it.</p>
            <div class="starters">{STARTERS.map(text => (
              <button key={text} onClick={() => { prompt.value = text; complete(text) }}>{text.trim()}</button>))}</div>
          </div>
        )}
      </div>
    </div>
  )
}
