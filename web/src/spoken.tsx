// What a screen reader is told of a text that grows: whole sentences, one after the other, what was rolled back, the end.

import { useEffect, useRef, useState } from "preact/hooks"
import type { Run } from "./runs"
import type { Line } from "./story"

const MAX_SENTENCE = 240
const MAX_TOLD = 6
const END = /[.!?…。！？]["'”’)]*\s|\n/g

/** How much of `text` from `from` on can be told: up to the last end of a sentence, or of a word if none comes. */
export function toldTo(text: string, from: number, isOver: boolean): number {
  if (isOver) return text.length
  let to = from
  END.lastIndex = from
  for (let found = END.exec(text); found; found = END.exec(text)) to = END.lastIndex
  if (to > from || text.length - from < MAX_SENTENCE) return to
  return text.lastIndexOf(" ", from + MAX_SENTENCE) > from ? text.lastIndexOf(" ", from + MAX_SENTENCE) + 1 : from + MAX_SENTENCE
}

function ending(run: Run, line: Line): string {
  if (run.state.value === "stopped") return "Stopped."
  if (run.state.value !== "done") return ""
  return line.end?.reason === "length" ? "Stopped at the limit of tokens. The text is not complete." : "End of the text."
}

interface Told { id: number; text: string }

/** Tells the text of a run's output while it is being written; one that was there before is not read aloud. */
export function Spoken({ run, line }: { run: Run; line: Line }) {
  const version = run.version.value
  const isOver = run.state.value !== "running"
  const [told, setTold] = useState<Told[]>([])
  const before = useRef({ line, text: isOver ? line.text : "", isOver, id: 0 })
  useEffect(() => {
    const last = before.current
    if (last.isOver && isOver && last.line === line) return
    const text = line.text
    const said: string[] = []
    if (last.line !== line) Object.assign(last, { line, text: isOver ? text : "" })
    if (!text.startsWith(last.text)) {
      said.push("Rolled back.")
      let kept = 0
      while (kept < text.length && text[kept] === last.text[kept]) kept++
      last.text = text.slice(0, kept)
    }
    const to = toldTo(text, last.text.length, isOver)
    if (to > last.text.length) said.push(text.slice(last.text.length, to))
    if (isOver && !last.isOver) said.push(ending(run, line))
    Object.assign(last, { text: text.slice(0, to), isOver })
    const rows = said.filter(each => each.trim()).map(each => ({ id: ++last.id, text: each }))
    if (rows.length) setTold(rest => [...rest, ...rows].slice(-MAX_TOLD))
  }, [version, isOver, line])
  return <div class="offscreen spoken" role="log" aria-live="polite" aria-label="What is being written">{told.map(each => <p key={each.id}>{each.text}</p>)}</div>
}
