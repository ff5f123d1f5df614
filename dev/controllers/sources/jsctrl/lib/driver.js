// Between the host, which asks once a step, and the script, which awaits one step after the other.
//
// A script awaits a step (`submit`). Fixed steps do not wait for the model: their tokens are collected in `pending` and
// the script goes on at once, so several of them are one answer to the host. All others are asked for a result when
// nothing is pending, and are complete when the host has told what became of it.
import * as host from "aici/host"
import { MidProcessResult } from "aici/results"
import { describe, log } from "aici/text"

/** So many fixed tokens are handed over at once. */
const MAX_PENDING = 2048

const state = {
  program: { name: "JsCtrl", run: runScript },
  tokens: [], // of the sequence, with what is pending
  promptLength: 0,
  pending: null, // {backtrack, tokens, removed}, not handed over yet
  flushed: null, // the same, handed over in the last answer
  changes: [], // [start, removed, added]: what policies have made of this side's tokens
  entry: null, // {step, resolve, reject, asked} that the script awaits
  main: null, // set by `start`
  onNext: null, // told when the script awaits the next step
  hasRun: false, // some step was asked
  stopped: false,
  unhandled: new Map(), // reasons by promise
}

/** Tokens of this sequence so far, prompt included. */
export const getTokens = () => state.tokens.slice()
export const numTokens = () => state.tokens.length
export const tokensFrom = (index) => state.tokens.slice(index)

/** How often something else came than the script wanted, because a policy does not allow that. */
export const numChanges = () => state.changes.length

/** Where a place is now that was known when there were so many changes. One inside of what was replaced is its start. */
export function movedPlace(place, seen) {
  for (const [start, removed, added] of state.changes.slice(seen)) {
    if (place >= start + removed) place += added - removed
    else if (place > start) place = start
  }
  return place
}

/** Tokens of the prompt. It is known before the script runs. */
export const getPrompt = async () => state.tokens.slice(0, state.promptLength)
export const getPromptLen = () => state.promptLength

/** Runs a function as the controller, step by step. `instance` is the one that runs. */
export class AiciAsync {
  static instance = null

  constructor(main) {
    if (typeof main !== "function") throw new TypeError("start() needs a function: start(main), not start(main())")
    if (state.main) throw new Error("start() or test() was called before; a script has one of them")
    AiciAsync.instance = this
    state.main = run(main)
  }

  /** The step that the script awaits has appended these tokens; done when the script awaits the next one. */
  async step(tokens) {
    if (!state.entry) throw new Error("the script awaits no step")
    const { entry } = state
    state.entry = null
    await new Promise((resolve) => {
      state.onNext = resolve
      entry.resolve(tokens)
    })
  }
}

/** Run a function as the controller: when it is done, the sequence stops. */
export const start = (main) => new AiciAsync(main)

/** The same for tests: says so if it went well. */
export function test(main) {
  if (typeof main !== "function") throw new TypeError("test() needs a function: test(main), not test(main())")
  return start(async () => {
    await main()
    log("TEST OK")
  })
}

async function run(main) {
  await main()
}

/** Await a step; gives the tokens that it appended. */
export function submit(step) {
  if (state.entry) throw new Error("another step is under way: await it before the next one begins")
  return new Promise((resolve, reject) => {
    state.entry = { step, resolve, reject, asked: false }
    state.onNext?.()
    state.onNext = null
  })
}

// -- callbacks of the host ------------------------------------------------------------------------------------

/** The prompt is known: the script runs up to its first step. */
export function prompt(text) {
  const told = JSON.parse(text)
  state.tokens = told.prompt
  state.promptLength = told.prompt.length
  guarded(() => {
    finish() // `settle` tells how that went wrong
    settle()
  })
  return text
}

/** What the last answer did; gives the next one. */
export function mid(text) {
  const told = JSON.parse(text)
  return guarded(() => {
    if (told.changes) state.changes.push(...told.changes)
    if (state.flushed) verify(told)
    else apply(told)
    return JSON.stringify(decide())
  })
}

/** Promises that are rejected before anybody has said what to do then. */
export function rejected(promise, reason, isHandled) {
  if (isHandled) state.unhandled.delete(promise)
  else state.unhandled.set(promise, reason)
}

async function finish() {
  await state.program.run()
  state.stopped = true
  log(`${state.program.name}: done`)
}

async function runScript() {
  await host.run(host.argument())
  if (!state.main && !state.hasRun) throw new Error("the script called neither start() nor test()")
  await state.main
}

