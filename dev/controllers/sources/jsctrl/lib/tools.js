// Calls of tools, over variables with names of their own: the engine answers into them.
import { waitVars } from "aici/steps"
import { inspect, toText } from "aici/text"
import { getVar, selfSeqId, setVar } from "aici/tokens"

let numCalls = 0

export class ToolError extends Error {
  name = "ToolError"
}

/** A call that is under way, or over. */
export class ToolCall {
  #variable

  constructor(name, args, timeout) {
    this.name = name
    this.#variable = `tool:${selfSeqId()}-${numCalls++}`
    const wanted = { name, arguments: args }
    if (timeout !== undefined) wanted.timeout = timeout / 1000
    setVar(this.#variable, JSON.stringify(wanted))
  }

  /** Whether there is an answer, or an error. */
  get isDone() {
    return getVar(this.#variable + ":answer") !== null
  }

  /** Wait for the answer; gives its text. Throws a ToolError if there is none. */
  async text() {
    const [answer] = await waitVars(this.#variable + ":answer")
    const error = getVar(this.#variable + ":error")
    if (error !== null) throw new ToolError(`tool ${inspect(this.name)}: ${toText(error)}`)
    return toText(answer)
  }

  /** Wait for the answer; gives what its JSON says. */
  async json() {
    return JSON.parse(await this.text())
  }

  /** Give it up. */
  cancel() {
    setVar(this.#variable, "")
  }
}

/** Call a tool of the server; gives a handle at once. `timeout` is in milliseconds. */
export function tool(name, args = {}, { timeout } = {}) {
  return new ToolCall(name, args, timeout)
}
