// Talks to the server that this page came from: JSON and server-sent events, with the key if there is one. Errors are
// sentences for people.

import { signal } from "@preact/signals"
import { Turns } from "./turns"

export interface Model {
  id: string
  parent: string | null
  root?: string
  max_model_len: number | null
  state: string
  task: string | null
  has_chat_template: boolean | null
  input_modalities?: string[] | null
}

const KEY = "key"
export const key = signal(sessionStorage.getItem(KEY) ?? "")
export const needsKey = signal(false)
export const models = signal<Model[]>([])
export const trouble = signal("")

export function setKey(value: string): void {
  key.value = value
  if (value) sessionStorage.setItem(KEY, value)
  else sessionStorage.removeItem(KEY)
}

export class ApiError extends Error {
  constructor(message: string, readonly status = 0) {
    super(message)
  }
}

export function headers(more: Record<string, string> = {}): Record<string, string> {
  return key.value ? { ...more, Authorization: `Bearer ${key.value}` } : more
}

async function refusal(answer: Response): Promise<ApiError> {
  const body = await answer.text()
  let said = ""
  try {
    const read = JSON.parse(body)
    said = read.error?.message ?? read.message ?? ""
  } catch {
    // Something between here and the server answered.
  }
  if (answer.status === 401) needsKey.value = true
  const wait = answer.headers.get("retry-after")
  const later = answer.status === 429 && wait ? ` Try again in ${wait} s.` : ""
  return new ApiError((said || `The server answered ${answer.status} ${answer.statusText}`.trim()) + later, answer.status)
}

async function ask(path: string, options: RequestInit = {}): Promise<Response> {
  let answer: Response
  try {
    answer = await fetch(path, options)
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error
    throw new ApiError("The server cannot be reached. Is it still running?")
  }
  if (!answer.ok) throw await refusal(answer)
  return answer
}

/** Fetches the list of models; says what is wrong in `trouble`. */
export async function look(): Promise<void> {
  try {
    const answer = await ask("v1/models", { headers: headers() })
    models.value = (await answer.json()).data
    needsKey.value = false
    trouble.value = ""
  } catch (error) {
    models.value = []
    trouble.value = (error as Error).message
  }
}

/** Posts a body, and gives the JSON of the answer. */
export async function post(path: string, body: unknown, abort?: AbortSignal): Promise<any> {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), signal: abort }
  return (await ask(path, { ...options, body: JSON.stringify(body) })).json()
}

/** The JSON at a path. */
export async function read(path: string): Promise<any> {
  return (await ask(path, { headers: headers() })).json()
}

export async function textAt(path: string): Promise<string> {
  return (await ask(path, { headers: headers() })).text()
}

export async function traceOf(requestId: string): Promise<string> {
  return textAt(`v1/traces/${encodeURIComponent(requestId)}`)
}

/** Posts `body` and gives each event of the answer; `onStart` is told the request's id. */
export async function* stream(
  path: string, body: unknown, abort: AbortSignal, onStart: (id: string) => void,
): AsyncGenerator<any> {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), signal: abort }
  const answer = await ask(path, { ...options, body: JSON.stringify(body) })
  onStart(answer.headers.get("x-request-id") ?? "")
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""
  const turns = new Turns()
  for (;;) {
    let read: ReadableStreamReadResult<string>
    try {
      read = await reader.read()
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error
      throw new ApiError("The connection broke off before the answer was complete.")
    }
    if (read.done) throw new ApiError("The connection broke off before the answer was complete.")
    const lines = (rest + read.value).split("\n")
    rest = lines.pop()!
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue
      const data = line.slice(6)
      if (data === "[DONE]") return
      const event = JSON.parse(data)
      if (event.error) throw new ApiError(event.error.message ?? String(event.error))
      yield event
      if (turns.isOver) await turns.next()
    }
  }
}