/** Have something else than a script of the user steer. */
export function setProgram(name, run) {
  state.program = { name, run }
}

/** Let promises run; the first rejection that nobody handles ends the sequence. */
function settle() {
  host.drain()
  for (const reason of state.unhandled.values()) throw reason
}

function guarded(action) {
  try {
    return action()
  } catch (error) {
    const text = describe(error)
    log(text)
    host.fail(text)
  }
}

// -- what the host has done -----------------------------------------------------------------------------------

/** Pending tokens were applied to `state.tokens` ahead of time: if the engine did something else, redo it. */
function verify(told) {
  const { backtrack, tokens, removed } = state.flushed
  state.flushed = null
  const same = told.backtrack === backtrack && told.tokens.length === tokens.length
  if (same && tokens.every((token, i) => token === told.tokens[i])) return
  state.tokens.length -= tokens.length
  state.tokens.push(...removed)
  replace(told.backtrack, told.tokens)
}

function apply(told) {
  replace(told.backtrack, told.tokens)
  const entry = state.entry
  if (!entry?.asked || entry.step.isWaiting) return
  complete(entry, told)
}

function complete(entry, told) {
  state.entry = null
  entry.step.currTokens = told.tokens
  entry.step.finished = told.tokens.includes(host.eosToken())
  try {
    const post = entry.step.postProcess
    // Dialect 1 told only the tokens.
    const result = post.length === 1 ? post.call(entry.step, told.tokens) : post.call(entry.step, told.backtrack, told.tokens, told)
    if (result?.stop === true) state.stopped = true
    entry.resolve(told.tokens)
  } catch (error) {
    entry.reject(error)
  }
}

/** Removes and appends; gives what was removed. */
function replace(backtrack, tokens) {
  const removed = backtrack ? state.tokens.splice(Math.max(state.tokens.length - backtrack, 0)) : []
  for (const token of tokens) state.tokens.push(token)
  return removed
}

// -- what it shall do next ------------------------------------------------------------------------------------

function decide() {
  for (;;) {
    settle()
    if (state.stopped || !state.entry) {
      if (!state.stopped) throw new Error("the script awaits something that nothing can settle any more")
      return state.pending ? flush() : MidProcessResult.stop()
    }
    const entry = state.entry
    if (state.pending && (!entry.step.isFixed() || state.pending.tokens.length >= MAX_PENDING)) return flush()
    const result = ask(entry)
    if (result) return result
  }
}

/** The step's answer; null if it is complete, or failed, without the host. */
function ask(entry) {
  state.hasRun = true
  try {
    const result = preliminary(entry) ?? entry.step.midProcess()
    if (result.isSkip) {
      complete(entry, { backtrack: 0, tokens: [] })
    } else if (entry.step.isFixed() || result.isAhead) {
      const { backtrack, ffTokens } = result.onlySplice()
      addPending(backtrack, ffTokens)
      complete(entry, { backtrack, tokens: ffTokens })
    } else {
      entry.asked = true
      return result.toJSON()
    }
  } catch (error) {
    if (state.entry === entry) state.entry = null
    entry.reject(error)
  }
  return null
}

/** Dialect 1: steps may have something to say before the model runs. */
function preliminary(entry) {
  const { step } = entry
  if (entry.hasForked) {
    step.isWaiting = false
    return step.isPre ? MidProcessResult.skip() : null
  }
  const result = step.preProcess()
  if (result.numForks > 1) {
    entry.hasForked = true
    step.isWaiting = true // the fork does not complete it
    return MidProcessResult.fork(result.numForks)
  }
  if (result.isSuspended) {
    step.isWaiting = entry.hasRested = true
    return MidProcessResult.wait({ ms: 1 })
  }
  if (entry.hasRested) step.isWaiting = false
  if (result.ffTokens.length) return MidProcessResult.ahead(result.ffTokens)
  return step.isPre ? MidProcessResult.skip() : null
}

function addPending(backtrack, tokens) {
  const removed = replace(backtrack, tokens)
  const pending = (state.pending ??= { backtrack: 0, tokens: [], removed: [] })
  const older = Math.max(backtrack - pending.tokens.length, 0)
  pending.tokens.length -= backtrack - older
  pending.tokens.push(...tokens)
  pending.backtrack += older
  pending.removed.unshift(...removed.slice(0, older))
}

function flush() {
  const { backtrack, tokens } = (state.flushed = state.pending)
  state.pending = null
  if (!backtrack && !tokens.length) {
    state.flushed = null
    return decide()
  }
  return MidProcessResult.splice(backtrack, tokens).toJSON()
}
