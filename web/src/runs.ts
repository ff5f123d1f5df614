// Runs: one request each, with everything that its trace told. A run is a plain object; its `version` is a signal that
// changes at most once in each picture of the screen, however fast the tokens come.

import { type Signal, signal } from "@preact/signals"
import { ApiError, stream, traceOf } from "./api"
import { type Header, type TraceRecord, VERSION, parseTraces } from "./records"
import { type Inherited, Story } from "./story"
import { type ToolCall, fullName } from "./tools"

export type Kind = "complete" | "chat" | "steer" | "trace" | "twin"
export type State = "running" | "done" | "stopped" | "failed"

export interface Request { path: string; body: Record<string, any> }
/** Where a run came from: another one, by when it was made, with a token chosen by hand. `inherited` is what stood before
 *  that token, which the run's own records do not tell. `isFree` runs go on without the
 *  rules of the other one, and one that `hasRule` under one of its own. */
export interface Ancestor { made: number; at: number; chosen: string; inherited: Inherited | null; isFree?: boolean; hasRule?: boolean
  /** The chosen token's log-probability there, before any mask. */
  odds?: number }

export interface Run {
  id: number
  kind: Kind
  title: string
  made: number
  request: Request
  story: Story
  records: TraceRecord[]
  version: Signal<number>
  state: Signal<State>
  selected: Signal<number>
  error: string
  requestId: string
  content: string
  thoughts: string
  calls: ToolCall[]
  firstToken: number
  seconds: number
  ancestor: Ancestor | null
  program: { language: string; text: string } | null
  abort: AbortController | null
  header: Header | null
  /** The same request without what steers it. */
  twin: Run | null
  /** Makes of the records that come what they are for this run. */
  amend: ((record: TraceRecord) => TraceRecord) | null
}

const COMPILING_PAUSE = 1500
const COMPILING_TRIES = 100
/** As many runs are kept as people look at; the oldest go. */
const MAX_RUNS = 60
export const runs = signal<Run[]>([])
export const current = { complete: signal<Run | null>(null), steer: signal<Run | null>(null) }
export const beside = { left: signal<Run | null>(null), right: signal<Run | null>(null) }

let lastId = 0
let lastMade = 0

export function newRun(kind: Kind, title: string, request: Request, more: Partial<Run> = {}): Run {
  lastMade = Math.max(lastMade + 1, Date.now()) // no two are made at the same time
  const run: Run = {
    id: ++lastId, kind, title, made: lastMade, request, story: new Story(), records: [], version: signal(0),
    state: signal<State>("running"), selected: signal(0), error: "", requestId: "", content: "", thoughts: "", calls: [],
    firstToken: 0, seconds: 0, ancestor: null, program: null, abort: null, header: null,
    twin: null, amend: null, ...more,
  }
  runs.value = [run, ...runs.value].sort((a, b) => b.made - a.made).slice(0, MAX_RUNS)
  return run
}

/** Calls `then` before the next picture, or soon where there are none. */
function soon(then: () => void): void {
  if (document.hidden) setTimeout(then, 100)
  else requestAnimationFrame(then)
}

/** Shows in a run what it inherited, and then what its records tell. */
export function retell(run: Run): void {
  run.story = new Story()
  if (run.ancestor?.inherited) run.story.inherit(run.ancestor.inherited)
  for (const record of run.records) run.story.add(record)
}

