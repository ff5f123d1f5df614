// Tools of the server that the model of a chat may call: which are offered, and how a call is answered.

import { signal } from "@preact/signals"
import { post, read } from "./api"
import { kept } from "./settings"

export interface Offer { name: string; description?: string; parameters?: object; error?: string }
/** A call in an answer. It has a `result` or an `error` once it is over. `arguments` is JSON as the model wrote it. */
export interface ToolCall { id: string; name: string; arguments: string; result?: string; error?: string }

/** So many answers in a row may call tools before the reader is asked again. */
const MAX_ROUNDS = 8
const MAX_CALLS = 64

/** What the server lets this user call. */
export const offers = signal<Offer[]>([])
/** The names of those that chats offer to the model. */
export const offered = kept<Record<string, boolean>>("tools", {})
/** Whether the reader allows each call. */
export const asksFirst = kept<boolean>("tools-ask", true)

export async function loadOffers(): Promise<void> {
  try {
    offers.value = (await read("v1/tools")).data
  } catch {
    offers.value = [] // a key is missing, or the server has no such route
  }
}

/** Names of functions have no dots. */
const plain = (name: string) => name.replaceAll(".", "__")

export const chosenOffers = () => offers.value.filter(each => offered.value[each.name] && !each.error)

/** The fields of a request that offer the chosen tools. */
export function toolFields(): Record<string, unknown> {
  const tools = chosenOffers().map(({ name, description, parameters }) => ({ type: "function", function: { name: plain(name), description, parameters } }))
  return tools.length ? { tools } : {}
}

/** The name by which the server knows a tool that a model calls. */
export const fullName = (name: string) => offers.value.find(each => plain(each.name) === name)?.name ?? name

const running = new Set<ToolCall>()
export const isRunning = (call: ToolCall) => running.has(call)
export const isOpen = (call: ToolCall) => call.result === undefined && call.error === undefined

/** Whether calls run without a question, after so many answers in a row with calls. */
export const runsAlone = (rounds: number) => !asksFirst.value && rounds <= MAX_ROUNDS

/** Runs a call on the server, and notes its answer. */
export async function runCall(call: ToolCall): Promise<void> {
  running.add(call)
  try {
    const answer = await post("v1/tools/call", { name: call.name, arguments: JSON.parse(call.arguments || "{}") })
    if (answer.error === undefined) call.result = answer.result
    else call.error = answer.error
  } catch (error) {
    call.error = (error as Error).message
  }
  running.delete(call)
}

/** The calls that a file has, as far as they are calls. */
export function readCalls(given: unknown): ToolCall[] | undefined {
  if (!Array.isArray(given) || !given.length) return undefined
  const textOr = (value: unknown) => (value === undefined ? undefined : String(value))
  return given.slice(0, MAX_CALLS).map((each, number) => ({ id: String(each?.id ?? `call-${number}`), name: String(each?.name ?? ""),
    arguments: String(each?.arguments ?? "{}"), result: textOr(each?.result), error: textOr(each?.error) }))
}

/** Calls, and what came of them, as messages of a request. */
export function callMessages(content: string, calls: ToolCall[]): Record<string, unknown>[] {
  const made = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name: plain(name), arguments: given } }))
  const results = calls.map(({ id, result, error }) => ({ role: "tool", tool_call_id: id, content: result ?? `Error: ${error ?? "no answer"}` }))
  return [{ role: "assistant", content: content || null, tool_calls: made }, ...results]
}
