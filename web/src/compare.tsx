// Two runs side by side, with the tokens in which they differ. The second may be made here: the same request with another
// seed, model or adapter.

import { useMemo, useState } from "preact/hooks"
import { models } from "./api"
import { differences } from "./diff"
import { type Run, beside, newRun, runs, start } from "./runs"
import { RunView } from "./runview"
import { seedOrNew } from "./settings"
import type { Line } from "./story"

/** Makes the same request again, but for some fields, beside the first one. */
export function runBeside(run: Run, changes: Record<string, unknown>): Run {
  const body = { ...run.request.body, ...changes }
  const made = newRun(run.kind === "trace" ? "complete" : run.kind, run.title, { path: run.request.path, body }, { program: run.program })
  beside.right.value = made
  void start(made)
  return made
}

/** The tokens of prompt and text: what one run was told another may have written. */
const texts = (run: Run, line: Line) =>
  [...run.story.prompt.map(piece => piece.text), ...line.alive.map(number => line.pieces[number].text)]

function marksOf(run: Run, line: Line, found: Set<number>): Set<number> {
  const start = run.story.prompt.length
  return new Set([...found].filter(at => at >= start).map(at => line.alive[at - start]))
}

function useDifferences(left: Run | null, right: Run | null) {
  const versions = [left?.version.value, right?.version.value]
  const isDone = left?.state.value !== "running" && right?.state.value !== "running"
  const lines = [left, right].map(run => run?.story.lines.get(run.selected.value) ?? run?.story.line(0))
  return useMemo(() => {
    const [a, b] = lines
    if (!a || !b || !isDone || left === right) return null
    const [inA, inB] = differences(texts(left!, a), texts(right!, b))
    return { left: marksOf(left!, a, inA), right: marksOf(right!, b, inB), count: Math.max(inA.size, inB.size) }
  }, [...versions, ...lines, isDone])
}

function Choose({ label, value, onChoose }: { label: string; value: Run | null; onChoose: (run: Run | null) => void }) {
  const choose = (event: Event) => {
    const id = Number((event.target as HTMLSelectElement).value)
    onChoose(runs.value.find(run => run.id === id) ?? null)
  }
  return (
    <select aria-label={label} value={value ? String(value.id) : ""} onChange={choose}>
      <option value="">choose a run</option>
      {runs.value.map(run => (
        <option key={run.id} value={String(run.id)}>
          {`${run.id} · ${run.title || run.kind} · ${run.request.body.model ?? "model"} · seed ${run.request.body.seed ?? "–"}`}
        </option>
      ))}
    </select>
  )
}

const SAME = ""
const NONE = "\0" // no name of an adapter

/** The adapters of the model that the second run has. A model in the list may itself be one. */
function adaptersOf(name: string) {
  const base = models.value.find(each => each.id === name)?.parent ?? name
  return models.value.filter(each => each.parent !== null && (each.parent === base || !base))
}

export function Compare() {
  const left = beside.left.value
  const right = beside.right.value
  const [name, setName] = useState("")
  const [seed, setSeed] = useState("")
  const [adapter, setAdapter] = useState(SAME)
  const found = useDifferences(left, right)
  const adapters = adaptersOf(name || (left?.request.body.model ?? ""))
  const isKnown = adapter === SAME || adapter === NONE || adapters.some(each => each.id === adapter)
  const again = () => {
    const value = seed.trim() === "" ? seedOrNew() : Number(seed)
    const changes: Record<string, unknown> = { seed: value }
    const of = name || left!.request.body.model
    if (name) Object.assign(changes, { model: name, adapter: undefined })
    if (isKnown && adapter !== SAME) {
      const base = models.value.find(each => each.id === of)?.parent ?? of
      Object.assign(changes, { model: base, adapter: adapter === NONE ? undefined : adapter })
    }
    runBeside(left!, changes)
  }
  return (
    <div class="compare">
      <div class="sides">
        <section aria-label="Left">
          <div class="row toolbar"><Choose label="Left run" value={left} onChoose={run => (beside.left.value = run)} /></div>
          {left ? <RunView run={left} isSmall marks={() => found?.left ?? null} />
            : <div class="welcome small"><p>Choose a run on each side, or press “Compare” beside one.</p></div>}
        </section>
        <section aria-label="Right">
          <div class="row toolbar">
            <Choose label="Right run" value={right} onChoose={run => (beside.right.value = run)} />
          </div>
          <div class="row again" role="group" aria-label="Run the left request again">
            <select aria-label="Model of the second run" value={name} onChange={event => setName(event.currentTarget.value)}>
              <option value="">the same model</option>
              {models.value.map(each => <option key={each.id} value={each.id}>{each.id}</option>)}
            </select>
            {adapters.length > 0 && (
              <select aria-label="Adapter of the second run" value={isKnown ? adapter : SAME} onChange={event => setAdapter(event.currentTarget.value)}>
                <option value={SAME}>the same adapter</option>
                <option value={NONE}>no adapter</option>
                {adapters.map(each => <option key={each.id} value={each.id}>{each.id}</option>)}
              </select>
            )}
            <input class="seed" inputMode="numeric" aria-label="Seed of the second run" placeholder="new seed" value={seed}
              onInput={event => setSeed(event.currentTarget.value)} />
            <button class="primary" disabled={!left} onClick={again}>Run beside</button>
          </div>
          {right && <RunView run={right} isSmall marks={() => found?.right ?? null} />}
        </section>
      </div>
      {found && <p class="verdict" role="status">{found.count ? `${found.count} tokens differ` : "The texts are the same"}</p>}
    </div>
  )
}
