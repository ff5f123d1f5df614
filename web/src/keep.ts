// Keeps the latest runs in the browser's database, with what their traces told, within bounds.

import { effect } from "@preact/signals"
import type { TraceRecord } from "./records"
import { type Kind, type Run, newRun, retell, runs } from "./runs"
import { all, put, remove } from "./store"

const MAX_KEPT = 30
const MAX_RECORDS = 20_000

interface Kept {
  id: string; made: number; kind: Kind; title: string; request: Run["request"]; records: TraceRecord[]; error: string
  requestId: string; seconds: number; firstToken: number; program: Run["program"]; header: Run["header"]
  ancestor?: Run["ancestor"]
}

const known = new Set<Run>()

/** Brings back the runs that were kept, and keeps those that end from now on. */
export async function keepRuns(): Promise<void> {
  const found = await all<Kept>("runs")
  for (const old of found.splice(MAX_KEPT)) void remove("runs", old.id)
  for (const { id: _, records, ...kept } of found.reverse()) {
    const run = newRun(kept.kind, kept.title, kept.request, kept)
    run.records = records
    retell(run)
    run.state.value = kept.error ? "failed" : "done"
    known.add(run)
  }
  effect(() => {
    for (const run of runs.value) {
      if (known.has(run) || run.state.value === "running" || run.kind === "chat") continue
      known.add(run)
      if (run.records.length + (run.ancestor?.inherited?.pieces.length ?? 0) > MAX_RECORDS) continue
      const { made, kind, title, request, records, error, requestId, seconds, firstToken, program, header, ancestor } = run
      const kept: Kept = { id: `${made}-${run.id}`, made, kind, title, request, records, error, requestId, seconds, firstToken, program, header, ancestor }
      void put("runs", kept)
    }
  })
}
