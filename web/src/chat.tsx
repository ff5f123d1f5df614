// The chat: messages, their branches, and a box to say something.

import { useEffect, useRef, useState } from "preact/hooks"
import { models } from "./api"
import { Shown, asUrl, inWords, kindOf, kindsOf, nameOf } from "./files"
import { Icon } from "./icons"
import { Notice, TextBox } from "./parts"
import { stop } from "./runs"
import { Ancestry, Legend, RunActions } from "./runview"
import { model, view } from "./settings"
import { copy } from "./share"
import { Spoken } from "./spoken"
import { type Message, answer, path, runOf, say, show, talk, talkVersion } from "./talk"
import { Timeline } from "./timeline"
import { TokenText } from "./tokens"

const STARTERS = ["Tell me a short story.", "What can you do?", "Write a haiku about the sea.", "What is 19 + 23?"]

function Branches({ message }: { message: Message }) {
  const siblings = talk.value.messages[message.parent ?? "root"].children
  const at = siblings.indexOf(message.id)
  if (siblings.length < 2) return null
  return (
    <span class="branches" role="group" aria-label="Versions">
      <button class="quiet" aria-label="Earlier version" disabled={at === 0} onClick={() => show(message, at - 1)}>‹</button>
      <span>{at + 1}/{siblings.length}</span>
      <button class="quiet" aria-label="Later version" disabled={at === siblings.length - 1} onClick={() => show(message, at + 1)}>›</button>
    </span>
  )
}

function Asked({ message, isBusy }: { message: Message; isBusy: boolean }) {
  const [draft, setDraft] = useState<string | null>(null)
  const send = () => {
    say(draft!, message.files, message.parent ?? "root")
    setDraft(null)
  }
  return (
    <article class="message user" aria-label="You">
      {message.files.map((url, number) => <Shown key={number} url={url} number={number} />)}
      {draft === null ? <div class="said-text">{message.content}</div> : (
        <div class="editing">
          <TextBox value={draft} label="Edit the message" onInput={setDraft} onSend={send} isFocused />
          <button class="primary" onClick={send}>Send</button>
          <button class="quiet" onClick={() => setDraft(null)}>Cancel</button>
        </div>
      )}
      <footer>
        <Branches message={message} />
        {draft === null && <button class="quiet" disabled={isBusy} onClick={() => setDraft(message.content)}>Edit</button>}
      </footer>
    </article>
  )
}

function Answered({ message, isBusy }: { message: Message; isBusy: boolean }) {
  const run = runOf.get(message.id)
  const [isOpen, setOpen] = useState(false)
  const [told, setTold] = useState("")
  run?.version.value
  const line = run?.story.line(0)
  const isRunning = run?.state.value === "running"
  const again = () => answer(talk.value, talk.value.messages[message.parent!])
  const asTokens = run && line && line.pieces.length > 0
  const thoughts = run?.thoughts || message.thoughts
  return (
    <article class="message assistant" aria-label={message.model || "Model"}>
      <div class="who">{message.model}{run?.state.value === "stopped" && " · stopped"}</div>
      {run && <Ancestry run={run} />}
      {thoughts && !asTokens && <details><summary>Thoughts</summary><div class="said-text">{thoughts}</div></details>}
      {asTokens ? <TokenText run={run} line={line} hasPrompt={false} label="Answer" />
        : isRunning ? <div class="waiting" role="status"><i /><i /><i /><span class="offscreen">Waiting for the model</span></div>
          : <div class="said-text">{message.content}</div>}
      {run && line && <Spoken run={run} line={line} />}
      {(run?.error || message.error) && <Notice text={run?.error || message.error} />}
      {isOpen && run && line && (
        <div class="under">
          <Legend run={run} line={line} />
          <details><summary>Prompt, {run.story.prompt.length} tokens</summary>
            <div class="prompt-shown">{run.story.prompt.map(piece => piece.text).join("")}</div></details>
          <Timeline run={run} line={line} />
          <div class="row"><RunActions run={run} /></div>
        </div>
      )}
      <footer>
        <Branches message={message} />
        {isRunning ? <button class="quiet" onClick={() => stop(run)}>Stop</button> : (
          <>
            <button class="quiet" disabled={isBusy} onClick={again}>Regenerate</button>
            <button class="quiet" onClick={async () => {
              setTold((await copy(message.content)) ? "Copied" : "Not copied")
              setTimeout(() => setTold(""), 2000)
            }}>{told || "Copy"}</button>
          </>
        )}
        {run && <button class="quiet" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>Details</button>}
      </footer>
    </article>
  )
}

