// A recorded run, step by step: the text as it was after each step of its records; and each attempt that was rolled back.

import { useMemo, useState } from "preact/hooks"
import type { TraceRecord } from "./records"
import type { Run } from "./runs"
import { type Line, Story } from "./story"

/** How many attempts are listed. */
const MAX_ATTEMPTS = 100

export interface Attempt { text: string; by: string; step: number }

/** What an output wrote and rolled back, in the order of time. */
export function attemptsOf(records: TraceRecord[], output: number): Attempt[] {
  const texts: string[] = []
  const made: Attempt[] = []
  for (const record of records) {
    if (record.output !== output) continue
    if (record.type === "token") texts.push(record.text ?? "")
    if (record.type !== "rewind") continue
    const text = texts.splice(Math.max(texts.length - (record.num_tokens ?? 0), 0)).join("")
    if (text) made.push({ text, by: record.by ?? "", step: record.step })
  }
  return made
}

export function Attempts({ run, line }: { run: Run; line: Line }) {
  run.version.value
  const found = useMemo(() => attemptsOf(run.records, line.index), [run.version.value, line])
  if (!found.length) return null
  return (
    <details class="attempts">
      <summary>{found.length === 1 ? "One attempt was rolled back" : `${found.length.toLocaleString("en")} attempts were rolled back`}</summary>
      <ol>{found.slice(0, MAX_ATTEMPTS).map(({ text, by, step }, number) => (
        <li key={number}><q>{text}</q><small> step {step}{by && `, by ${by}`}</small></li>))}</ol>
    </details>
  )
}

/** The numbers of the records with which a step begins. */
function beginnings(records: TraceRecord[]): number[] {
  return records.flatMap((record, number) => (number === 0 || record.step !== records[number - 1].step ? [number] : []))
}

function storyAt(run: Run, numRecords: number): Story {
  const story = new Story()
  if (run.ancestor?.inherited) story.inherit(run.ancestor.inherited)
  for (const record of run.records.slice(0, numRecords)) story.add(record)
  return story
}

/** Shows a run that has ended as it was after each of its steps. */
export function Steps({ run }: { run: Run }) {
  const [at, setAt] = useState<number | null>(null)
  run.version.value
  const starts = useMemo(() => beginnings(run.records), [run.version.value])
  if (run.state.value === "running" || starts.length < 2) return null
  if (at === null) return <button class="quiet steps-open" onClick={() => setAt(1)}>Step through</button>
  const line = storyAt(run, starts[at] ?? run.records.length).lines.get(run.selected.value)
  const move = (by: number) => setAt(Math.min(Math.max(at + by, 1), starts.length))
  return (
    <section class="steps" aria-label="Step by step">
      <div class="row">
        <button aria-label="Step back" disabled={at <= 1} onClick={() => move(-1)}>‹</button>
        <input type="range" min={1} max={starts.length} value={at} aria-label="Step" onInput={event => setAt(Number(event.currentTarget.value))} />
        <button aria-label="Step forward" disabled={at >= starts.length} onClick={() => move(1)}>›</button>
        <span class="told-small">{at} of {starts.length}</span>
        <button class="quiet" onClick={() => setAt(null)}>Close</button>
      </div>
      <div class="said-text" aria-live="polite">
        {line?.pieces.map((piece, number) => piece.origin === "rewound"
          ? <s key={number} class="t rewound">{piece.text}</s> : <span key={number} class={`t ${piece.origin}`}>{piece.text}</span>)}
        {!line && <span class="told-small">The output does not exist yet.</span>}
      </div>
    </section>
  )
}
