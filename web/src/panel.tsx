// The panel beside a text: the token that is looked at, and how texts are drawn.

import { signal } from "@preact/signals"
import { Inspector } from "./inspector"
import { Presets } from "./presets"
import { FIELDS, type Sampling, sampling, settingsOf, usualLimit, view } from "./settings"
import { keepTalk, talk, talkVersion } from "./talks"

export const panel = signal<"token" | "settings">("token")

/** Settings of the conversation in the chat, and of all runs elsewhere. */
const now = () => (view.value === "chat" ? settingsOf(talk.value) : sampling.value)

function setAll(value: Sampling): void {
  if (view.value !== "chat" || !talk.value.messages.size) sampling.value = value
  if (view.value !== "chat") return
  talk.value.sampling = value
  if (talk.value.messages.size) keepTalk(talk.value)
  else talkVersion.value++
}

const set = (name: keyof Sampling, value: string) => setAll({ ...now(), [name]: value })

function Settings() {
  talkVersion.value
  const given = now()
  return (
    <form class="settings" onSubmit={event => event.preventDefault()}>
      <Presets given={given} onChoose={setAll} />
      {view.value === "chat" && (
        <label class="whole">System prompt
          <textarea rows={3} value={given.system} placeholder="none" onInput={event => set("system", event.currentTarget.value)} /></label>
      )}
      <div class="grid">
        {FIELDS.map(({ name, label, hint, step, min }) => (
          <label key={name}>{label}
            <input type="number" step={step} min={min} placeholder={hint || String(usualLimit())} value={given[name]} name={name}
              onInput={event => set(name, event.currentTarget.value)} /></label>
        ))}
        {view.value === "complete" && (
          <label>Choices
            <input type="number" min="1" step="1" placeholder="1" name="n" value={given.n} onInput={event => set("n", event.currentTarget.value)} /></label>
        )}
      </div>
      <label class="whole">Stop at, one text a line
        <textarea rows={2} value={given.stop} placeholder="nothing" onInput={event => set("stop", event.currentTarget.value)} /></label>
      {view.value === "chat" && talk.value.messages.size > 0 && <p class="foot">These are the settings of this conversation.</p>}
    </form>
  )
}

export function Panel({ isOpen, onClose }: { isOpen: boolean; onClose: () => void }) {
  return (
    <aside class={isOpen ? "panel open" : "panel"} aria-label="Details">
      <div class="tabs">
        <div role="tablist" aria-label="Details">
          <button role="tab" aria-selected={panel.value === "token"} onClick={() => (panel.value = "token")}>Token</button>
          <button role="tab" aria-selected={panel.value === "settings"} onClick={() => (panel.value = "settings")}>Settings</button>
        </div>
        <span class="spring" />
        <button class="quiet only-phone" aria-label="Close details" onClick={onClose}>×</button>
      </div>
      {panel.value === "token" ? <Inspector /> : <Settings />}
    </aside>
  )
}
