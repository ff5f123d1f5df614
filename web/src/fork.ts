// Another token at one place of a text: the request that forks there and goes on.
//
// Without a program the prompt and the tokens up to there, with the chosen one, are a prompt. With one, it runs again from
// its beginning, and a second controller beside it lets those tokens alone be drawn at their places.

import { type Run, newRun, retell, start } from "./runs"
import { seedOrNew } from "./settings"
import type { Inherited, Line } from "./story"

const STEERING = ["controller", "controllers", "constraint", "regex", "response_format"]

export const isSteered = (body: Record<string, unknown>) => STEERING.some(name => body[name] !== undefined)

function guide(tokens: number[]): string {
  return `import { MidProcessResult, NextToken, TokenSet, getTokens, start } from "aici"

const wanted = ${JSON.stringify(tokens)}
let first = -1

class Guided extends NextToken {
  midProcess() {
    if (first < 0) first = getTokens().length
    const at = getTokens().length - first
    const set = new TokenSet()
    if (at < wanted.length) set.add(wanted[at])
    else set.setAll(true)
    return MidProcessResult.bias(set)
  }
}

start(async () => {
  for (;;) await new Guided().run()
})
`
}

/** The tokens of a line before token `at`, and then `chosen`. */
function tokensTo(line: Line, at: number, chosen: number): number[] {
  return [...line.alive.slice(0, at).map(number => line.pieces[number].token ?? 0), chosen]
}

/** The request that goes on from there. */
export function forkedRequest(run: Run, line: Line, at: number, chosen: number): Record<string, any> {
  const tokens = tokensTo(line, at, chosen)
  const body: Record<string, any> = { ...run.request.body, n: undefined, seed: run.request.body.seed ?? seedOrNew() }
  if (isSteered(body) && !line.parent) {
    const further = { controller: "jsctrl", controller_arg: guide(tokens) }
    return { ...body, controllers: [...(body.controllers ?? []), further], rewind: "event" }
  }
  for (const name of [...STEERING, "controller_arg", "rewind", "messages", "max_completion_tokens"]) delete body[name]
  return { ...body, prompt: [...run.story.promptTokens, ...tokens] }
}

/** Forks a run's text at a token, and goes on. */
export function forkAt(run: Run, output: number, at: number, chosen: number, text: string, onEnd?: () => void): Run {
  const line = run.story.line(output)
  const body = forkedRequest(run, line, at, chosen)
  const isGuided = body.controllers !== undefined
  const path = isGuided ? run.request.path : "v1/completions"
  const inherited = isGuided ? null : inheritance(run, line, at, chosen, text)
  const forked = newRun(run.kind === "trace" ? "complete" : run.kind, run.title, { path, body }, {
    ancestor: { made: run.made, at, chosen: text, inherited },
    program: run.program,
  })
  retell(forked)
  if (inherited) forked.content = forked.story.line(0).text
  void start(forked, onEnd)
  return forked
}

/** What was there before the fork, as it was, although it is part of the new request's prompt. */
function inheritance(run: Run, line: Line, at: number, chosen: number, text: string): Inherited {
  const { prompt, promptTokens, promptRecord } = run.story
  const before = line.alive[at] === undefined ? undefined : line.pieces[line.alive[at]].record
  const record = { type: "token" as const, output: 0, step: before?.step ?? 0, token: chosen, text, spelled: text,
    forced: true, by: "you", draw: before?.draw }
  const kept = line.alive.slice(0, at).map(number => line.pieces[number])
  return { prompt, promptTokens, promptRecord, pieces: [...kept, { text, origin: "forced", record, token: chosen }] }
}