/** Sends the run's request and reads its answer; `onEnd` is called in the end, whatever happened. */
export async function start(run: Run, onEnd: () => void = () => {}): Promise<void> {
  run.abort = new AbortController()
  const began = performance.now()
  let isWaiting = false
  let isDue = false
  const show = () => {
    isDue = true
    if (isWaiting) return
    isWaiting = true
    soon(() => {
      isDue = false
      const began = performance.now()
      run.version.value++
      // The first is called when the picture is made. Until as much time has passed again, the page is its reader's.
      setTimeout(() => setTimeout(() => {
        isWaiting = false
        if (isDue) show()
      }, performance.now() - began))
    })
  }
  const again = async () => {
    run.records = []
    run.calls = []
    retell(run)
    run.version.value++
    await new Promise(resolve => setTimeout(resolve, COMPILING_PAUSE))
    if (run.abort?.signal.aborted) throw new DOMException("", "AbortError")
  }
  const body = { ...run.request.body, stream: true, trace: "events", stream_options: { include_usage: true } }
  try {
    for (let tries = 0; ; tries++) {
      try {
        for await (const event of stream(run.request.path, body, run.abort.signal, id => (run.requestId = id))) {
          if (!run.firstToken) run.firstToken = (performance.now() - began) / 1000
          take(run, event)
          show()
        }
        break
      } catch (error) {
        // A controller is compiled once, when it is first needed; the server asks to come back.
        if (!(error instanceof ApiError && error.message.includes("is being compiled")) || tries >= COMPILING_TRIES) throw error
        await again()
      }
    }
    const failed = run.story.sorted.find(line => line.end?.error)
    if (failed) run.error = failed.end!.error!
    run.state.value = failed ? "failed" : "done"
  } catch (error) {
    const isStop = error instanceof DOMException && error.name === "AbortError"
    run.error = isStop ? "" : error instanceof ApiError ? error.message : `This page failed: ${error}`
    run.state.value = isStop ? "stopped" : "failed"
  }
  run.seconds = (performance.now() - began) / 1000
  run.abort = null
  run.version.value++
  onEnd()
}

function take(run: Run, event: any): void {
  for (const choice of event.choices ?? []) {
    if (!choice.index) {
      run.content += choice.delta?.content ?? choice.text ?? ""
      run.thoughts += choice.delta?.reasoning_content ?? ""
      for (const each of choice.delta?.tool_calls ?? []) takeCall(run, each)
    }
    for (const each of choice.trace ?? []) {
      const record: TraceRecord = run.amend ? run.amend(each) : each
      run.records.push(record)
      run.story.add(record)
    }
  }
}

/** Adds a piece of a call: its name comes first, its arguments in pieces. */
function takeCall(run: Run, { index, id, function: { name = "", arguments: piece = "" } }: any): void {
  const call = (run.calls[index] ??= { id: id ?? `call-${index}`, name: fullName(name), arguments: "" })
  call.arguments += piece
}

export function stop(run: Run | null): void {
  run?.abort?.abort()
}

/** Tokens of the answer and how fast they came, for people. */
export function summary(run: Run): string {
  const lines = run.story.sorted
  const tokens = lines.reduce((sum, line) => sum + line.alive.length - line.numShared, 0)
  const parts = [`${tokens.toLocaleString("en")} token${tokens === 1 ? "" : "s"}`]
  if (run.seconds && tokens) parts.push(`${(tokens / run.seconds).toFixed(1)} per second`)
  if (run.firstToken) parts.push(`first after ${(run.firstToken * 1000).toFixed(0)} ms`)
  const reasons = [...new Set(lines.map(line => line.end?.reason).filter(Boolean))]
  if (reasons.length) parts.push(`ended by ${reasons.join(", ")}`)
  return parts.join(" · ")
}

// -- traces --------------------------------------------------------------------------------------------------

/** The trace as JSON lines: the server's, as long as it has it, and otherwise what this page was told. */
export async function traceText(run: Run): Promise<string> {
  if (run.requestId && run.state.value !== "running") {
    try {
      return await traceOf(run.requestId)
    } catch {
      // It is gone, or the server is.
    }
  }
  const { model = "", adapter = null, ...sampling } = run.request.body
  for (const name of ["prompt", "messages", "controller", "controller_arg", "controllers", "rewind", "constraint", "regex"])
    delete sampling[name]
  const header: Header = run.header ?? {
    type: "header", version: VERSION, request_id: run.requestId, model, adapter, sampling, prompt: run.story.promptTokens,
  }
  return [header, ...run.records].map(line => JSON.stringify(line) + "\n").join("")
}

export function openTraces(name: string, text: string): Run[] {
  return parseTraces(text).map(({ header, records }) => {
    const body = { model: header.model, prompt: header.prompt ?? [], ...header.sampling }
    const run = newRun("trace", name, { path: "v1/completions", body }, { header, requestId: header.request_id })
    run.records = records
    retell(run)
    run.state.value = "done"
    return run
  })
}
