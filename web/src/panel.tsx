// The panel beside a text: the token that is looked at, and how texts are drawn.

import { signal } from "@preact/signals"
import { Inspector } from "./inspector"
import { FIELDS, type Sampling, sampling, view } from "./settings"

export const panel = signal<"token" | "settings">("token")

function set(name: keyof Sampling, value: string): void {
  sampling.value = { ...sampling.value, [name]: value }
}

function Settings() {
  const reset = () => (sampling.value = Object.fromEntries(Object.keys(sampling.value).map(name => [name, ""])) as unknown as Sampling)
  return (
    <form class="settings" onSubmit={event => event.preventDefault()}>
      {view.value === "chat" && (
        <label class="whole">System prompt
          <textarea rows={3} value={sampling.value.system} placeholder="none" onInput={event => set("system", event.currentTarget.value)} /></label>
      )}
      <div class="grid">
        {FIELDS.map(({ name, label, hint, step, min }) => (
          <label key={name}>{label}
            <input type="number" step={step} min={min} placeholder={hint} value={sampling.value[name]} name={name}
              onInput={event => set(name, event.currentTarget.value)} /></label>
        ))}
        {view.value === "complete" && (
          <label>Choices
            <input type="number" min="1" step="1" placeholder="1" name="n" value={sampling.value.n} onInput={event => set("n", event.currentTarget.value)} /></label>
        )}
      </div>
      <label class="whole">Stop at, one text a line
        <textarea rows={2} value={sampling.value.stop} placeholder="nothing" onInput={event => set("stop", event.currentTarget.value)} /></label>
      <button class="quiet" type="button" onClick={reset}>Reset</button>
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
