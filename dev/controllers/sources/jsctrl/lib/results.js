// What a step may answer, in the words of both dialects.
import { nameOf } from "aici/constraints"
import { allTokens, eosToken } from "aici/tokens"

/** Take tokens back, then append others; after a draw only if `whenSampled` has it or is empty. */
export class Splice {
  constructor(backtrack = 0, ffTokens = [], whenSampled = []) {
    if (!(backtrack >= 0)) throw new RangeError(`backtrack is ${backtrack}; a label may lie ahead of the text`)
    Object.assign(this, { backtrack, ffTokens, whenSampled })
  }

  /** Be this one and then the other, which must not depend on a draw. */
  addSplice(other) {
    if (other.whenSampled.length) throw new Error("a splice that depends on a draw cannot be added to one before it")
    const inside = Math.min(other.backtrack, this.ffTokens.length)
    this.ffTokens = [...this.ffTokens.slice(0, this.ffTokens.length - inside), ...other.ffTokens]
    this.backtrack += other.backtrack - inside
  }

  toJSON() {
    return { when_sampled: this.whenSampled, backtrack: this.backtrack, ff_tokens: this.ffTokens }
  }
}

/** One way to go on: draw among `mask` (a set, a constraint, "any"; AICI calls it `sampleMask`), or without a mask do the
 * one splice. `sampling` has parameters of this one draw, as `samplingOf` makes them; `draft` the tokens that will
 * probably be drawn from here on, which changes nothing but the time. */
export class Branch {
  constructor({ sampleMask = null, mask = sampleMask, splices = [], sampling = {}, draft = [] } = {}) {
    Object.assign(this, { mask, splices, sampling, draft })
  }

  static noop() {
    return new Branch({ splices: [new Splice()] })
  }

  /** No draw, but one splice. */
  isSplice() {
    return this.mask === null && this.splices.length === 1 && !this.splices[0].whenSampled.length
  }

  toJSON() {
    const mask = this.mask === "any" ? allTokens() : this.mask
    const draft = this.draft.length ? { draft: this.draft } : {}
    return { sample_mask: mask && nameOf(mask), splices: this.splices, temperature: null, ...this.sampling, ...draft }
  }
}

/** The answer of a step. */
export class MidProcessResult {
  isSkip = false
  isAhead = false

  constructor(branches = [], wait = null) {
    Object.assign(this, { branches, wait })
  }

  /** Draw a token of a set or of what a constraint allows. */
  static bias(set) {
    return MidProcessResult.sample({ mask: set })
  }

  /** The same with more to say: `mask`, `splices`, `sampling`, `draft` of `Branch`. */
  static sample(branch = {}) {
    return new MidProcessResult([new Branch({ mask: "any", ...branch })])
  }

  static splice(backtrack, ffTokens) {
    return new MidProcessResult([new Branch({ splices: [new Splice(backtrack, ffTokens)] })])
  }

  static stop() {
    return new MidProcessResult([])
  }

  /** Nothing for one step. */
  static noop() {
    return MidProcessResult.fork(1)
  }

  /** Nothing at all: the step is complete. */
  static skip() {
    return Object.assign(new MidProcessResult(), { isSkip: true })
  }

  /** The same by AICI's name. */
  static skipMe() {
    return MidProcessResult.skip()
  }

  get skip_me() {
    return this.isSkip
  }

  /** So many ways from here. */
  static fork(count) {
    return new MidProcessResult(Array.from({ length: count }, Branch.noop))
  }

  /** Nothing until a variable (`variable`) has a version above `newerThan`, or `ms` have passed. */
  static wait({ variable, newerThan = 0, ms }) {
    return new MidProcessResult([], { variable, newer_than: newerThan, ms })
  }

  /** Tokens to append, without waiting for the host. */
  static ahead(ffTokens) {
    return Object.assign(MidProcessResult.splice(0, ffTokens), { isAhead: true })
  }

  /** Whether a splice is all there is. */
  isSplice() {
    return this.branches.length === 1 && this.branches[0].isSplice()
  }

  onlySplice() {
    if (!this.isSplice()) throw new Error("a fixed step must give exactly one splice")
    return this.branches[0].splices[0]
  }

  toJSON() {
    return this.wait ? { wait: this.wait } : { branches: this.branches }
  }
}

// -- dialect 1 ------------------------------------------------------------------------------------------------

export class PreProcessResult {
  constructor({ isSuspended = false, numForks = 1, ffTokens = [] } = {}) {
    Object.assign(this, { isSuspended, numForks, ffTokens })
  }

  static continue_() {
    return new PreProcessResult()
  }

  static suspend() {
    return new PreProcessResult({ isSuspended: true })
  }

  static fork(numForks) {
    return new PreProcessResult({ numForks })
  }

  static ffTokens(ffTokens) {
    return new PreProcessResult({ ffTokens })
  }
}
PreProcessResult.continue = PreProcessResult.continue_

export class PostProcessResult {
  constructor(stop = false) {
    this.stop = stop
  }

  static continue_() {
    return new PostProcessResult()
  }

  static stop() {
    return new PostProcessResult(true)
  }

  /** Stop if the model said that it is done. */
  static fromTokens(tokens) {
    return new PostProcessResult(tokens.includes(eosToken()))
  }
}
PostProcessResult.continue = PostProcessResult.continue_
