// Expressions and variables. A list is a text whose items are joined by a character of its own.
import { getVar, setVar } from "aici/tokens"
import { toText } from "aici/text"
import { ProgramError } from "decl/program"

const SEPARATOR = "\uff0c"

export const itemsOf = (list) => list.split(SEPARATOR)

/** The variables as they are, or as they would be: what is set here is written only by `commit`. */
export class Scope {
  #own = new Map()

  get(name) {
    if (this.#own.has(name)) return this.#own.get(name)
    const bytes = getVar(name)
    return bytes === null ? "" : toText(bytes)
  }

  /** Run the statements of a step that generated `current`. */
  run(statements, current) {
    for (const { var: name, expr } of statements) this.#own.set(name, evaluate(expr, this, current))
    return this
  }

  commit() {
    for (const [name, value] of this.#own) setVar(name, value)
  }
}

/** The text of an expression. */
export function evaluate(node, scope, current = "") {
  const value = (part) => evaluate(part, scope, current)
  switch (node.kind) {
    case "String":
      return node.str
    case "Var":
      return scope.get(node.var)
    case "Current":
      return current
    case "Concat":
      return node.parts.map(value).join(node.list ? SEPARATOR : "")
    case "IfEq":
      return value(value(node.a) === value(node.b) ? node.eq : node.neq)
    case "Extract":
      return extract(node, value(node.from))
  }
}

function extract({ rx, template, list, path }, text) {
  let pattern
  try {
    pattern = new RegExp(rx.replaceAll("(?P<", "(?<"), "g")
  } catch (error) {
    throw new ProgramError(`${path}.Extract.rx: ${error.message}`)
  }
  const found = [...text.matchAll(pattern)].map((match) => expand(template, match))
  return list ? found.join(SEPARATOR) : (found[0] ?? "")
}

/** `$1`, `${1}`, `$name`, `${name}` and `$$` of a template. */
function expand(template, match) {
  return template.replace(/\$(?:\$|(\w+)|\{(\w+)\})/g, (whole, plain, braced) => {
    const name = plain ?? braced
    return name === undefined ? "$" : ((/^\d+$/.test(name) ? match[Number(name)] : match.groups?.[name]) ?? "")
  })
}
