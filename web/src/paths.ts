// Where each token of a program's outputs stands. A path names the branches that lead to an output: "" before any fork,
// ".1.0" after two of them. A place is a path and the number of tokens since its last fork. What was rolled back counts,
// so that a program that runs again meets the same places in the same order, whatever numbers its outputs have.

import type { ReplacedRecord, TokenRecord, TraceRecord } from "./records"

export interface Place { path: string; at: number }
interface Entry extends Place { step: number; numBranches: number }

/** Follows the records of a run, and gives each token its place. */
export class Paths {
  private readonly entries = new Map<number, Entry>([[0, { path: "", at: 0, step: -1, numBranches: 1 }]])

  /** The place of a record's token; null for the other records. */
  add(record: TraceRecord): Place | null {
    const entry = this.entries.get(record.output)
    if (record.type === "fork") this.fork(record.parent ?? 0, record.output, record.step)
    if (!entry || (record.type !== "token" && record.type !== "replaced")) return null
    return { path: entry.path, at: record.type === "token" ? entry.at++ : entry.at }
  }

  /** Forks of one output in one step are branches of one fork, of which its parent is the first. */
  private fork(parent: number, output: number, step: number): void {
    const from = this.entries.get(parent)
    if (!from) return
    if (from.step !== step) Object.assign(from, { path: `${from.path}.0`, at: 0, step, numBranches: 1 })
    const path = from.path.replace(/0$/, String(from.numBranches++))
    this.entries.set(output, { path, at: 0, step, numBranches: 1 })
  }
}

/** A token at its place: its record, and what had to be allowed for it. A controller may replace what was sampled. */
interface Given { record: TokenRecord | null; allowed: number[] }

/** What led to one of a run's tokens: the tokens of each path on the way to it. */
export class Past {
  private readonly given = new Map<string, Given[]>()
  end: Place = { path: "", at: 0 }

  /** The past goes up to the token of `last`; without one it goes to the end of the output. */
  constructor(records: TraceRecord[], output: number, last?: unknown) {
    const paths = new Paths()
    for (const record of records) {
      const place = paths.add(record)
      if (!place || (record.type !== "token" && record.type !== "replaced")) continue
      if (record === last) {
        this.end = place
        break
      }
      this.put(place, record)
      if (record.output === output) this.end = { path: place.path, at: place.at + 1 }
    }
    for (const path of this.given.keys()) if (path && path !== this.end.path && !this.end.path.startsWith(`${path}.`)) this.given.delete(path)
    this.given.get(this.end.path)?.splice(this.end.at)
  }

  private put({ path, at }: Place, record: TokenRecord | ReplacedRecord): void {
    if (!this.given.has(path)) this.given.set(path, [])
    const row = (this.given.get(path)![at] ??= { record: null, allowed: [] })
    row.allowed.push(record.token ?? 0)
    if (record.type === "token") row.record = record
  }

  recordAt({ path, at }: Place): TokenRecord | null {
    return this.given.get(path)?.[at]?.record ?? null
  }

  /** What may be sampled at each place, with `chosen` at the end. */
  wanted(chosen?: number): Record<string, number[][]> {
    const made = Object.fromEntries([...this.given].map(([path, rows]) => [path, rows.map(row => row.allowed)]))
    if (chosen !== undefined) (made[this.end.path] ??= []).push([chosen])
    return made
  }
}
