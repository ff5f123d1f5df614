// Tokens, sets of them, and the variables that all forks of a request share.
import * as host from "aici/host"
import { AssertionError, inspect, toBytes, toText } from "aici/text"

export const eosToken = () => host.eosToken()
export const selfSeqId = () => host.selfSeqId()
export const getConfig = (name) => host.getConfig(name)
export const forkSupported = () => getConfig("fork") !== 0
export const backtrackSupported = () => getConfig("backtrack") !== 0

/** The tokens of a text or of bytes; nothing is put before or behind. */
export const tokenize = (text) => host.tokenize(text instanceof Uint8Array ? text : String(text))

/** The bytes of tokens; special ones have none. */
export const detokenize = (tokens) => host.detokenize(tokens)

/** A token for people. */
export function tokenRepr(token) {
  const bytes = detokenize([token])
  return bytes.length ? JSON.stringify(toText(bytes)) : token === eosToken() ? "EOS" : `<[${token}]>`
}

export const tokensRepr = (tokens) => `[${Array.from(tokens, tokenRepr).join(", ")}]`

/** A set of tokens, empty at first. */
export class TokenSet {
  #words = new Uint32Array((host.vocabSize() + 31) >> 5)

  /** The size of the vocabulary. */
  get length() {
    return host.vocabSize()
  }

  has(token) {
    return ((this.#words[token >> 5] >>> (token & 31)) & 1) === 1
  }

  add(token) {
    this.#words[checked(token) >> 5] |= 1 << (token & 31)
    return this
  }

  delete(token) {
    this.#words[checked(token) >> 5] &= ~(1 << (token & 31))
    return this
  }

  clear() {
    this.setAll(false)
  }

  /** Fill or empty the set. */
  setAll(value) {
    this.#words.fill(value ? -1 : 0)
    const spare = (this.#words.length << 5) - this.length
    if (value && spare) this.#words[this.#words.length - 1] >>>= spare
  }

  /** Add all tokens of another set. */
  addAll(other) {
    other.#words.forEach((word, i) => (this.#words[i] |= word))
    return this
  }

  numSet() {
    let count = 0
    for (const word of this.#words) if (word) count += numBits(word)
    return count
  }

  *[Symbol.iterator]() {
    for (let i = 0; i < this.#words.length; i++) {
      for (let word = this.#words[i]; word; word &= word - 1) yield (i << 5) + 31 - Math.clz32(word & -word)
    }
  }

  toString() {
    const count = this.numSet()
    if (count > this.length / 2) return `TokenSet: all but ${this.length - count} of ${this.length} tokens`
    const shown = Array.from(this.#first(8), tokenRepr)
    return `TokenSet: {${shown.join(", ")}${count > 8 ? `, ... ${count - 8} more` : ""}}`
  }

  *#first(limit) {
    for (const token of this) {
      if (limit-- <= 0) return
      yield token
    }
  }

  /** The host's name for these tokens, good for the running step; 0 if there are none. */
  _name() {
    return host.bias(new Uint8Array(this.#words.buffer))
  }

  _overwrite(bytes) {
    new Uint8Array(this.#words.buffer).set(bytes)
  }
}

function numBits(word) {
  let bits = word - ((word >>> 1) & 0x55555555)
  bits = (bits & 0x33333333) + ((bits >>> 2) & 0x33333333)
  return Math.imul((bits + (bits >>> 4)) & 0x0f0f0f0f, 0x01010101) >>> 24
}

function checked(token) {
  if (!(token >= 0 && token < host.vocabSize())) {
    throw new RangeError(`token ${inspect(token)} is outside the vocabulary of ${host.vocabSize()}`)
  }
  return token
}

/** The set of all tokens. */
export function allTokens() {
  const set = new TokenSet()
  set.setAll(true)
  return set
}

// -- variables ------------------------------------------------------------------------------------------------

const execute = (command) => JSON.parse(host.storage(JSON.stringify(command)))
const toHex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")
const fromHex = (text) => Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16))

/** The bytes of a variable, or null. */
export function getVar(name) {
  const found = execute({ ReadVar: { name } }).ReadVar
  return found ? fromHex(found.value) : null
}

function write(name, value, op) {
  const written = { name, value: toHex(toBytes(value)), op, when_version_is: null }
  return execute({ WriteVar: written }).WriteVar.version
}

/** Set a variable to a text or bytes; gives its new version. */
export const setVar = (name, value) => write(name, value, "Set")

/** Add to a variable, or set it. */
export const appendVar = (name, value) => write(name, value, "Append")

export function checkVar(name, expected) {
  const bytes = getVar(name)
  const found = bytes && toText(bytes)
  if (found !== expected) throw new AssertionError(`variable ${name} is ${inspect(found)}; expected ${inspect(expected)}`)
}

export function checkVars(expected) {
  for (const [name, value] of Object.entries(expected)) checkVar(name, value)
}
