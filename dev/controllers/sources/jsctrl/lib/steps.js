// The steps that a script can await.
import { Constraint } from "aici/constraints"
import { movedPlace, numChanges, numTokens, submit, tokensFrom } from "aici/driver"
import { logLevel } from "aici/level"
import { Branch, MidProcessResult, PreProcessResult } from "aici/results"
import { log, toText } from "aici/text"
import { backtrackSupported, detokenize, eosToken, forkSupported, getConfig, getVar, selfSeqId, tokenize } from "aici/tokens"

/** A step: draw any token. Extend it for steps of your own. */
export class NextToken {
  finished = false
  currTokens = null

  /** Await the step; gives the tokens that were appended. */
  run() {
    return submit(this)
  }

  /** Dialect 1: asked before `midProcess`. */
  preProcess() {
    return PreProcessResult.continue_()
  }

  /** What to do: a MidProcessResult. */
  midProcess() {
    return MidProcessResult.sample()
  }

  /** What was done. */
  postProcess(backtrack, tokens) {}

  /** Whether the result is a splice that does not depend on the model. */
  isFixed() {
    return false
  }
}

/** Dialect 1: a step that only has a `preProcess`. */
export class PreToken extends NextToken {
  isPre = true
}

export class StopToken extends NextToken {
  midProcess() {
    return MidProcessResult.stop()
  }

  /** The model said nothing: there is nothing behind a stop. */
  isWaiting = true
}

export class Noop extends NextToken {
  midProcess() {
    return MidProcessResult.noop()
  }
}

/** A place in the text: where the sequence ends now. It moves with what policies change before it. */
export class Label {
  #place
  #seen = numChanges()

  constructor(ptr = numTokens()) {
    this.#place = ptr
  }

  get ptr() {
    if (this.#seen < numChanges()) this.ptr = movedPlace(this.#place, this.#seen)
    return this.#place
  }

  set ptr(place) {
    this.#place = place
    this.#seen = numChanges()
  }

  tokensSince() {
    return tokensFrom(this.ptr)
  }

  textSince() {
    return toText(detokenize(this.tokensSince()))
  }

  /** Take everything behind the label back and go on with `text`. */
  fixedAfter(text) {
    return new FixedTokens(text, this).run()
  }

  /** Take everything behind the label back. */
  rewind() {
    return this.fixedAfter("")
  }
}

/** Exactly this text, behind a label if one is given. */
export class FixedTokens extends NextToken {
  constructor(text, following = null) {
    super()
    Object.assign(this, { text, following })
  }

  isFixed() {
    return true
  }

  midProcess() {
    const backtrack = this.following ? numTokens() - this.following.ptr : 0
    if (backtrack && !backtrackSupported()) throw new Error("this engine cannot take text back")
    if (logLevel()) log((backtrack ? `BACKTRACK ${backtrack} ` : "") + `FIXED ${JSON.stringify(toText(this.text))}`)
    const tokens = tokenize(this.text)
    return backtrack || tokens.length ? MidProcessResult.splice(backtrack, tokens) : MidProcessResult.skip()
  }
}

/** A token that a constraint allows; the constraint is made when it is needed. Can be awaited again until it is
 * `finished`. `sampling` as in `Branch`. */
export class ConstrainedToken extends NextToken {
  #constraint = null
  #make
  #begin = null // where its text begins
  #seen = 0

  constructor(make, sampling = {}) {
    super()
    this.#make = make
    this.sampling = sampling
  }

  get constraint() {
    if (this.#constraint) this.#renew()
    else {
      this.#constraint = this.#make()
      this.#begin = new Label()
      this.#seen = numChanges()
    }
    return this.#constraint
  }

  /** Where policies have changed the text: begin again, with the text as it is now. Returns whether that was done. */
  #renew() {
    if (this.#seen === numChanges()) return false
    this.#seen = numChanges()
    const made = this.#make()
    if (made === this.#constraint) return false
    this.#constraint = made
    try {
      for (const token of this.#begin.tokensSince()) made.appendToken(token)
    } catch (error) {
      throw new Error(`constraint: a policy has changed the text, and what is there now does not fit: ${error.message}. Allow such text in the constraint.`)
    }
    return true
  }

  /** So much of what the constraint leaves no choice about is appended at once. */
  accepted(forced) {
    return forced
  }

  /** Tokens that will probably be drawn from here on. */
  proposed() {
    return []
  }

  midProcess() {
    const forced = getConfig("ff_tokens") ? this.accepted(this.constraint.forcedTokens()) : []
    if (forced.length) return MidProcessResult.splice(0, forced)
    const isFree = this.constraint.constructor === Constraint
    const mask = isFree ? "any" : this.constraint
    return MidProcessResult.sample({ mask, sampling: this.sampling, draft: this.proposed() })
  }

  postProcess(backtrack, tokens) {
    if (!(this.#constraint && this.#renew())) for (const token of tokens) this.constraint.appendToken(token)
    this.finished = tokens.includes(eosToken()) || this.constraint.eosForced()
  }
}

class Fork extends NextToken {
  constructor(branches) {
    super()
    this.branches = branches
  }

  midProcess() {
    return new MidProcessResult(this.branches)
  }

  postProcess(backtrack, tokens, told) {
    this.index = told.fork_group.indexOf(selfSeqId())
  }
}

/** Go on in several ways: `count` of them, or one for each Branch of a list. Gives the number of this one, from 0. */
export async function fork(count) {
  const branches = Array.isArray(count) ? count : Array.from({ length: count }, Branch.noop)
  if (!branches.length) throw new RangeError("fork(0): at least one way is needed")
  if (branches.length === 1 && !Array.isArray(count)) return 0
  if (!forkSupported()) throw new Error("this engine cannot fork")
  const step = new Fork(branches)
  await step.run()
  return step.index
}

export class TimeoutError extends Error {
  name = "TimeoutError"
}

class Wait extends NextToken {
  isWaiting = true
  #asked = null

  constructor(names, timeout) {
    super()
    Object.assign(this, { names, timeout })
  }

  midProcess() {
    const missing = this.names.find((name) => getVar(name) === null)
    if (this.names.length ? missing === undefined : this.#asked) return MidProcessResult.skip()
    if (this.timeout !== undefined && missing !== undefined && missing === this.#asked) {
      throw new TimeoutError(`variable ${missing} was not set within ${this.timeout} ms`)
    }
    this.#asked = missing ?? "time"
    return MidProcessResult.wait({ variable: missing, ms: this.timeout })
  }
}

/** Wait until all variables are set, maybe by other forks; gives their bytes. A last argument `{timeout: ms}` is how
 * long to wait for each of them; a TimeoutError says that it took longer. */
export async function waitVars(...names) {
  const options = typeof names.at(-1) === "object" ? names.pop() : {}
  if (names.length) await new Wait(names, options.timeout).run()
  return names.map(getVar)
}

/** Let other sequences run for a while. */
export async function sleep(ms) {
  await new Wait([], ms).run()
}

/** Exactly this text. */
export const fixed = (text) => new FixedTokens(text).run()

/** Stop now. */
export const stop = () => new StopToken().run()
