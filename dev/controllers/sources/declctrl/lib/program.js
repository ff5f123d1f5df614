// JSON programs, read and checked: what is wrong is told with its path before anything runs.
//
// A node is an object whose one key names its kind. Here it becomes `{kind, ...fields}`. A field may be left out or be
// null if `absent` is given for it.
import { inspect } from "aici/text"

/** JSON text of `{"steps": [...]}` as a list of steps. */
export function parse(text) {
  let program
  try {
    program = JSON.parse(text)
  } catch (error) {
    throw new ProgramError(`the program is not JSON: ${error.message}`)
  }
  return fields(program, "program", { steps: { read: steps } }).steps
}

export class ProgramError extends Error {
  name = "ProgramError"
}

const wrong = (path, value, what) => new ProgramError(`${path} is ${inspect(value).slice(0, 80)}; must be ${what}`)

// -- readers: (value, path) -> checked value ------------------------------------------------------------------

function text(value, path) {
  if (typeof value !== "string") throw wrong(path, value, "a text")
  return value
}

function flag(value, path) {
  if (typeof value !== "boolean") throw wrong(path, value, "true or false")
  return value
}

function count(value, path) {
  if (!Number.isInteger(value) || value < 0) throw wrong(path, value, "a whole number from 0")
  return value
}

const listOf = (read, least = 0) => (value, path) => {
  if (!Array.isArray(value) || value.length < least) throw wrong(path, value, `a list of ${least || "any number"} or more`)
  return value.map((item, i) => read(item, `${path}[${i}]`))
}

function fields(value, path, known) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw wrong(path, value, "an object")
  for (const name of Object.keys(value)) {
    if (!(name in known)) throw new ProgramError(`${path} has a field ${name}; there are ${Object.keys(known).join(", ") || "none"}`)
  }
  const made = {}
  for (const [name, { read, absent }] of Object.entries(known)) {
    const given = value[name] ?? null
    if (given !== null) made[name] = read(given, `${path}.${name}`)
    else if (absent === undefined) throw new ProgramError(`${path} needs a field ${name}`)
    else made[name] = absent
  }
  return made
}

const node = (kinds) => (value, path) => {
  const keys = value === null || typeof value !== "object" ? [] : Object.keys(value)
  if (keys.length !== 1 || !(keys[0] in kinds)) throw wrong(path, value, `an object with one of ${Object.keys(kinds).join(", ")}`)
  return { kind: keys[0], path, ...fields(value[keys[0]], `${path}.${keys[0]}`, kinds[keys[0]]) }
}

const needed = (read) => ({ read })
const optional = (read, absent = null) => ({ read, absent })

// -- the format -----------------------------------------------------------------------------------------------

const expression = (value, path) => node(EXPRESSIONS)(value, path)
const EXPRESSIONS = {
  String: { str: needed(text) },
  Var: { var: needed(text) },
  Current: {},
  Concat: { parts: needed(listOf(expression)), list: optional(flag, false) },
  IfEq: { a: needed(expression), b: needed(expression), eq: needed(expression), neq: needed(expression) },
  Extract: {
    from: needed(expression),
    rx: needed(text),
    template: optional(text, "$1"),
    list: optional(flag, false),
  },
}

const statement = node({ Set: { var: needed(text), expr: needed(expression) } })
const ATTRIBUTES = { stmts: optional(listOf(statement), []), tag: optional(text), label: optional(text) }

const inner = (value, path) => fields(value, path, { after: needed(text), options: needed(expression) })
const step = (value, path) => {
  const made = node(STEPS)(value, path)
  const given = ["rx", "yacc", "inner"].filter((name) => made[name] && made[name].length)
  if (given.length > 1) throw new ProgramError(`${path}: ${given.join(" and ")} exclude each other`)
  return made
}
const steps = listOf(step)
const STEPS = {
  Fixed: { text: needed(expression), following: optional(text), ...ATTRIBUTES },
  Choose: { options: needed(expression), ...ATTRIBUTES },
  Gen: {
    rx: optional(text),
    yacc: optional(text),
    inner: optional(listOf(inner), []),
    stop_at: optional(text),
    max_tokens: optional(count, Infinity),
    max_words: optional(count, Infinity),
    max_bytes: optional(count, Infinity),
    mask_tags: optional(listOf(text), []), // named by the format, without effect
    ...ATTRIBUTES,
  },
  Fork: { branches: needed(listOf(listOf(step, 1), 2)) },
  Wait: { vars: needed(listOf(text)) },
  Stop: {},
}
