// The box in which a message is written, with the files that go with it. What is not sent yet is kept for each conversation.

import { signal } from "@preact/signals"
import { useState } from "preact/hooks"
import { models } from "./api"
import { ToolsChip } from "./calls"
import { asText, asUrl, inWords, isPdf, isText, kindOf, kindsOf, nameOf } from "./files"
import { Icon } from "./icons"
import { Notice, TextBox } from "./parts"
import { RulesChip } from "./rules"
import { stop } from "./runs"
import { kept, model } from "./settings"
import { say } from "./talk"
import { path, runOf, talk, talkVersion, talks } from "./talks"

interface Attached { name: string; url?: string; text?: string }
const MAX_DRAFTS = 50
const NEW = "new"
const drafts = kept<Record<string, string>>("drafts", {})
const attached = signal<Record<string, Attached[]>>({})

/** A conversation without messages has no name yet under which its draft could be found again. */
const keyOf = () => (talks.value.some(each => each.id === talk.value.id) ? talk.value.id : NEW)

function setDraft(text: string): void {
  const { [keyOf()]: _, ...others } = drafts.value
  const rows = Object.entries(others).slice(-MAX_DRAFTS)
  drafts.value = Object.fromEntries(text ? [...rows, [keyOf(), text]] : rows)
}

/** A text file becomes a part of the message, as a block of code. */
function fenced({ name, text }: Attached): string {
  const fence = "`".repeat(Math.max(3, ...[...text!.matchAll(/`+/g)].map(found => found[0].length + 1)))
  const [, kind = ""] = name.match(/\.(?!pdf$)(\w+)$/i) ?? []
  return `${name}:\n${fence}${kind}\n${text!.replace(/\n?$/, "\n")}${fence}`
}

export function Composer({ isBusy }: { isBusy: boolean }) {
  const [trouble, setTrouble] = useState("")
  talkVersion.value
  const at = keyOf()
  const draft = drafts.value[at] ?? ""
  const files = attached.value[at] ?? []
  const setFiles = (all: Attached[]) => (attached.value = { ...attached.value, [at]: all })
  const kinds = kindsOf(models.value.find(each => each.id === model.value))
  const what = inWords(kinds)
  const running = path(talk.value).map(message => runOf.get(message.id)).find(run => run?.state.value === "running")
  const send = () => {
    if (isBusy || !(draft.trim() || files.length)) return
    const texts = files.filter(each => each.text !== undefined).map(fenced)
    setDraft("")
    setFiles([])
    say([...texts, draft].filter(Boolean).join("\n\n"), files.flatMap(each => each.url ?? []))
  }
  const attach = async (given: FileList | null) => {
    try {
      for (const file of given ?? []) {
        const read = isText(file) || isPdf(file) ? { name: file.name, text: await asText(file) } : { name: file.name, url: await asUrl(file, kinds) }
        setFiles([...(attached.value[at] ?? []), read])
      }
      setTrouble("")
    } catch (error) {
      setTrouble((error as Error).message)
    }
  }
  return (
    <div class="composer">
      {trouble && <Notice text={trouble} />}
      {files.length > 0 && (
        <div class="attached">
          {files.map(({ name, url }, number) => (
            <button key={number} aria-label={`Remove ${url ? nameOf(url, number).toLowerCase() : name}`} onClick={() => setFiles(files.filter((_, each) => each !== number))}>
              {url && kindOf(url) === "image" ? <img src={url} alt="" /> : <span>{name} ×</span>}</button>
          ))}
        </div>
      )}
      <ToolsChip />
      <RulesChip lastMessage={draft || (path(talk.value).findLast(message => message.role === "user")?.content ?? "")} />
      <div class="composer-box">
        <label class="attach" title={`Attach ${what}`}>
          <input type="file" multiple aria-label={`Attach ${what}`}
            onChange={event => { void attach(event.currentTarget.files); event.currentTarget.value = "" }} /><Icon name="clip" /></label>
        <TextBox key={at} value={draft} label="Message" placeholder="Say something" onInput={setDraft} onSend={send} sendsOnEnter id="message" isFocused={innerWidth > 800} />
        {running ? <button class="stop" onClick={() => stop(running)}>Stop</button>
          : <button class="primary" disabled={!(draft.trim() || files.length)} onClick={send}>Send</button>}
      </div>
    </div>
  )
}
