// The history: conversations, runs, traces that were opened. All of it is in this browser.

import { useRef, useState } from "preact/hooks"
import { Conversations, openTalk, readTalk } from "./conversations"
import { Footer } from "./footer"
import { Icon } from "./icons"
import { Notice } from "./parts"
import { openRun } from "./programs"
import { openTraces, runs } from "./runs"
import { view } from "./settings"
import { beginTalk, talks } from "./talks"

export function Sidebar({ isOpen, onDone }: { isOpen: boolean; onDone: () => void }) {
  const file = useRef<HTMLInputElement>(null)
  const [trouble, setTrouble] = useState("")
  const read = async (files: FileList | null) => {
    try {
      for (const each of files ?? []) {
        const text = await each.text()
        if (each.name.endsWith(".json")) openTalk(readTalk(each.name, text))
        else openRun(openTraces(each.name, text)[0])
      }
      setTrouble("")
      onDone()
    } catch (error) {
      setTrouble((error as Error).message)
    }
  }
  const shown = runs.value.filter(run => run.kind !== "chat" && run.kind !== "twin")
  return (
    <nav class={isOpen ? "sidebar open" : "sidebar"} aria-label="History">
      <button class="new" onClick={() => { beginTalk(); view.value = "chat"; onDone() }}><Icon name="plus" />New conversation</button>
      {talks.value.length > 0 && <><h2>Conversations</h2><Conversations onDone={onDone} /></>}
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
      <input ref={file} type="file" accept=".json,.jsonl,.ndjson,application/x-ndjson" class="offscreen" tabIndex={-1} aria-label="Trace file"
        onChange={event => { void read(event.currentTarget.files); event.currentTarget.value = "" }} />
      <button class="quiet wide" onClick={() => file.current!.click()}>Open a trace or conversation</button>
      <Footer />
    </nav>
  )
}
