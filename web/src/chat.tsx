// The chat: messages, their versions, and a box to say something.

import { useEffect, useRef, useState } from "preact/hooks"
import { Answered, Branches } from "./answer"
import { models } from "./api"
import { Composer } from "./composer"
import { Shown } from "./files"
import { Notice, TextBox } from "./parts"
import { model, view } from "./settings"
import { say } from "./talk"
import { type Message, forgetMessage, path, runOf, talk, talkVersion } from "./talks"

const STARTERS = ["Tell me a short story.", "What can you do?", "Write a haiku about the sea.", "What is 19 + 23?"]

function Asked({ message, isBusy }: { message: Message; isBusy: boolean }) {
  const [draft, setDraft] = useState<string | null>(null)
  const send = () => {
    say(draft!, message.files, message.parent)
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
        {draft === null && <button class="quiet" disabled={isBusy} onClick={() => forgetMessage(talk.value, message)}>Delete</button>}
      </footer>
    </article>
  )
}

function Welcome() {
  const chosen = models.value.find(each => each.id === model.value)
  const hasTemplate = chosen?.has_chat_template !== false
  return (
    <div class="welcome">
      <h2>Talk to <em>{model.value || "a model"}</em></h2>
      <p>Each answer shows where its tokens came from. Press “Tokens” below one, and point at a token to see what else it could
        have been.</p>
      {hasTemplate ? <div class="starters">{STARTERS.map(text => <button key={text} onClick={() => say(text)}>{text}</button>)}</div> : (
        <>
          <Notice text={`${model.value} has no chat template: it continues texts.`} />
          <button class="primary" onClick={() => (view.value = "complete")}>Continue a text</button>
        </>
      )}
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
  useEffect(() => {
    const box = scroll.current!
    if (isBusy && box.scrollHeight - box.scrollTop - box.clientHeight < 200) box.scrollTop = box.scrollHeight
  }, [version])
  useEffect(() => {
    scroll.current!.scrollTop = scroll.current!.scrollHeight
  }, [of.id, messages.length])
  return (
    <div class="chat">
      <div class="scroll" ref={scroll}>
        <div class="column" role="log" aria-label="Conversation" aria-live="off">
          {!messages.length && <Welcome />}
          {messages.map(message => message.role === "user"
            ? <Asked key={message.id} message={message} isBusy={isBusy} />
            : <Answered key={message.id} message={message} isBusy={isBusy} />)}
        </div>
      </div>
      <Composer isBusy={isBusy} />
    </div>
  )
}
