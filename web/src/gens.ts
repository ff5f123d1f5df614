// Which call of `gen` in a program, in JavaScript or Python, wrote which tokens. The log says what was fixed text and when a
// call ended; a program with one call has it in a loop, and one without loops has as many calls as it made.

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

/** The length of a text in the log, which is written as JSON or as Python's repr. */
const lengthIn = (written: string) => written.slice(1, -1).replace(/\\(?:x..|u.{4}|U.{8}|.)/g, "_").length

/** For each piece of a line the number of the call that wrote it. Forced tokens are those of fixed text, as long as it is, and
 *  otherwise what a call left no choice for. */
export function callsOf(run: Run, line: Line): Map<number, number> {
  const made = new Map<number, number>()
  const numCalls = run.program ? callsIn(run.program.text).length : 0
  const numbers = new Map(line.pieces.map((piece, number) => [piece.record, number]))
  let numEnded = 0
  let fixed = 0
  for (const record of run.records) {
    if (record.output !== line.index) continue
    if (record.type === "log")
      for (const [, kind, rest] of (record.text ?? "").matchAll(/^(GEN|(?:BACKTRACK \d+ )?FIXED) (.*)$/gm)) {
        if (kind === "GEN") numEnded++
        else fixed += lengthIn(rest)
      }
    if (record.type !== "token") continue
    const isFixed = record.forced && fixed > 0
    if (isFixed) fixed -= (record.text ?? "").length
    const number = numbers.get(record)
    if (!isFixed && number !== undefined && numEnded < numCalls) made.set(number, numEnded)
  }
  if (numCalls === 1) return new Map([...made.keys()].map(number => [number, 0]))
  const isClear = numEnded <= numCalls && Math.max(-1, ...made.values()) + 1 === numCalls
  return isClear && !line.parent ? made : new Map()
}
