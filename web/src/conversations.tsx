// The list of conversations: searched, renamed, saved as files, read from files, deleted.

import { useState } from "preact/hooks"
import { Menu } from "./parts"
import { view } from "./settings"
import { download } from "./share"
import { type Message, ROOT, type Talk, bringBack, forget, newId, rename, talk, talkVersion, talks } from "./talks"
import { readCalls } from "./tools"

const MAX_MESSAGES = 5000
const FORM = "bridle-conversation"

function save(of: Talk): void {
  const { id: _, messages, ...rest } = of
  const name = of.title.replace(/[^\p{L}\p{N} -]/gu, "").trim().slice(0, 40) || "conversation"
  const text = JSON.stringify({ form: FORM, version: 1, ...rest, messages: [...messages.values()] }, null, 1)
  download(`${name}.json`, text, "application/json")
}

/** A conversation from the text of a file, under new names. Throws for another file. */
export function readTalk(name: string, text: string): Talk {
  let read: any
  try {
    read = JSON.parse(text)
  } catch {
    throw new Error(`${name} is not JSON: it is no conversation.`)
  }
  if (read?.form !== FORM || !Array.isArray(read.messages)) throw new Error(`${name} is no conversation that this page saved.`)
  if (read.messages.length > MAX_MESSAGES) throw new Error(`${name} has ${read.messages.length} messages; at most ${MAX_MESSAGES} are read.`)
  const ids = new Map<string, string>([[ROOT, ROOT], ...read.messages.map((each: any) => [String(each.id), newId()] as [string, string])])
  const of: Talk = { id: newId(), title: String(read.title ?? name), made: Date.now(), shown: {}, messages: new Map() }
  for (const each of read.messages) {
    const message: Message = {
      id: ids.get(String(each.id))!, talk: of.id, made: Number(each.made) || 0, role: each.role === "assistant" ? "assistant" : "user",
      content: String(each.content ?? ""), thoughts: String(each.thoughts ?? ""), parent: ids.get(String(each.parent)) ?? ROOT,
      files: (Array.isArray(each.files) ? each.files : []).filter((url: unknown) => typeof url === "string" && url.startsWith("data:")),
      error: String(each.error ?? ""), model: String(each.model ?? ""), ended: each.ended === "length" ? "length" : "stop",
      calls: readCalls(each.calls),
    }
    of.messages.set(message.id, message)
  }
  for (const [parent, child] of Object.entries(read.shown ?? {})) {
    const [above, shown] = [ids.get(parent), ids.get(String(child))]
    if (above && shown) of.shown[above] = shown
  }
  return of
}

export function openTalk(of: Talk): void {
  bringBack(of, [...of.messages.values()])
  talk.value = of
  view.value = "chat"
}

/** Whether a conversation has all words of a search in its title or its messages. */
function has(of: Talk, words: string[]): boolean {
  const texts = [of.title, ...[...of.messages.values()].map(each => each.content)].join("\n").toLowerCase()
  return words.every(word => texts.includes(word))
}

function Entry({ of, onDone }: { of: Talk; onDone: () => void }) {
  const [name, setName] = useState<string | null>(null)
  const isOpen = of.id === talk.value.id && view.value === "chat"
  if (name !== null) {
    const done = () => {
      rename(of, name)
      setName(null)
    }
    return (
      <li class="entry">
        <input aria-label="Title" value={name} ref={box => box?.focus()} onInput={event => setName(event.currentTarget.value)} onBlur={done}
          onKeyDown={event => event.key === "Enter" ? done() : event.key === "Escape" ? setName(null) : undefined} />
      </li>
    )
  }
  return (
    <li class="entry">
      <button class="open" aria-current={isOpen ? "true" : undefined} onClick={() => { talk.value = of; view.value = "chat"; onDone() }}>
        {of.title || "New conversation"}</button>
      <Menu label="⋯" name={`Actions for ${of.title}`}>
        <button onClick={() => setName(of.title)}>Rename</button>
        <button onClick={() => save(of)}>Export</button>
        <button onClick={() => forget(of)}>Delete</button>
      </Menu>
    </li>
  )
}

export function Conversations({ onDone }: { onDone: () => void }) {
  const [sought, setSought] = useState("")
  talkVersion.value
  const words = sought.toLowerCase().split(/\s+/).filter(Boolean)
  const found = words.length ? talks.value.filter(each => has(each, words)) : talks.value
  return (
    <>
      <input type="search" class="search" aria-label="Search conversations" placeholder="Search" value={sought}
        onInput={event => setSought(event.currentTarget.value)} />
      <ul>{found.map(each => <Entry key={each.id} of={each} onDone={onDone} />)}</ul>
      {!found.length && <p class="foot">Nothing found</p>}
    </>
  )
}
