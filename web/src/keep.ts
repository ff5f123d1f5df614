// Keeps the latest runs in the browser's database, with what their traces told, within bounds. A long trace has records by
// the ten thousand: as objects the database copies them all in one go, so they are kept as lines of JSON, which are
// written and read in turns.

import { effect } from "@preact/signals"
import type { TraceRecord } from "./records"
import { type Ancestor, type Kind, type Run, newRun, retell, runs } from "./runs"
import { get, keys, put, remove } from "./store"
import type { Inherited, Piece } from "./story"
import { Turns } from "./turns"

const MAX_KEPT = 30
/** The runs of answers are read when their conversation is shown. */
const OF_CHATS = "m-"
const MAX_OF_CHATS = 300
const MAX_RECORDS = 20_000

/** Values as lines of JSON; earlier pages kept them as they were. */
type Lines<T> = string | T[]

type KeptInherited = Omit<Inherited, "prompt" | "pieces"> & { prompt: Lines<Piece>; pieces: Lines<Piece> }
interface Kept {
  id: string; made: number; kind: Kind; title: string; request: Run["request"]; records: Lines<TraceRecord>; error: string
  requestId: string; seconds: number; firstToken: number; content?: string; thoughts?: string; program: Run["program"]; header: Run["header"]
  ancestor?: Omit<Ancestor, "inherited"> & { inherited: KeptInherited | null } | null
}

async function write(values: unknown[], turns: Turns): Promise<string> {
  const lines: string[] = []
  for (const value of values) {
    lines.push(JSON.stringify(value))
    if (turns.isOver) await turns.next()
  }
  return lines.join("\n")
}

async function read<T>(kept: Lines<T>, turns: Turns): Promise<T[]> {
  if (typeof kept !== "string") return kept
  const values: T[] = []
  for (const line of kept ? kept.split("\n") : []) {
    values.push(JSON.parse(line))
    if (turns.isOver) await turns.next()
  }
  return values
}

async function keep(run: Run, id = `${run.made}-${run.id}`): Promise<void> {
  const turns = new Turns()
  await turns.next() // until then the run is not told how long it took
  const { made, kind, title, request, error, requestId, seconds, firstToken, program, header, content, thoughts } = run
  const kept: Kept = { id, made, kind, title, request, records: await write(run.records, turns), error,
    requestId, seconds, firstToken, program, header, content, thoughts }
  if (run.ancestor) {
    const from = run.ancestor.inherited
    const inherited = from && { ...from, prompt: await write(from.prompt, turns), pieces: await write(from.pieces, turns) }
    kept.ancestor = { ...run.ancestor, inherited }
  }
  await put("runs", kept)
}

async function bringBack({ id: _, records: lines, ancestor: before, ...kept }: Kept): Promise<Run> {
  const turns = new Turns()
  const records = await read(lines, turns)
  let ancestor: Ancestor | null = null
  if (before) {
    const from = before.inherited
    const inherited = from && { ...from, prompt: await read(from.prompt, turns), pieces: await read(from.pieces, turns) }
    ancestor = { ...before, inherited }
  }
  const run = newRun(kept.kind, kept.title, kept.request, { ...kept, records, ancestor })
  retell(run)
  known.add(run)
  run.state.value = kept.error ? "failed" : "done"
  return run
}

const known = new Set<Run>()
let writing = Promise.resolve()

/** Whether a run is short enough to be kept. */
const isKept = (run: Run) => run.records.length + (run.ancestor?.inherited?.pieces.length ?? 0) <= MAX_RECORDS

/** Keeps the run of an answer under a name of its own. */
export function keepAs(id: string, run: Run): Promise<void> {
  return (writing = writing.then(() => (isKept(run) ? keep(run, id) : undefined)))
}

/** The run that was kept under this name; null if there is none any more. */
export async function keptAs(id: string): Promise<Run | null> {
  const kept = await get<Kept>("runs", id)
  return kept ? bringBack(kept) : null
}

/** Removes the oldest of some runs, which are named after when they were made. */
function prune(names: string[], most: number): string[] {
  names.sort()
  for (const old of names.splice(0, Math.max(names.length - most, 0))) void remove("runs", old)
  return names
}

/** Keeps the runs that end from now on, and brings back those that were kept, the oldest first. */
export async function keepRuns(): Promise<void> {
  effect(() => {
    for (const run of runs.value) {
      if (known.has(run) || run.state.value === "running" || run.kind === "chat" || run.kind === "twin") continue
      known.add(run)
      if (isKept(run)) writing = writing.then(() => keep(run))
    }
  })
  const found = await keys("runs")
  prune(found.filter(id => id.startsWith(OF_CHATS)), MAX_OF_CHATS)
  for (const id of prune(found.filter(id => !id.startsWith(OF_CHATS)), MAX_KEPT)) {
    const kept = await get<Kept>("runs", id)
    if (kept) await bringBack(kept)
  }
}
