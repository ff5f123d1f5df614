// Conversations. Each is a tree: an edited message and an answer that was asked for again are siblings of the first one,
// and each message knows which of its children is shown.

import { signal } from "@preact/signals"
import { nameOf, partOf } from "./files"
import { type Place, forkAt } from "./fork"
import { type Run, newRun, start } from "./runs"
import { model, sampling, samplingFields, seedOrNew } from "./settings"
import { all, put, remove } from "./store"

export interface Message {
  id: string; role: "user" | "assistant" | "root"; content: string; thoughts: string; files: string[]
  parent: string | null; children: string[]; shown: number; error: string; model: string
}
export interface Talk { id: string; title: string; made: number; messages: Record<string, Message> }

const MAX_TALKS = 100
const MAX_TITLE = 48
export const talks = signal<Talk[]>([])
export const talk = signal<Talk>(newTalk())
/** Changes whenever something in the conversation does. */
export const talkVersion = signal(0)
/** The runs of this page that wrote answers, by message. */
export const runOf = new Map<string, Run>()

function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), byte => byte.toString(36)).join("")
}

function newTalk(): Talk {
  const root: Message = { id: "root", role: "root", content: "", thoughts: "", files: [], parent: null, children: [],
    shown: 0, error: "", model: "" }
  return { id: newId(), title: "", made: Date.now(), messages: { root } }
}

export function beginTalk(): void {
  talk.value = newTalk()
}

export async function loadTalks(): Promise<void> {
  const found = await all<Talk>("talks")
  for (const old of found.splice(MAX_TALKS)) void remove("talks", old.id)
  for (const message of found.flatMap(each => Object.values(each.messages))) message.files ??= earlier(message)
  talks.value = found
}

/** The pictures of a message that an earlier version of this page kept. */
function earlier(message: Message): string[] {
  return (message as unknown as { pictures?: string[] }).pictures ?? []
}

export function forget(old: Talk): void {
  talks.value = talks.value.filter(each => each.id !== old.id)
  void remove("talks", old.id)
  if (talk.value.id === old.id) beginTalk()
}

function keep(changed: Talk): void {
  talkVersion.value++
  talks.value = [changed, ...talks.value.filter(each => each.id !== changed.id)].slice(0, MAX_TALKS)
  void put("talks", changed)
}

/** The messages that are shown, the first one first. */
export function path(of: Talk): Message[] {
  const made: Message[] = []
  let now = of.messages.root
  while (now.children.length) {
    now = of.messages[now.children[Math.min(now.shown, now.children.length - 1)]]
    made.push(now)
  }
  return made
}

export function show(message: Message, shown: number): void {
  const parent = talk.value.messages[message.parent ?? "root"]
  parent.shown = Math.min(Math.max(shown, 0), parent.children.length - 1)
  keep(talk.value)
}

function add(of: Talk, parent: string, more: Partial<Message>): Message {
  const message: Message = { id: newId(), role: "user", content: "", thoughts: "", files: [], parent, children: [],
    shown: 0, error: "", model: "", ...more }
  of.messages[message.id] = message
  const above = of.messages[parent]
  above.children.push(message.id)
  above.shown = above.children.length - 1
  return message
}

function asked(of: Talk, upTo: Message): Record<string, unknown>[] {
  const made: Record<string, unknown>[] = []
  for (let now: Message | null = upTo; now && now.role !== "root"; now = of.messages[now.parent ?? "root"]) {
    const files = now.files.map(partOf)
    const content = files.length ? [...files, { type: "text", text: now.content }] : now.content
    made.unshift({ role: now.role, content })
  }
  if (sampling.value.system.trim()) made.unshift({ role: "system", content: sampling.value.system })
  return made
}

/** Says something after message `parent`, and lets the model answer. */
export function say(content: string, files: string[] = [], parent?: string): Run {
  const of = talk.value
  of.title ||= content.trim().split("\n")[0].slice(0, MAX_TITLE) || nameOf(files[0] ?? "", 0)
  const last = path(of).at(-1)?.id ?? "root"
  return answer(of, add(of, parent ?? last, { content, files }))
}

/** Lets the model answer message `to`, once more if it did already. */
export function answer(of: Talk, to: Message): Run {
  const fields = samplingFields()
  const body = { model: model.value || undefined, messages: asked(of, to), seed: seedOrNew(), ...fields }
  const run = newRun("chat", of.title, { path: "v1/chat/completions", body })
  const message = add(of, to.id, { role: "assistant", model: model.value })
  runOf.set(message.id, run)
  keep(of)
  void start(run, () => finish(of, message, run))
  return run
}

function finish(of: Talk, message: Message, run: Run): void {
  message.content = run.content
  message.thoughts = run.thoughts
  message.error = run.error
  keep(of)
}

/** Forks an answer at one of its tokens: the fork is a sibling of it. */
export function forkInChat(run: Run, place: Place, isFree: boolean): Run | null {
  const of = talk.value
  const before = Object.values(of.messages).find(message => runOf.get(message.id) === run)
  if (!before) return null
  const message = add(of, before.parent!, { role: "assistant", model: before.model })
  const forked = forkAt(run, place, { isFree, onEnd: () => finish(of, message, forked) })
  runOf.set(message.id, forked)
  keep(of)
  return forked
}
