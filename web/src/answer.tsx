// An answer of the chat: as a text with its Markdown, or token by token, with what one can do with it.

import { useEffect, useState } from "preact/hooks"
import { Calls } from "./calls"
import { keptAs } from "./keep"
import { Markdown } from "./markdown"
import { Notice, TextBox, useTold } from "./parts"
import { type Run, stop } from "./runs"
import { Ancestry, Legend, RunActions } from "./runview"
import { kept } from "./settings"
import { copy } from "./share"
import { Spoken } from "./spoken"
import { answer, goOn } from "./talk"
import { type Message, ROOT, add, childrenOf, forgetMessage, runOf, show, talk, talkVersion } from "./talks"
import { Timeline } from "./timeline"
import { TokenText } from "./tokens"

/** Whether answers are shown token by token. */
const asTokens = kept<boolean>("chat-tokens", false)

export function Branches({ message }: { message: Message }) {
  talkVersion.value
  const siblings = childrenOf(talk.value, message.parent)
  const at = siblings.indexOf(message)
  if (siblings.length < 2) return null
  return (
    <span class="branches" role="group" aria-label="Versions">
      <button class="quiet" aria-label="Earlier version" disabled={at === 0} onClick={() => show(siblings[at - 1])}>‹</button>
      <span>{at + 1}/{siblings.length}</span>
      <button class="quiet" aria-label="Later version" disabled={at === siblings.length - 1} onClick={() => show(siblings[at + 1])}>›</button>
    </span>
  )
}

/** The run that wrote an answer, read from the database if an earlier page wrote it. */
function useRun(message: Message): Run | undefined {
  talkVersion.value
  useEffect(() => {
    if (!message.run || runOf.has(message.id)) return
    void keptAs(message.run).then(run => {
      if (run) runOf.set(message.id, run)
      talkVersion.value++
    })
  }, [message.run])
  return runOf.get(message.id)
}

const ENDS: Record<string, string> = {
  length: "The answer stopped at the limit of tokens.", stopped: "The answer was stopped.", writing: "The answer is not complete.",
}

function Unfinished({ message, isBusy }: { message: Message; isBusy: boolean }) {
  talkVersion.value
  const words = ENDS[message.ended]
  if (!words) return null
  return (
    <p class="unfinished">{words}{" "}
      <button disabled={isBusy} onClick={() => goOn(talk.value, message)}>Continue</button></p>
  )
}

function Thoughts({ text, isRunning }: { text: string; isRunning: boolean }) {
  return <details class="thoughts"><summary>{isRunning ? "Thinking" : "Thoughts"}</summary><Markdown text={text} /></details>
}

function Details({ run }: { run: Run }) {
  run.version.value
  const line = run.story.line(0)
  return (
    <div class="under">
      <Legend run={run} line={line} />
      <details><summary>Prompt, {run.story.prompt.length} tokens</summary>
        <div class="prompt-shown">{run.story.prompt.map(piece => piece.text).join("")}</div></details>
      <Timeline run={run} line={line} />
      <div class="row"><RunActions run={run} /></div>
    </div>
  )
}

function Said({ message, run }: { message: Message; run?: Run }) {
  run?.version.value
  const line = run?.story.line(0)
  const isRunning = run?.state.value === "running"
  const content = run ? run.content : message.content
  const thoughts = run?.thoughts || message.thoughts
  const hasTokens = run && line && line.pieces.length > 0 && !run.request.body.continue_final_message
  if (asTokens.value && hasTokens) return <TokenText run={run} line={line} hasPrompt={false} label="Answer" />
  return (
    <>
      {thoughts && <Thoughts text={thoughts} isRunning={isRunning && !content} />}
      {content ? <Markdown text={content} />
        : isRunning && !thoughts ? <div class="waiting" role="status"><i /><i /><i /><span class="offscreen">Waiting for the model</span></div> : null}
    </>
  )
}

export function Answered({ message, isBusy }: { message: Message; isBusy: boolean }) {
  const run = useRun(message)
  const [isOpen, setOpen] = useState(false)
  const [draft, setDraft] = useState<string | null>(null)
  const [told, tell] = useTold()
  run?.version.value
  const line = run?.story.line(0)
  const isRunning = run?.state.value === "running"
  const again = () => {
    const to = talk.value.messages.get(message.parent)
    if (to) answer(talk.value, to)
  }
  const edit = () => {
    add(talk.value, message.parent ?? ROOT, { role: "assistant", content: draft!, model: message.model, ended: "stop" })
    setDraft(null)
  }
  return (
    <article class="message assistant" aria-label={message.model || "Model"}>
      <div class="who">{message.model}{run?.state.value === "stopped" && " · stopped"}</div>
      {run && <Ancestry run={run} />}
      {draft === null ? <Said message={message} run={run} /> : (
        <div class="editing">
          <TextBox value={draft} label="Edit the answer" onInput={setDraft} onSend={edit} isFocused />
          <button class="primary" onClick={edit}>Save as a version</button>
          <button class="quiet" onClick={() => setDraft(null)}>Cancel</button>
        </div>
      )}
      {message.calls && <Calls message={message} isBusy={isBusy} />}
      {run && line && <Spoken key={run.id} run={run} line={line} />}
      {(run?.error || message.error) && <Notice text={run?.error || message.error} />}
      {!isRunning && <Unfinished message={message} isBusy={isBusy} />}
      {isOpen && run && <Details run={run} />}
      <footer>
        <Branches message={message} />
        {isRunning ? <button class="quiet" onClick={() => stop(run)}>Stop</button> : (
          <>
            <button class="quiet" disabled={isBusy} onClick={again}>Regenerate</button>
            <button class="quiet" onClick={async () => tell((await copy(message.content)) ? "Copied" : "Not copied")}>{told || "Copy"}</button>
            <button class="quiet" disabled={isBusy} onClick={() => setDraft(message.content)}>Edit</button>
            <button class="quiet" disabled={isBusy} onClick={() => forgetMessage(talk.value, message)}>Delete</button>
          </>
        )}
        {run && <button class="quiet" aria-pressed={asTokens.value} onClick={() => (asTokens.value = !asTokens.value)}>Tokens</button>}
        {run && <button class="quiet" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>Details</button>}
      </footer>
    </article>
  )
}
