// What generated text must look like. Most constraints live on the host's side, where their masks are computed; a
// script may write its own by extending `Constraint`.
import * as host from "aici/host"
import { inspect, log } from "aici/text"
import { allTokens, eosToken, tokenize, tokenRepr } from "aici/tokens"
import { logLevel } from "aici/level"

const ACCEPTS = 1
const STOPPED = 2
const FAILED = 4

/** Allows everything; the base of all others. */
export class Constraint {
  /** Whether the text may end here. */
  eosAllowed() {
    return true
  }

  /** Whether nothing may follow. */
  eosForced() {
    return false
  }

  tokenAllowed(token) {
    return true
  }

  /** Tell it what was appended. */
  appendToken(token) {}

  /** Make `set` the set of tokens that may come next. */
  allowTokens(set) {
    set.setAll(true)
  }

  /** Tokens that must come next, as far as they are known. */
  forcedTokens() {
    return []
  }

  /** The host's name for what may come next, good for the running step. */
  _name() {
    const set = allTokens()
    this.allowTokens(set)
    return nameOf(set)
  }
}

/** A constraint on the host's side, from plain data such as `{regex: "a+"}`. Throws if it makes no sense. */
export class HostConstraint extends Constraint {
  #handle

  constructor(data) {
    super()
    this.#handle = host.constraint(JSON.stringify(data))
    this.#check()
  }

  #check() {
    if (host.status(this.#handle) & FAILED) throw new Error(`constraint: ${host.problem(this.#handle).trim()}`)
  }

  eosAllowed() {
    return (host.status(this.#handle) & ACCEPTS) !== 0
  }

  eosForced() {
    return (host.status(this.#handle) & STOPPED) !== 0
  }

  tokenAllowed(token) {
    if (token === eosToken()) return this.eosAllowed()
    if (this.eosForced()) return false
    const set = allTokens()
    this.allowTokens(set)
    return set.has(token)
  }

  appendToken(token) {
    if (host.detokenize([token]).length === 0) return // special tokens are no text
    if (host.commit(this.#handle, [token]) === 1) return
    const why = host.problem(this.#handle)
    throw new Error(`the constraint does not allow ${tokenRepr(token)}${why ? `: ${why}` : ""}`)
  }

  allowTokens(set) {
    set._overwrite(host.mask(this.#handle))
  }

  forcedTokens() {
    return this.eosForced() ? [] : host.forced(this.#handle)
  }

  _name() {
    this.#check()
    return host.allow(this.#handle)
  }
}

/** One of several texts. Each is tokenized by itself and followed token by token, so "Yes" and " Yes" differ. Of none
 * nothing can come: whoever draws under it gets the end, as of every constraint that allows nothing. */
export class ChooseConstraint extends Constraint {
  constructor(options) {
    super()
    if (!Array.isArray(options)) throw new TypeError(`options is ${inspect(options)}; must be a list of texts`)
    this.left = options.map(tokenize)
  }

  eosAllowed() {
    return this.left.some((tokens) => tokens.length === 0)
  }

  eosForced() {
    return this.left.length === 1 && this.left[0].length === 0
  }

  tokenAllowed(token) {
    return token === eosToken() ? this.eosAllowed() : this.left.some((tokens) => tokens[0] === token)
  }

  appendToken(token) {
    if (token === eosToken()) return
    this.left = this.left.filter((tokens) => tokens[0] === token).map((tokens) => tokens.slice(1))
  }

  allowTokens(set) {
    set.clear()
    for (const tokens of this.left) set.add(tokens.length ? tokens[0] : eosToken())
  }

  forcedTokens() {
    return this.left.length === 1 ? this.left[0] : []
  }
}

// -- by kind --------------------------------------------------------------------------------------------------

/** The pattern of a RegExp in the host's syntax. */
export function patternOf(regex) {
  if (!(regex instanceof RegExp)) return String(regex)
  const flags = [...regex.flags].filter((flag) => "ism".includes(flag)).join("")
  return (flags ? `(?${flags})` : "") + regex.source.replaceAll("\\/", "/")
}

export function regexConstraint(regex) {
  const pattern = patternOf(regex)
  if (logLevel()) log(`regex constraint: ${JSON.stringify(pattern)}`)
  return new HostConstraint({ regex: pattern })
}

/** A grammar in the yacc-like notation. */
export const cfgConstraint = (grammar) => new HostConstraint({ yacc: grammar })

/** A run of whole words of `text`, then `end`. */
export const substrConstraint = (text, end = '"') => new HostConstraint({ substring: text, end })

export const larkConstraint = (grammar) => new HostConstraint({ lark: grammar })

/** JSON that fits a schema: an object, or its text. */
export const jsonConstraint = (schema) => new HostConstraint({ json_schema: schema })

/** The host's name for a set or constraint. An empty set would leave nothing to draw: it becomes the end. */
export function nameOf(mask) {
  const name = mask._name()
  if (name) return name
  log("warning: the constraint allows no token; adding EOS")
  const end = allTokens()
  end.clear()
  return end.add(eosToken())._name()
}
