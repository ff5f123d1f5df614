// Text, bytes and values: how they are shown, and what the prototypes of strings and byte arrays learn.
import * as host from "aici/host"

const MAX_DEPTH = 5
const MAX_ITEMS = 100

/** The bytes of a text (UTF-8), or the bytes themselves. */
export const toBytes = (value) => (value instanceof Uint8Array ? value : host.encode(String(value)))

/** The text of bytes; what is no UTF-8 is replaced. */
export const toText = (value) => (value instanceof Uint8Array ? host.decode(value) : String(value))

/** Bytes as a string of characters 0 to 255: to be added to and searched. */
export function toBinary(bytes) {
  let text = ""
  for (const byte of bytes) text += String.fromCharCode(byte)
  return text
}

export const fromBinary = (text) => Uint8Array.from(text, (char) => char.charCodeAt(0))

function extend(target, name, value) {
  Object.defineProperty(target, name, { value, writable: true, configurable: true })
}
extend(String.prototype, "toBuffer", function () {
  return toBytes(String(this))
})
extend(String, "fromBuffer", toText)
extend(Uint8Array.prototype, "decode", function () {
  return toText(this)
})
extend(Uint8Array.prototype, "toString", function () {
  return toText(this)
})

/** A value as one would write it down. */
export function inspect(value, depth = 0, seen = []) {
  if (typeof value === "string") return JSON.stringify(value)
  if (typeof value === "bigint") return `${value}n`
  if (typeof value === "function") return `[${isClass(value) ? "class" : "function"} ${value.name || "(anonymous)"}]`
  if (value === null || typeof value !== "object") return String(value)
  if (value instanceof RegExp) return String(value)
  if (value instanceof Uint8Array) return `bytes ${JSON.stringify(toText(value))}`
  if (value instanceof Error) return describe(value)
  if (seen.includes(value)) return "[circular]"
  if (depth > MAX_DEPTH) return "[...]"
  const show = (item) => inspect(item, depth + 1, [...seen, value])
  if (Array.isArray(value) || ArrayBuffer.isView(value)) return `[${some(value).map(show).join(", ")}${rest(value.length)}]`
  if (value instanceof Set) return `Set {${some(value).map(show).join(", ")}${rest(value.size)}}`
  if (value instanceof Map) {
    return `Map {${some(value).map(([key, item]) => `${show(key)} => ${show(item)}`).join(", ")}${rest(value.size)}}`
  }
  return showObject(value, show)
}

function showObject(value, show) {
  const name = value.constructor?.name
  if (Object.hasOwn(Object.getPrototypeOf(value) ?? {}, "toString") && name !== "Object") return value.toString()
  const keys = Object.keys(value)
  const plain = (key) => (/^[A-Za-z_$][\w$]*$/.test(key) ? key : JSON.stringify(key))
  const fields = keys.slice(0, MAX_ITEMS).map((key) => `${plain(key)}: ${show(value[key])}`)
  return `${name && name !== "Object" ? name + " " : ""}{${fields.join(", ")}${rest(keys.length)}}`
}

const isClass = (value) => Function.prototype.toString.call(value).startsWith("class")
const some = (items) => Array.from(items).slice(0, MAX_ITEMS)
const rest = (length) => (length > MAX_ITEMS ? `, ... ${length - MAX_ITEMS} more` : "")

/** Where an error was thrown, line by line; calls of this library left out. */
function placesOf(error) {
  const lines = String(error.stack ?? "").split("\n").filter((line) => line.trim())
  return lines.filter((line) => !/\((aici\/|native\))/.test(line))
}

/** Where the script was when `error` was thrown at it from outside. */
export const place = (error) => placesOf(error).join("\n") || "in the library, on the script's behalf"

/** An error with the place where it was thrown. */
export function describe(error) {
  if (!(error instanceof Error)) return `Error: ${typeof error === "string" ? error : inspect(error)}`
  const theirs = placesOf(error)
  const cause = error.cause === undefined ? "" : `\ncaused by ${describe(error.cause)}`
  return [String(error).trimEnd(), ...theirs].join("\n") + cause
}

/** Print: texts as they are, other values inspected. */
export function log(...values) {
  host.print(values.map((value) => (typeof value === "string" ? value : inspect(value))).join(" ") + "\n")
}

export const console = { log, info: log, warn: log, error: log, debug: log, trace: log }

export class AssertionError extends Error {
  name = "AssertionError"
}

export function assert(condition, message = "assertion failed") {
  if (!condition) throw new AssertionError(message)
}
