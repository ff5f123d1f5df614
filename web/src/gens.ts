// Which call of `gen` in a program wrote which tokens. The log says when a call began and ended; a program with one call has
// it in a loop, and one without loops has as many calls as it made.

import { signal } from "@preact/signals"
import type { Run } from "./runs"
import type { Line } from "./story"

/** The call that the pointer is on, in the program or through one of its tokens. */
export const litCall = signal<number | null>(null)

export interface Call { from: number; to: number }

/** The calls of `gen` in a program's text, as places. */
export function callsIn(text: string): Call[] {
  const made: Call[] = []
  for (const found of text.matchAll(/\b(?:gen|gen_text|genTokens|generate|gen_tokens)\s*\(/g)) {
    let depth = 0
    let to = found.index + found[0].length - 1
    for (; to < text.length; to++) {
      if (text[to] === "(") depth++
      else if (text[to] === ")" && --depth === 0) break
    }
    made.push({ from: found.index, to: Math.min(to + 1, text.length) })
  }
  return made
}

/** The length of a text in the log, which is written as JSON. */
function lengthIn(written: string): number {
  try {
    return String(JSON.parse(written)).length
  } catch {
    return 0
  }
}

/** For each piece of a line the number of the call that wrote it. Forced tokens are those of fixed text, as long as it is, and
 *  otherwise what a call left no choice for. */
export function callsOf(run: Run, line: Line): Map<number, number> {
  const made = new Map<number, number>()
  const numCalls = run.program ? callsIn(run.program.text).length : 0
  const numbers = new Map(line.pieces.map((piece, number) => [piece.record, number]))
  let call = -1
  let isOpen = false
  let fixed = 0
  for (const record of run.records) {
    if (record.output !== line.index) continue
    if (record.type === "log")
      for (const [, begins, rest] of (record.text ?? "").matchAll(/^(GEN-OPT|GEN|(?:BACKTRACK \d+ )?FIXED) (.*)$/gm)) {
        if (begins.endsWith("FIXED")) fixed += lengthIn(rest)
        else isOpen = begins === "GEN-OPT"
        if (begins === "GEN-OPT") call++
      }
    if (record.type !== "token") continue
    const isFixed = record.forced && fixed > 0
    if (isFixed) fixed -= (record.text ?? "").length
    const number = numbers.get(record)
    if (isOpen && !isFixed && number !== undefined) made.set(number, call)
  }
  if (numCalls === 1) return new Map([...made.keys()].map(number => [number, 0]))
  return call + 1 === numCalls && !line.parent ? made : new Map()
}
