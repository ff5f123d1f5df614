// Another token at one place of a text: the request that forks there and goes on. Or the same text, and more of it.
//
// Without a program the prompt and the tokens up to there, with the chosen one, are a prompt. With one, it runs again from
// its beginning, and a second controller beside it lets those tokens alone be sampled at their places.

import { Past, Paths } from "./paths"
import type { TokenRecord, TraceRecord } from "./records"
import { type Run, newRun, retell, start } from "./runs"
import { fitting, seedOrNew } from "./settings"
import type { Inherited, Line } from "./story"

const STEERING = ["controller", "controllers", "constraint", "regex", "choice", "grammar", "response_format"]
const YOU = "you"

export const isSteered = (body: Record<string, unknown>) => STEERING.some(name => body[name] !== undefined)

function guide(wanted: Record<string, number[][]>): string {
  return `import { MidProcessResult, NextToken, TokenSet, selfSeqId, start } from "aici"

const wanted = ${JSON.stringify(wanted)}
let path = ""
let at = 0

class Guided extends NextToken {
  midProcess() {
    const set = new TokenSet()
    const allowed = wanted[path]?.[at]
    if (allowed) for (const token of allowed) set.add(token)
    else set.setAll(true)
    return MidProcessResult.bias(set)
  }
  postProcess(backtrack, tokens, told) {
    if (told.fork_group.length > 1) {
      path += "." + told.fork_group.indexOf(selfSeqId())
      at = 0
    }
    at += tokens.length
  }
}

start(async () => {
  for (;;) await new Guided().run()
})
`
}

/** Where a run goes on from: token `at` of an output, which becomes `chosen`. Without one it goes on after its end. */
export interface Place { output: number; at: number; chosen?: number; text?: string; before?: TokenRecord }

interface Options { isFree?: boolean; changes?: Record<string, unknown>; onEnd?: () => void }

/** Whether the run goes on under its program or constraint, which then runs again from its beginning. */
function isGuided(run: Run, isFree: boolean): boolean {
  return isSteered(run.request.body) && !isFree
}

function plainBody(run: Run, line: Line, { at, chosen }: Place): Record<string, any> {
  const body: Record<string, any> = { ...run.request.body }
  for (const name of [...STEERING, "controller_arg", "rewind", "messages", "max_completion_tokens", "tools"]) delete body[name]
  const tokens = line.alive.slice(0, at).map(number => line.pieces[number].token ?? 0)
  const prompt = [...run.story.promptTokens, ...tokens, ...(chosen === undefined ? [] : [chosen])]
  const most = body.max_tokens && fitting(body.max_tokens, body.model ?? "", prompt.length)
  return { ...body, prompt, max_tokens: most }
}

function guidedBody(run: Run, past: Past, chosen?: number): Record<string, any> {
  const further = { controller: "jsctrl", controller_arg: guide(past.wanted(chosen)) }
  const others = (run.request.body.controllers ?? []).filter((each: unknown) => !isGuide(each))
  return { ...run.request.body, controllers: [...others, further], rewind: "event" }
}

/** A fork of a fork follows the whole text before it: the older guide has nothing to add. */
const isGuide = (each: any) => typeof each.controller_arg === "string" && each.controller_arg.includes("class Guided extends")

/** Shows the tokens before the fork as they were: the guide alone left them no choice. */
function amended(past: Past, place: Place): (record: TraceRecord) => TraceRecord {
  const paths = new Paths()
  const { path, at } = past.end
  return record => {
    const now = paths.add(record)
    if (!now || record.type !== "token") return record
    const before = past.recordAt(now)
    if (before) return { ...record, draw: before.draw, forced: before.forced, by: before.by, drafted: before.drafted }
    if (place.chosen === undefined || now.path !== path || now.at !== at) return record
    return { ...record, draw: place.before?.draw ?? record.draw, forced: true, by: YOU }
  }
}

/** Goes on from one place of a run's text, as another run. */
export function forkAt(run: Run, place: Place, { isFree = false, changes = {}, onEnd }: Options = {}): Run {
  const line = run.story.line(place.output)
  const piece = line.pieces[line.alive[place.at]]
  const from = { made: run.made, at: place.at, chosen: place.text ?? "", isFree: isFree && isSteered(run.request.body),
    odds: piece?.record?.draw?.before.top?.find(([token]) => token === place.chosen)?.[1],
    hasRule: changes.constraint !== undefined || changes.banned_phrases !== undefined }
  const common = { n: undefined, seed: run.request.body.seed ?? seedOrNew(), ...changes }
  const kind = run.kind === "trace" || run.kind === "twin" ? "complete" : run.kind
  if (isGuided(run, isFree)) {
    const past = new Past(run.records, place.output, place.chosen === undefined ? undefined : piece?.record)
    const body = { ...guidedBody(run, past, place.chosen), ...common }
    const forked = newRun(kind, run.title, { path: run.request.path, body }, { ancestor: { ...from, inherited: null }, program: run.program })
    forked.amend = amended(past, { ...place, before: piece?.record?.type === "token" ? piece.record : undefined })
    forked.selected.value = place.output
    void start(forked, onEnd)
    return forked
  }
  const inherited = inheritance(run, line, place)
  const request = { path: "v1/completions", body: { ...plainBody(run, line, place), ...common } }
  const forked = newRun(kind, run.title, request, { ancestor: { ...from, inherited }, program: isFree ? null : run.program })
  retell(forked)
  forked.content = forked.story.line(0).text
  void start(forked, onEnd)
  return forked
}

/** Goes on after the end of an output, by as many tokens as the run was allowed to have. */
export function goOn(run: Run, output: number, onEnd?: () => void): Run {
  const line = run.story.line(output)
  const more = Number(run.request.body.max_tokens) || 0
  const isAgain = isGuided(run, false) // what is there is written again, and counts
  const changes = isAgain && more ? { max_tokens: fitting(line.alive.length + more, run.request.body.model ?? "", run.story.promptTokens.length) } : {}
  return forkAt(run, { output, at: line.alive.length }, { changes, onEnd })
}

/** What was there before the fork, as it was, although it is part of the new request's prompt. */
function inheritance(run: Run, line: Line, { at, chosen, text = "" }: Place): Inherited {
  const { prompt, promptTokens, promptRecord } = run.story
  const kept = line.alive.slice(0, at).map(number => line.pieces[number])
  const before = line.pieces[line.alive[at]]?.record
  if (chosen !== undefined) {
    const record = { type: "token" as const, output: 0, step: before?.step ?? 0, token: chosen, text, spelled: text,
      forced: true, by: YOU, draw: before?.draw }
    kept.push({ text, origin: "forced", record, token: chosen })
  }
  return { prompt, promptTokens, promptRecord, pieces: kept }
}
