// Conversations as they are kept: each is a tree of messages. An edited message and an answer that was asked for again are
// siblings of the first one. Messages are records of their own, and the tree is made of their parents.

import { signal } from "@preact/signals"
import type { Run } from "./runs"
import type { Sampling } from "./settings"
import { all, announce, get, messagesOf, onAnnounced, put, remove } from "./store"
import type { ToolCall } from "./tools"
import { offerUndo } from "./undo"

/** How an answer ended: by its own end, the limit of tokens, the reader, or not at all. */
export type Ended = "" | "stop" | "length" | "stopped" | "writing"
export interface Message {
  id: string; talk: string; made: number; role: "user" | "assistant"; content: string; thoughts: string; files: string[]
  parent: string; error: string; model: string; ended: Ended
  /** The run of the answer in the store of runs. */
  run?: string
  /** Tools that the answer calls. */
  calls?: ToolCall[]
}
interface Kept { id: string; title: string; made: number; shown: Record<string, string>; sampling?: Sampling; rules?: Record<string, string> }
export interface Talk extends Kept { messages: Map<string, Message> }

const MAX_TALKS = 100
export const ROOT = "root"
export const talks = signal<Talk[]>([])
export const talk = signal<Talk>(newTalk())
/** Changes whenever something in the conversation does. */
export const talkVersion = signal(0)
/** The runs that wrote answers, by message. */
export const runOf = new Map<string, Run>()

export function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), byte => byte.toString(36)).join("")
}

export function newTalk(): Talk {
  return { id: newId(), title: "", made: Date.now(), shown: {}, messages: new Map() }
}

export function beginTalk(): void {
  talk.value = newTalk()
}

// -- the tree --------------------------------------------------------------------------------------------------

export function childrenOf(of: Talk, parent: string): Message[] {
  return [...of.messages.values()].filter(each => each.parent === parent).sort((a, b) => a.made - b.made || (a.id < b.id ? -1 : 1))
}

/** The messages that are shown, the first one first. */
export function path(of: Talk): Message[] {
  const made: Message[] = []
  for (let parent = ROOT; ;) {
    const children = childrenOf(of, parent)
    if (!children.length) return made
    const now = children.find(each => each.id === of.shown[parent]) ?? children.at(-1)!
    made.push(now)
    parent = now.id
  }
}

export function show(message: Message): void {
  talk.value.shown[message.parent] = message.id
  keepTalk(talk.value)
}

let lastMade = 0

export function add(of: Talk, parent: string, more: Partial<Message>): Message {
  lastMade = Math.max(lastMade + 1, Date.now())
  const message: Message = { id: newId(), talk: of.id, made: lastMade, role: "user", content: "", thoughts: "", files: [],
    parent, error: "", model: "", ended: "", ...more }
  of.messages.set(message.id, message)
  of.shown[parent] = message.id
  keepMessage(message)
  keepTalk(of)
  return message
}

// -- keeping ---------------------------------------------------------------------------------------------------

/** Messages on their way to the database. */
const going = new Set<Message>()

export function keepMessage(message: Message): void {
  going.add(message)
  void put("messages", message).then(() => {
    going.delete(message)
    announce(message.talk)
  })
}

export function keepTalk(of: Talk): void {
  talkVersion.value++
  talks.value = [of, ...talks.value.filter(each => each.id !== of.id)].slice(0, MAX_TALKS)
  const { messages: _, ...kept } = of
  void put("talks", kept).then(() => announce(of.id))
}

function discard(of: Talk, gone: Message[]): void {
  for (const message of gone) {
    of.messages.delete(message.id)
    void remove("messages", message.id)
  }
}

/** Deletes a conversation; for some seconds that can be undone. */
export function forget(old: Talk): void {
  const messages = [...old.messages.values()]
  talks.value = talks.value.filter(each => each.id !== old.id)
  if (talk.value.id === old.id) beginTalk()
  discard(old, messages)
  void remove("talks", old.id).then(() => announce(old.id))
  offerUndo(`“${old.title}” was deleted.`, () => bringBack(old, messages))
}

/** Deletes a message and what follows it; for some seconds that can be undone. */
export function forgetMessage(of: Talk, message: Message): void {
  const gone = [message]
  for (const each of gone) gone.push(...childrenOf(of, each.id))
  discard(of, gone)
  keepTalk(of)
  offerUndo(gone.length > 1 ? `${gone.length} messages were deleted.` : "The message was deleted.", () => bringBack(of, gone))
}

export function bringBack(of: Talk, messages: Message[]): void {
  for (const message of messages) {
    of.messages.set(message.id, message)
    keepMessage(message)
  }
  keepTalk(of)
  if (!talk.value.messages.size) talk.value = of
}

export function rename(of: Talk, title: string): void {
  if (title.trim()) of.title = title.trim()
  keepTalk(of)
}

// -- reading ---------------------------------------------------------------------------------------------------

const asTalk = (kept: Kept, messages: Message[]): Talk =>
  ({ ...kept, shown: kept.shown ?? {}, messages: new Map(messages.map(each => [each.id, each])) })

export async function loadTalks(): Promise<void> {
  const found = await all<Kept>("talks")
  const messages = new Map<string, Message[]>(found.map(each => [each.id, []]))
  for (const each of await all<Message>("messages")) messages.get(each.talk)?.push(each)
  for (const old of found.splice(MAX_TALKS)) {
    void remove("talks", old.id)
    for (const message of messages.get(old.id) ?? []) void remove("messages", message.id)
  }
  talks.value = found.map(each => asTalk(each, messages.get(each.id) ?? []))
  onAnnounced(id => void reread(id))
}

/** Takes over what another tab has changed. Answers that this tab is writing stay its own. */
async function reread(id: string): Promise<void> {
  const kept = await get<Kept>("talks", id)
  if (!kept) {
    talks.value = talks.value.filter(each => each.id !== id)
    return
  }
  const own = talks.value.find(each => each.id === id)
  const messages = (await messagesOf<Message>(id)).map(each => (runOf.has(each.id) && own?.messages.get(each.id)) || each)
  for (const each of going) if (each.talk === id && own?.messages.has(each.id)) messages.push(each)
  if (own) {
    own.messages = new Map(messages.map(each => [each.id, each]))
    own.title = kept.title
    for (const [parent, child] of Object.entries(kept.shown)) own.shown[parent] ??= child
    talks.value = [...talks.value]
  } else talks.value = [asTalk(kept, messages), ...talks.value].sort((a, b) => b.made - a.made)
  talkVersion.value++
}
