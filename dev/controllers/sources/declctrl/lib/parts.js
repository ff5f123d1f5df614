// What a step lets the model write: which tokens may come, when it may end, when it must.
import { ChooseConstraint, Constraint, HostConstraint } from "aici/constraints"
import { fromBinary, toBinary, toBytes, toText } from "aici/text"
import { detokenize, eosToken, TokenSet } from "aici/tokens"
import { evaluate, itemsOf } from "decl/values"

/** The part that a step makes when it begins, or would make; null for steps that write nothing. */
export function partOf(step, scope) {
  if (step.kind === "Fixed" && step.following === null) return new Text(evaluate(step.text, scope))
  if (step.kind === "Choose") return new Choice(step, itemsOf(evaluate(step.options, scope)))
  if (step.kind === "Gen") return step.inner.length ? new Inner(step, scope) : new Generated(step)
  return null
}

/** Base: a constraint, and the bytes (as a binary string) that were written under it. */
class Part {
  written = ""
  numTokens = 0
  isOver = false

  constructor(constraint) {
    this.constraint = constraint
  }

  get text() {
    return toText(fromBinary(this.written))
  }

  mayEnd() {
    return this.isOver || this.constraint.eosAllowed()
  }

  mustEnd() {
    return this.isOver || this.constraint.eosForced()
  }

  /** The tokens that may come next, the end not among them. */
  allowed() {
    const set = new TokenSet()
    if (!this.mustEnd()) this.constraint.allowTokens(set)
    return set.delete(eosToken())
  }

  forcedTokens() {
    return this.mayEnd() ? [] : this.constraint.forcedTokens()
  }

  /** Take a token; gives what has to be put in its place (bytes), or null if it can stay. */
  append(token) {
    this.constraint.appendToken(token)
    this.written += toBinary(detokenize([token]))
    this.numTokens++
    return null
  }
}

class Text extends Part {
  constructor(text) {
    super(new ChooseConstraint([text]))
  }
}

class Choice extends Part {
  constructor(step, options) {
    super(new ChooseConstraint(options))
  }

  forcedTokens() {
    const tokens = super.forcedTokens()
    return tokens.length > 1 ? tokens : []
  }
}

class Generated extends Part {
  constructor(step) {
    super(constraintOf(step))
    this.step = step
    this.stop = step.stop_at === null ? null : toBinary(toBytes(step.stop_at))
    this.#checkLimits()
  }

  append(token) {
    const before = this.written
    super.append(token)
    const kept = this.#kept(before)
    if (kept !== null) {
      this.written = before + kept
      this.isOver = true
      return fromBinary(kept)
    }
    this.#checkLimits()
    return null
  }

  /** What may stay of the last token if it goes beyond a limit, else null. */
  #kept(before) {
    const { max_bytes, max_words } = this.step
    let end = Math.min(this.written.length, max_bytes)
    for (let i = Math.max(before.length, 1); i < end; i++) {
      if (isSpace(this.written[i]) && numWords(this.written.slice(0, i)) >= max_words) end = i
    }
    return end < this.written.length ? this.written.slice(before.length, end) : null
  }

  #checkLimits() {
    const { max_bytes, max_tokens } = this.step
    const stopped = this.stop !== null && this.written.includes(this.stop)
    this.isOver ||= stopped || this.written.length >= max_bytes || this.numTokens >= max_tokens || this.step.max_words === 0
  }
}

function constraintOf({ rx, yacc }) {
  if (rx !== null) return new HostConstraint({ regex: rx })
  return yacc !== null ? new HostConstraint({ yacc }) : new Some()
}

const isSpace = (char) => char === " " || char === "\n" || char === "\t"
const numWords = (text) => text.split(/[ \n\t]+/).filter(Boolean).length

/** One or more of any character. */
class Some extends Constraint {
  #isEmpty = true

  eosAllowed() {
    return !this.#isEmpty
  }

  appendToken(token) {
    this.#isEmpty = false
  }
}

/** Free text; each time that it says one of the texts `after`, one of some options has to follow. */
class Inner extends Generated {
  #rules
  #choice = null
  #begin = 0 // of the text that is searched

  constructor(step, scope) {
    super(step)
    this.#rules = step.inner.map(({ after, options }) => ({
      after: toBinary(toBytes(after)),
      options: itemsOf(evaluate(options, scope)),
    }))
  }

  mayEnd() {
    return this.isOver || (this.#choice ? this.#choice.eosAllowed() : super.mayEnd())
  }

  mustEnd() {
    return this.isOver
  }

  allowed() {
    const set = this.#choice?.eosForced() || !this.#choice ? super.allowed() : new TokenSet()
    if (!this.#choice || this.isOver) return set
    const options = new TokenSet()
    this.#choice.allowTokens(options)
    if (this.#choice.eosAllowed()) set.addAll(super.allowed())
    return set.addAll(options.delete(eosToken()))
  }

  forcedTokens() {
    return this.#choice && !this.mayEnd() ? this.#choice.forcedTokens() : []
  }

  append(token) {
    const before = this.written.length
    if (this.#choice?.tokenAllowed(token)) this.#choice.appendToken(token)
    else if (this.#choice) this.#leave(before)
    const replaced = super.append(token)
    if (this.#choice?.eosForced()) this.#leave(this.written.length)
    return replaced ?? (this.#choice ? null : this.#search(before))
  }

  #leave(begin) {
    this.#choice = null
    this.#begin = begin
  }

  /** After the text that calls for options; what a token says beyond it is taken back. */
  #search(before) {
    const found = this.#rules
      .map(({ after, options }) => ({ end: this.written.indexOf(after, this.#begin) + after.length, after, options }))
      .filter(({ end, after }) => end >= after.length && end > before)
      .sort((a, b) => a.end - b.end)[0]
    if (!found) return null
    this.#choice = new ChooseConstraint(found.options)
    if (found.end === this.written.length) return null
    this.written = this.written.slice(0, found.end)
    return fromBinary(this.written.slice(before))
  }
}