function Composer({ isBusy }: { isBusy: boolean }) {
  const [draft, setDraft] = useState("")
  const [files, setFiles] = useState<string[]>([])
  const [trouble, setTrouble] = useState("")
  const kinds = kindsOf(models.value.find(each => each.id === model.value))
  const running = path(talk.value).map(message => runOf.get(message.id)).find(run => run?.state.value === "running")
  const send = () => {
    if (isBusy || !(draft.trim() || files.length)) return
    say(draft, files)
    setDraft("")
    setFiles([])
  }
  const attach = async (given: FileList | null) => {
    try {
      for (const file of given ?? []) {
        const url = await asUrl(file, kinds)
        setFiles(before => [...before, url])
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
          {files.map((url, number) => (
            <button key={number} aria-label={`Remove ${nameOf(url, number).toLowerCase()}`} onClick={() => setFiles(files.filter((_, each) => each !== number))}>
              {kindOf(url) === "image" ? <img src={url} alt="" /> : <span>{nameOf(url, number)} ×</span>}</button>
          ))}
        </div>
      )}
      <div class="composer-box">
        {kinds.length > 0 && (
          <label class="attach" title={`Attach ${inWords(kinds)}`}>
            <input type="file" accept={kinds.map(kind => `${kind}/*`).join(",")} multiple aria-label={`Attach ${inWords(kinds)}`}
              onChange={event => { void attach(event.currentTarget.files); event.currentTarget.value = "" }} /><Icon name="clip" /></label>
        )}
        <TextBox value={draft} label="Message" placeholder="Say something" onInput={setDraft} onSend={send} sendsOnEnter id="message" isFocused={innerWidth > 800} />
        {running ? <button class="stop" onClick={() => stop(running)}>Stop</button>
          : <button class="primary" disabled={!(draft.trim() || files.length)} onClick={send}>Send</button>}
      </div>
    </div>
  )
}

export function Chat() {
  talkVersion.value
  const of = talk.value
  const messages = path(of)
  const scroll = useRef<HTMLDivElement>(null)
  const last = messages.at(-1)
  const run = last && runOf.get(last.id)
  const version = run?.version.value
  const isBusy = run?.state.value === "running"
  const chosen = models.value.find(each => each.id === model.value)
  useEffect(() => {
    const box = scroll.current!
    if (isBusy && box.scrollHeight - box.scrollTop - box.clientHeight < 200) box.scrollTop = box.scrollHeight
  }, [version])
  useEffect(() => {
    scroll.current!.scrollTop = scroll.current!.scrollHeight
  }, [of, messages.length])
  return (
    <div class="chat">
      <div class="scroll" ref={scroll}>
        <div class="column" role="log" aria-label="Conversation" aria-live="off">
          {!messages.length && (
            <div class="welcome">
              <h2>Talk to <em>{model.value || "a model"}</em></h2>
              <p>Each answer shows where its tokens came from. Point at one to see what else it could have been.</p>
              {chosen?.has_chat_template === false
                ? <Notice text={`${model.value} has no chat template: it continues texts.`} />
                : <div class="starters">{STARTERS.map(text => <button key={text} onClick={() => say(text)}>{text}</button>)}</div>}
              {chosen?.has_chat_template === false && <button class="primary" onClick={() => (view.value = "complete")}>Continue a text</button>}
            </div>
          )}
          {messages.map(message => message.role === "user"
            ? <Asked key={message.id} message={message} isBusy={isBusy} />
            : <Answered key={message.id} message={message} isBusy={isBusy} />)}
        </div>
      </div>
      <Composer isBusy={isBusy} />
    </div>
  )
}
