// Calls of tools in a chat: each is shown with its arguments and its result, and waits for the reader if he wishes so.

import { useEffect, useState } from "preact/hooks"
import { models } from "./api"
import { allow, refuse } from "./talk"
import { type Message, talk, talkVersion } from "./talks"
import { type ToolCall, asksFirst, chosenOffers, isOpen, isRunning, loadOffers, offered, offers } from "./tools"

function stateOf(call: ToolCall): string {
  if (isRunning(call)) return "running"
  if (isOpen(call)) return "waits for you"
  return call.error === undefined ? "done" : "no result"
}

/** JSON with spaces, for people. */
function spaced(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 1)
  } catch {
    return text
  }
}

export function Calls({ message, isBusy }: { message: Message; isBusy: boolean }) {
  talkVersion.value
  return (
    <ul class="calls" aria-label="Calls of tools">
      {message.calls!.map(call => (
        <li key={call.id} class={`call ${call.error === undefined ? "" : "failed"}`}>
          <p><code>{call.name}</code> <span class="told-small" role="status">{stateOf(call)}</span></p>
          <pre tabIndex={0} aria-label="Arguments">{spaced(call.arguments)}</pre>
          {!isOpen(call) && <details><summary>{call.error === undefined ? "Result" : "Error"}</summary><pre tabIndex={0}>{spaced(call.result ?? call.error ?? "")}</pre></details>}
          {isOpen(call) && !isRunning(call) && (
            <div class="row">
              <button class="primary" disabled={isBusy} onClick={() => void allow(talk.value, message, call)}>Run</button>
              <button disabled={isBusy} onClick={() => refuse(talk.value, message, call)}>Refuse</button>
            </div>
          )}
        </li>
      ))}
    </ul>
  )
}

/** The button that opens the list of tools, and says how many the model may call. Without tools there is none. */
export function ToolsChip() {
  const [isShown, setShown] = useState(false)
  const hasModels = models.value.length > 0
  useEffect(() => {
    if (hasModels) void loadOffers()
  }, [hasModels])
  if (!offers.value.length) return null
  const count = chosenOffers().length
  return (
    <div class="rules-chip">
      <button class={count ? "chip on" : "chip"} aria-expanded={isShown} onClick={() => setShown(!isShown)}>{count ? `Tools · ${count}` : "Tools"}</button>
      {isShown && (
        <div class="rules-form settings" role="group" aria-label="Tools for the model">
          {offers.value.map(({ name, description, error }) => (
            <label key={name} class="check"><input type="checkbox" checked={!error && !!offered.value[name]} disabled={!!error}
              onChange={event => (offered.value = { ...offered.value, [name]: event.currentTarget.checked })} />
              <span><code>{name}</code> {error ? `cannot be used: ${error}` : description}</span></label>
          ))}
          <label class="check"><input type="checkbox" checked={asksFirst.value} onChange={event => (asksFirst.value = event.currentTarget.checked)} />
            ask before each call</label>
        </div>
      )}
    </div>
  )
}
