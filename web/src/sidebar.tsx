// The history: conversations, runs, traces that were opened. All of it is in this browser.

import { useRef, useState } from "preact/hooks"
import { Icon } from "./icons"
import { Notice } from "./parts"
import { openRun } from "./programs"
import { openTraces, runs } from "./runs"
import { view } from "./settings"
import { type Talk, beginTalk, forget, talk, talks } from "./talk"

function Talks({ onDone }: { onDone: () => void }) {
  const open = (each: Talk) => {
    talk.value = each
    view.value = "chat"
    onDone()
  }
  return (
    <ul>
      {talks.value.map(each => (
        <li key={each.id} class="entry">
          <button class="open" aria-current={each.id === talk.value.id && view.value === "chat" ? "true" : undefined} onClick={() => open(each)}>
            {each.title || "New conversation"}</button>
          <button class="forget quiet" aria-label={`Forget ${each.title}`} onClick={() => forget(each)}>×</button>
        </li>
      ))}
    </ul>
  )
}

export function Sidebar({ isOpen, onDone }: { isOpen: boolean; onDone: () => void }) {
  const file = useRef<HTMLInputElement>(null)
  const [trouble, setTrouble] = useState("")
  const read = async (files: FileList | null) => {
    try {
      for (const each of files ?? []) {
        const made = openTraces(each.name, await each.text())
        openRun(made[0])
      }
      setTrouble("")
      onDone()
    } catch (error) {
      setTrouble((error as Error).message)
    }
  }
  const shown = runs.value.filter(run => run.kind !== "chat")
  return (
    <nav class={isOpen ? "sidebar open" : "sidebar"} aria-label="History">
      <button class="new" onClick={() => { beginTalk(); view.value = "chat"; onDone() }}><Icon name="plus" />New conversation</button>
      {talks.value.length > 0 && <><h2>Conversations</h2><Talks onDone={onDone} /></>}
      {shown.length > 0 && (
        <>
          <h2>Runs</h2>
          <ul>
            {shown.map(run => (
              <li key={run.id} class="entry">
                <button class="open" onClick={() => { openRun(run); onDone() }}>
                  <i class={`dot ${run.state.value}`} />{run.id} · {run.title}{run.ancestor ? <Icon name="fork" /> : null}</button>
              </li>
            ))}
          </ul>
        </>
      )}
      <span class="spring" />
      {trouble && <Notice text={trouble} />}
      <input ref={file} type="file" accept=".jsonl,.ndjson,application/x-ndjson" class="offscreen" tabIndex={-1} aria-label="Trace file"
        onChange={event => { void read(event.currentTarget.files); event.currentTarget.value = "" }} />
      <button class="quiet wide" onClick={() => file.current!.click()}>Open a trace</button>
      <p class="foot"><a href="docs">API reference</a><a href="v1/models">Models</a><a href="metrics">Metrics</a><a href="health/ready">Health</a></p>
    </nav>
  )
}
